"""Run by `over_speculators` in speculators' own environment: its DFlash model's training step, timed on request.

usage: speculators_step.py EXPORTED INPUTS.pt DTYPE; each line on the standard input asks for a step, and its seconds
are printed.
"""

import sys
import time

import torch
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.losses.eager import ce_loss

exported, inputs_path, dtype_name = sys.argv[1:]
inputs, dtype = torch.load(inputs_path), getattr(torch, dtype_name)
config = SpeculatorModelConfig.from_pretrained(exported)
config.transformer_layer_config._attn_implementation = (
    "eager"  # its default compiles, which a CPU's short run cannot pay
)
drafter = SpeculatorModel.from_pretrained(exported, config=config, dtype=torch.float32).train()
forward = getattr(type(drafter).forward, "__wrapped__", type(drafter).forward)
print("ready", flush=True)
for _ in sys.stdin:
    drafter.zero_grad(set_to_none=True)
    started = time.perf_counter()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        _, loss, _ = forward(
            drafter, **inputs["tensors"], max_anchors=inputs["num_anchors"], loss_config={"ce": (ce_loss, 1.0)}
        )
    loss.backward()
    print(time.perf_counter() - started, flush=True)
