"""Run by `test_export_speculators`: vLLM's speculators loads an export, gives draft logits, and converts z-lab's form.

usage: speculators_client.py EXPORTED INPUT.pt OUTPUT.pt ZLAB_EXPORTED TARGET CONVERTED
"""

import sys
from pathlib import Path

import torch
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.convert.dflash.converter import DFlashConverter
from speculators.models.dflash import DFlashSpeculatorConfig

exported, inputs_path, out_path, zlab_exported, target, converted = sys.argv[1:]
inputs = torch.load(Path(inputs_path))
config = SpeculatorModelConfig.from_pretrained(exported)
assert isinstance(config, DFlashSpeculatorConfig)
config.transformer_layer_config._attn_implementation = "eager"  # its default compiles, which needs a compiler
drafter = SpeculatorModel.from_pretrained(exported, config=config, dtype=torch.float32).eval()
states = inputs["states"].flatten(-2)
T, anchor = states.shape[1], inputs["anchor"]
loss_mask = torch.zeros(1, T)
loss_mask[0, anchor] = 1  # it draws anchors from here: one
with torch.inference_mode():
    _, logits, _, _, indices = drafter._backbone_forward(
        hidden_states=states,
        input_ids=inputs["ids"],
        loss_mask=loss_mask,
        verifier_last_hidden_states=torch.zeros(1, T, states.shape[-1] // inputs["states"].shape[2]),
        document_ids=torch.zeros(1, T, dtype=torch.long),
        max_anchors=1,
    )
assert indices[0] == anchor
torch.save({"logits": logits[0]}, Path(out_path))
DFlashConverter().convert(zlab_exported, converted, target, validate=False)
