"""What taking back rejected drafts costs a target with recurrent layers, by how wide a pass may become.

Recurrent states cannot be cut: the cache goes back to before the block, and the accepted tokens are read again, in
front of the next block while the pass stays within `decode.rows.WIDEST` tokens, else in a pass of their own. Decoded is
a random target of Qwen3.5's or Falcon-H1's kind (8 layers of 1,024) with blocks of 16 slots, and as many drafts are
kept as a drafter would have accepted whose slots are right with a fixed probability each. Widths come alternating.

    python benchmarks/reread.py [--family qwen3.5 --dtype bfloat16 --right 0.8 --threads 2 --passes 40] [--json]

*over_nothing_taken_back*: seconds of the blocks over those of the same blocks with the cache left to go on from wrong
states; *passes*: passes of the target over blocks verified, the ratio where a pass costs the same for any few tokens.
"""

import argparse
import json
import time
from types import SimpleNamespace
from typing import Any, cast

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PretrainedConfig

from dflash_cache.decode import rows
from dflash_cache.decode.past import Past
from dflash_cache.target.load import DTYPES, Target

HONEST = Past.can_cut
PRETENDED = property(lambda past: True)  # wrong answers, at the cost that recurrent layers would have if they could cut
WIDTHS = (0, 16, 32, 48, 64, 96, 128)
VOCAB, BLOCK, PROMPT = 32_000, 16, 200
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3.5": transformers.Qwen3_5TextConfig(
        **SIZES,
        intermediate_size=3584,
        head_dim=256,
        layer_types=[*["linear_attention"] * 3, "full_attention"] * 2,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
    ),
    "falcon-h1": transformers.FalconH1Config(
        **SIZES, intermediate_size=2048, head_dim=128, mamba_d_ssm=1536, mamba_n_heads=24, mamba_d_head=64
    ),
}


def make_target(family: str, dtype: str) -> Target:
    """A model with what decoding asks of a target."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=DTYPES[dtype]).eval()
    return cast(Target, SimpleNamespace(model=model, device=torch.device("cpu"), config=CONFIGS[family]))


def draw_counts(num_passes: int, right: float) -> list[int]:
    """Tokens that each pass yields."""
    stands = torch.rand(num_passes, BLOCK - 1, generator=torch.Generator().manual_seed(1)) < right
    return [1 + int(count) for count in stands.long().cumprod(dim=1).sum(dim=1)]


@torch.inference_mode()
def decode(target: Target, counts: list[int]) -> tuple[float, rows.Reread]:
    """Seconds for the blocks behind a prompt, and what was read again."""
    generator = torch.Generator().manual_seed(2)
    row = rows.OneRow(target, torch.randint(VOCAB, (PROMPT,), generator=generator).tolist(), takes_back=True)
    row.read_prompts()
    blocks = torch.randint(VOCAB, (len(counts), BLOCK), generator=generator).tolist()
    began = time.perf_counter()
    for block, count in zip(blocks, counts, strict=True):
        row.read_blocks([block])
        row.keep([count])
    return time.perf_counter() - began, row.reread


def measure(target: Target, counts: list[int], repeats: int) -> list[dict[str, float]]:
    """The best of each width's times, over that of taking nothing back."""
    seconds: dict[int, list[float]] = {width: [] for width in (*WIDTHS, -1)}
    reread: dict[int, rows.Reread] = {}
    for _ in range(repeats):
        for width, found in seconds.items():
            rows.WIDEST = width
            Past.can_cut = PRETENDED if width == -1 else HONEST
            spent, reread[width] = decode(target, counts)
            found.append(spent)
    return [
        {
            "width": width,
            "over_nothing_taken_back": min(seconds[width]) / min(seconds[-1]),
            "passes": 1 + reread[width].passes / len(counts),
            "reread_tokens": reread[width].tokens / len(counts),
        }
        for width in WIDTHS
    ]


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=list(CONFIGS), default="qwen3.5")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--right", type=float, default=0.8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--passes", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    counts = draw_counts(options.passes, options.right)
    found = measure(make_target(options.family, options.dtype), counts, options.repeats)
    figures: dict[str, Any] = {**vars(options), "acceptance_length": sum(counts) / len(counts), "widths": found}
    if options.json:
        print(json.dumps(figures))
        return
    title = f"{options.family}, {options.dtype}, acceptance length {figures['acceptance_length']:.2f}"
    table = Table(box=None, title=title, title_justify="left")
    for name in found[0]:
        table.add_column(name, justify="right")
    for row in found:
        table.add_row(f"{row['width']:.0f}", *(f"{value:.2f}" for value in [*row.values()][1:]))
    Console().print(table)


if __name__ == "__main__":
    main()
