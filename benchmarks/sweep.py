"""Four small drafters over one cache: one sweep that reads each batch once, against four runs in turn.

`bytes_over_one_run`: bytes of states that the sweep reads over those of one of its runs alone. `shared_over_separate`:
seconds of `dflash sweep` over those of four `dflash train`, whole commands, one after the other. Each of the four must
end in the same weights, to the bit, either way; if one does not, the benchmark fails. The cache is the demo's, or that
of any configuration.

    make demo && python benchmarks/sweep.py configs/demo.yaml [--epochs 1] [--json]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

from dflash_cache.cache.reader import Batch, CacheReader
from dflash_cache.config.loading import dump_config, load_config
from dflash_cache.config.sweep import Sweep, SweepRun, load_sweep
from dflash_cache.train.checkpoint import latest_path, load_checkpoint
from dflash_cache.train.loop import train
from dflash_cache.train.metrics import Sink
from dflash_cache.train.sweep import run_sweep

GOALS = {"bytes_over_one_run": 1.0, "shared_over_separate": 0.9}
GRID = {"train.learning_rate": [1e-3, 3e-3], "objective.weights": ["decay", "dpace"]}


def make_sweep(config_path: Path, folder: Path, num_epochs: int, name: str) -> Sweep:
    """Four drafters of one layer and few anchors over the configuration's cache, in `folder`/`name`."""
    changes = [
        "drafter.num_layers=1", "train.anchors_per_sample=4", "train.token_budget=2048", "train.accumulation=2",
        "train.max_steps=null", f"train.epochs={num_epochs}", "train.validate_every=1000000", "train.checkpoint_every=1000000",
        "objective.max_slots=null", "objective.gamma=null",
    ]  # fmt: skip
    (folder / "base.yaml").write_text(dump_config(load_config(config_path, changes)))
    tree = {"base": "base.yaml", "sweep_dir": str(folder / name), "mode": "together", "grid": GRID}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return load_sweep(folder / f"{name}.yaml")


@contextmanager
def no_sinks(run: SweepRun) -> Iterator[Sequence[Sink]]:
    """Nothing is shown."""
    yield []


def count_bytes(config_path: Path, folder: Path, num_epochs: int) -> tuple[int, int]:
    """Bytes of states read by the sweep, and by one of its runs alone."""
    counted = [0]
    read_batch = CacheReader.read_batch

    def counting(self: CacheReader, rows: Any) -> Batch:
        batch = read_batch(self, rows)
        counted[-1] += int(batch.length.sum()) * batch.hidden_STLH[0, 0].nbytes
        return batch

    CacheReader.read_batch = counting  # type: ignore[method-assign]
    try:
        sweep = make_sweep(config_path, folder, num_epochs, "counted")
        run_sweep(sweep, no_sinks)
        counted.append(0)
        train(sweep.runs[0].config.model_copy(update={"run_dir": str(folder / "one")}), [])
    finally:
        CacheReader.read_batch = read_batch  # type: ignore[method-assign]
    return counted[0], counted[1]


def time_command(*arguments: object) -> float:
    """Seconds of one `dflash` command."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "dflash_cli", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def time_both(config_path: Path, folder: Path, num_epochs: int) -> tuple[float, float]:
    """Seconds of the sweep, and of its runs as commands in turn; raises if any weight differs."""
    shared = make_sweep(config_path, folder, num_epochs, "shared")
    separate = make_sweep(config_path, folder, num_epochs, "separate")
    seconds = 0.0
    for run in separate.runs:
        path = folder / f"{run.name}.yaml"
        path.write_text(dump_config(run.config))
        seconds += time_command("train", path)
    shared_seconds = time_command("sweep", folder / "shared.yaml")
    for one, other in zip(shared.runs, separate.runs, strict=True):
        weights, expected = (_weights(run) for run in (one, other))
        if any(not torch.equal(tensor, expected[name]) for name, tensor in weights.items()):
            raise AssertionError(f"{one.name} has other weights when trained alone")
    return shared_seconds, seconds


def _weights(run: SweepRun) -> dict[str, torch.Tensor]:
    path = latest_path(Path(run.config.run_dir))
    assert path is not None
    return load_checkpoint(path).drafter


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shared_bytes, one_bytes = count_bytes(options.config, Path(folder), options.epochs)
        shared_seconds, seconds = time_both(options.config, Path(folder), options.epochs)
    figures = {
        "bytes_over_one_run": shared_bytes / one_bytes,
        "shared_over_separate": shared_seconds / seconds,
        "shared_seconds": shared_seconds,
        "separate_seconds": seconds,
    }
    table = Table(box=None)
    for title in ("figure", "measured", "at most"):
        table.add_column(title, justify="left" if title == "figure" else "right")
    for name, value in figures.items():
        table.add_row(name, f"{value:.3f}", str(GOALS.get(name, "")))
    Console().print(table)
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
