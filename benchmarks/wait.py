"""How much of a training run is spent waiting for data, with 40,960 bytes of states a token.

The run is the real one: sampler, stream and optimizer steps of a drafter of one layer, over a synthetic cache whose
pages the system has forgotten and which is read past its page cache, as one larger than memory would be. The cache and
a target that consists of an embedding alone are made in a temporary folder. Two targets take the same bytes a token:
five captured layers of 4,096 (Qwen3-8B's size), and forty of 512, whose steps are several times as fast and so ask
that much more of the disk.

    python benchmarks/wait.py [--gigabytes 2 --threads 2 --folder DIR] [--json]

*data_wait_share*: seconds waiting for micro-batches over seconds of the steps, waiting included, of the larger of the
two targets' shares; bound 0.05. The first step, which nothing can be read ahead of, is shown apart.
"""

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from synthetic_cache import NUM_OTHER_LAYERS, VOCAB, draw_lengths, forget_pages, make_cache
from transformers import LlamaConfig

from dflash_cache.cache.state_format import StateFormat
from dflash_cache.config.dtypes import fastest_dtype
from dflash_cache.config.loading import validate_config
from dflash_cache.config.settings import Config, TargetSettings
from dflash_cache.data.buckets import quantile_bounds
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.train.loop import steps, take_step
from dflash_cache.train.setup import open_run

BOUND = 0.05
TOKEN_BYTES = 40_960
READ_AHEAD_BYTES = 1 << 28  # about three steps: what is trained on is read while it trains, not before
LONGEST = 1024


@dataclass(frozen=True)
class Shape:
    """A target's captured layers and their size."""

    num_layers: int
    hidden_size: int

    @property
    def title(self) -> str:
        """`5 × 4096`."""
        return f"{self.num_layers} × {self.hidden_size}"


SHAPES = (Shape(5, 4096), Shape(40, 512))


def make_target(folder: Path, shape: Shape) -> None:
    """A configuration, an embedding and a head: all that training reads of a target."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=shape.hidden_size,
        intermediate_size=1024,
        num_hidden_layers=shape.num_layers + NUM_OTHER_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
    )
    config.save_pretrained(folder)
    table = torch.randn(VOCAB, shape.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors = {"model.embed_tokens.weight": table, "lm_head.weight": table.clone()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def make_cold_cache(cache_dir: Path, target_dir: Path, shape: Shape, num_bytes: float) -> None:
    """Samples of conversations' lengths, which no page cache remembers."""
    lengths = draw_lengths(round(num_bytes / TOKEN_BYTES / 320), LONGEST)  # their mean length
    states = StateFormat(shape.num_layers, shape.hidden_size, "bfloat16")
    fingerprint = TargetFiles(TargetSettings(model=str(target_dir))).fingerprint()
    make_cache(cache_dir, states, lengths, quantile_bounds(lengths, 6, LONGEST), fingerprint)
    for path in cache_dir.glob("bucket-*/*.safetensors"):
        forget_pages(path)


def configure(folder: Path, threads: int) -> Config:
    """One epoch of a drafter of one layer."""
    return validate_config(
        {
            "cache_dir": str(folder / "cache"),
            "run_dir": str(folder / "run"),
            "target": {"model": str(folder / "target")},
            "data": {"paths": ["unused.jsonl"]},
            "drafter": {"num_layers": 1, "block_size": 8, "mask_token_id": VOCAB - 1},
            "train": {
                "epochs": 1,
                "token_budget": 1024,
                "accumulation": 2,
                "anchors_per_sample": 32,
                "validation_share": 0.0,
                "dtype": fastest_dtype(),
                "device": "cpu",
                "direct_io": True,
                "read_ahead_bytes": READ_AHEAD_BYTES,
                "reader_threads": threads,
            },
        },
        "the benchmark",
    )


def measure(config: Config) -> dict[str, Any]:
    """Train the epoch; its seconds, and those of them that waited."""
    records = []
    with open_run(config) as run:
        for part in steps(run):
            records.append(take_step(run, part))
            run.step += 1
    later = records[1:]
    wait = sum(record["wait"] for record in later)
    seconds = sum(record["seconds"] for record in later) + wait
    tokens = sum(record["tokens"] for record in later)
    return {
        "data_wait_share": wait / seconds,
        "wait_seconds": wait,
        "first_wait_seconds": records[0]["wait"],
        "seconds": seconds,
        "steps": len(records),
        "tokens_per_second": tokens / seconds,
        "bytes_per_second": tokens * TOKEN_BYTES / seconds,
    }


def read_rate(cache_dir: Path) -> float:
    """Bytes a second of one thread that reads the shards from the disk, 8 MiB at a time."""
    buffer, num_bytes, started = bytearray(8 << 20), 0, time.perf_counter()
    for path in sorted(cache_dir.glob("bucket-*/*.safetensors")):
        forget_pages(path)
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                num_bytes += count
    return num_bytes / (time.perf_counter() - started)


def main() -> None:
    """Print a table, and with --json one object of figures as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of each of the two caches, one after the other")
    parser.add_argument("--threads", type=int, default=2, help="that read ahead")
    parser.add_argument("--folder", help="where files are made, and removed in the end; default: the system's")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    found = {}
    for shape in SHAPES:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            folder = Path(name)
            make_target(folder / "target", shape)
            make_cold_cache(folder / "cache", folder / "target", shape, arguments.gigabytes * 1e9)
            found[shape.title] = measure(configure(folder, arguments.threads))
            found[shape.title]["disk_bytes_per_second"] = read_rate(folder / "cache")
    table = Table(
        "captured", "steps", "tokens/s", "MB/s", "disk's MB/s", "first wait", "later waits", "share", box=None
    )
    for title, figures in found.items():
        table.add_row(
            title,
            str(figures["steps"]),
            f"{figures['tokens_per_second']:,.0f}",
            f"{figures['bytes_per_second'] / 1e6:,.0f}",
            f"{figures['disk_bytes_per_second'] / 1e6:,.0f}",
            f"{figures['first_wait_seconds']:.2f} s",
            f"{figures['wait_seconds']:.3f} of {figures['seconds']:.1f} s",
            f"{100 * figures['data_wait_share']:.2f} %",
        )
    console = Console()
    console.print(table)
    share = max(figures["data_wait_share"] for figures in found.values())
    console.print(f"data_wait_share {share:.4f}, bound {BOUND}")
    if arguments.json:
        print(json.dumps({"data_wait_share": share, "by_target": found}))


if __name__ == "__main__":
    main()
