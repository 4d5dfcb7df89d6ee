"""Our training step against that of speculators' DFlash model (vLLM), the same drafter on equal shapes, alternately.

SmolLM2's sizes, 4 samples of 256 tokens, 160 blocks of 8. Its step runs in its own environment (`make speculators`),
with its `eager` attention, its samples end to end in one row, and cross-entropy; its labels come from the target's last
states by a product with the head of its own, which ours does not need (it has the tokens).

    python benchmarks/over_speculators.py [--python .venv/.speculators/bin/python --dtype float32 --rounds 7] [--json]

*over_speculators*: blocks a second over its.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from step import Input, make_models, run_step
from step_sizes import SMOLLM2
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_cache.config.settings import TargetSettings
from dflash_cache.drafter.anchors import draw_anchors, make_blocks, pad_anchors
from dflash_cache.drafter.export_speculators import export_speculators

SAMPLES, TOKENS, ANCHORS = 4, 256, 40
BLOCKS = SAMPLES * ANCHORS
GOAL = 5.0


def save_target(folder: Path) -> None:
    """A target of the right sizes with random weights: of it speculators reads embedding, norm and head."""
    config = LlamaConfig(
        hidden_size=SMOLLM2.hidden_size,
        intermediate_size=SMOLLM2.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=SMOLLM2.num_attention_heads,
        num_key_value_heads=SMOLLM2.num_key_value_heads,
        vocab_size=SMOLLM2.vocab_size,
        max_position_embeddings=SMOLLM2.max_position_embeddings,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_inputs(dtype: torch.dtype) -> tuple[Input, dict[str, torch.Tensor]]:
    """The same states and tokens for both: samples side by side, and end to end. Their second halves are supervised."""
    states = torch.randn(SAMPLES, TOKENS, len(SMOLLM2.target_layer_ids), SMOLLM2.hidden_size)
    ids = torch.randint(SMOLLM2.vocab_size, (SAMPLES, TOKENS))
    mask = (torch.arange(TOKENS) >= TOKENS // 2).expand(SAMPLES, -1)
    anchors = [draw_anchors(row.numpy(), ANCHORS, (0, 0, sample)) for sample, row in enumerate(mask)]
    ours = Input(states.to(dtype), make_blocks(ids, mask, pad_anchors(anchors), SMOLLM2.block_size))
    theirs = {
        "hidden_states": states.flatten(2).flatten(0, 1)[None],
        "input_ids": ids.flatten()[None],
        "loss_mask": mask.flatten()[None].float(),
        "verifier_last_hidden_states": torch.randn(1, SAMPLES * TOKENS, SMOLLM2.hidden_size),
        "document_ids": torch.arange(SAMPLES).repeat_interleave(TOKENS)[None],
    }
    return ours, theirs


def compare(python: str, dtype_name: str, rounds: int) -> dict[str, float]:
    """Both rates, and the median of the rounds' ratios."""
    dtype = getattr(torch, dtype_name)
    drafter, frozen = make_models(SMOLLM2, dtype, torch.device("cpu"))
    ours, theirs = make_inputs(dtype)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save_target(folder / "target")
        export_speculators(drafter, TargetSettings(model=str(folder / "target")), folder / "drafter", "float32")
        torch.save({"tensors": theirs, "num_anchors": BLOCKS}, folder / "inputs.pt")
        script = Path(__file__).with_name("speculators_step.py")
        command = [python, str(script), str(folder / "drafter"), str(folder / "inputs.pt"), dtype_name]
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            while process.stdout.readline().strip() != "ready":
                assert process.poll() is None, "speculators' model did not load"
            pairs = []
            for _ in range(rounds + 2):  # the first two warm up
                own = run_step("ours", drafter, frozen, ours)
                process.stdin.write("\n")
                process.stdin.flush()
                pairs.append((own, float(process.stdout.readline())))
            process.stdin.close()
    own_seconds, their_seconds = (statistics.median(times) for times in zip(*pairs[2:], strict=True))
    return {
        "over_speculators": statistics.median(their / own for own, their in pairs[2:]),
        "blocks_per_second": BLOCKS / own_seconds,
        "speculators_blocks_per_second": BLOCKS / their_seconds,
    }


def main() -> None:
    """Print a table, and with --json one object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=".venv/.speculators/bin/python")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    figures = compare(arguments.python, arguments.dtype, arguments.rounds)
    table = Table("figure", f"{arguments.dtype}, cpu", "goal", box=None)
    for name, value in figures.items():
        table.add_row(name, f"{value:,.2f}", f"≥ {GOAL}" if name == "over_speculators" else "")
    Console().print(table)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
