"""Run by `test_zlab`: z-lab's own package loads an exported drafter, gives draft states and decodes.

usage: zlab_client.py PACKAGES TARGET DRAFTER INPUT.pt OUTPUT.pt
"""

import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

packages, target_dir, drafter_dir, inputs_path, out_path = sys.argv[1:]
sys.path.insert(0, packages)

from dflash import model as zlab  # noqa: E402

zlab._cuda_time = time.perf_counter  # its statistics ask CUDA for the time
inputs = torch.load(Path(inputs_path))
target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
drafter = zlab.DFlashDraftModel.from_pretrained(drafter_dir, dtype=torch.float32).eval()
with torch.inference_mode():
    states = inputs["states"]
    T, B = states.shape[1], drafter.block_size
    slots = torch.full((1, B), drafter.mask_token_id)
    slots[0, 0] = inputs["anchor"]
    normed = drafter(
        target_hidden=states.flatten(-2),
        noise_embedding=target.get_input_embeddings()(slots),
        position_ids=torch.arange(T + B)[None],
    )
    logits = target.get_output_embeddings()(normed[:, -B:])
answers = []
for prompt in inputs["prompts"]:
    stats = zlab.dflash_generate(
        drafter,
        target,
        torch.tensor([prompt]),
        max_new_tokens=inputs["max_new_tokens"],
        stop_token_ids=inputs["stop_ids"],
        temperature=0.0,
        return_stats=True,
    )
    answers.append((stats.output_ids[0, len(prompt) :].tolist(), stats.acceptance_lengths))
torch.save({"logits": logits, "answers": answers}, Path(out_path))
