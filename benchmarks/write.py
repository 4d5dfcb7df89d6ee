"""The first stage's speed: `generate` against the forward alone, and against one file a conversation, side by side.

    bare           the padded forwards of the same jobs, ended after the deepest captured layer, nothing kept
    generate       a worker as `dflash generate` runs it: the same forwards, states captured, checked, summed, written
                   into shards that are flushed to disk, index rows committed
    one file each  one conversation at a time: the whole model with all hidden states, torch.save of a file each
                   (what Model Optimizer's compute_hidden_states_hf.py does)

All three do the same jobs of a finished cache, taking turns in one process; the fastest of the repeats counts, so that
the ratios survive a machine that others use. `generate` is charged with opening, flushing and committing its shards
after a few jobs, which a long run does once in a gigabyte and beside the next forwards.

    python benchmarks/write.py --cache CACHE --target TARGET [--jobs 9 --repeat 3] [--json]
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.distributed import HashStore

from dflash_cache.cache.index import cached_rows
from dflash_cache.cache.layout import read_manifest
from dflash_cache.config.settings import Config
from dflash_cache.data.samples import sample_tokens
from dflash_cache.target.dealer import Dealer
from dflash_cache.target.load import Target, load_target, text_model
from dflash_cache.target.observer import Observer
from dflash_cache.target.pipeline import pad_ids
from dflash_cache.target.prepare import Preparation, read_preparation
from dflash_cache.target.work import work

Variant = Callable[[np.ndarray, Path], None]


class _EndError(Exception):
    """Ends the bare forward after the deepest captured layer."""


class Bench:
    """The three ways over the same jobs."""

    def __init__(self, config: Config, target: Target, preparation: Preparation) -> None:
        self.config, self.target, self.preparation = config, target, preparation

    def _ids(self, job: int) -> list[np.ndarray]:
        samples = self.preparation.jobs.samples_of(job)
        return [sample_tokens(self.preparation.samples, int(sample))[0] for sample in samples]

    def num_tokens(self, jobs: np.ndarray) -> int:
        """Tokens of the jobs, without padding."""
        return sum(len(ids) for job in jobs for ids in self._ids(job))

    @torch.inference_mode()
    def bare(self, jobs: np.ndarray, folder: Path) -> None:
        """Forwards alone."""

        def end(*_: object) -> None:
            raise _EndError

        hook = self.target.layers[self.target.layer_ids[-1]].register_forward_hook(end)
        for job in jobs.tolist():
            input_ids_ST, _ = pad_ids(self._ids(job))
            with suppress(_EndError):
                text_model(self.target.model)(input_ids=input_ids_ST, use_cache=False)
        hook.remove()

    def generate(self, jobs: np.ndarray, folder: Path) -> None:
        """A worker of ours, its shards committed."""
        config = self.config.model_copy(update={"cache_dir": str(folder)})
        dealer = Dealer(HashStore())
        dealer.begin(jobs, [0] * len(self.preparation.manifest.bucket_bounds), 0, 0)
        work(config, self.target, self.preparation, dealer, Observer())
        assert cached_rows(folder).num_rows == sum(len(self.preparation.jobs.samples_of(job)) for job in jobs)

    @torch.inference_mode()
    def one_file_each(self, jobs: np.ndarray, folder: Path) -> None:
        """One conversation, one forward, one file."""
        folder.mkdir()
        for ids in (ids for job in jobs.tolist() for ids in self._ids(job)):
            input_ids_1T = torch.from_numpy(ids.astype(np.int64))[None]
            states = self.target.model(input_ids=input_ids_1T, output_hidden_states=True).hidden_states
            auxiliary = torch.cat([states[k + 1][0] for k in self.target.layer_ids[:-1]], dim=-1)
            record: dict[str, Any] = {
                "input_ids": input_ids_1T[0],
                "hidden_states": states[self.target.layer_ids[-1] + 1][0].clone(),
                "aux_hidden_states": auxiliary,
            }
            torch.save(record, folder / f"{len(list(folder.iterdir()))}.pt")


def measure(bench: Bench, jobs: np.ndarray, repeat: int) -> dict[str, float]:
    """Seconds of each variant: the fastest of the repeats, in which the variants take turns."""
    variants: dict[str, Variant] = {
        "bare": bench.bare,
        "generate": bench.generate,
        "one file each": bench.one_file_each,
    }
    seconds = dict.fromkeys(variants, math.inf)
    names = list(variants)
    bench.bare(jobs[:1], Path())  # warms up
    for turn in range(repeat):
        for name in names[turn % 3 :] + names[: turn % 3]:
            with tempfile.TemporaryDirectory() as folder:
                started = time.perf_counter()
                variants[name](jobs, Path(folder) / "out")
                seconds[name] = min(seconds[name], time.perf_counter() - started)
    return seconds


def main() -> None:
    """Print a table, and with --json one object with the ratios as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="a finished cache: its samples and jobs are taken")
    parser.add_argument("--target", required=True)
    parser.add_argument("--jobs", type=int, default=9)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    manifest = read_manifest(arguments.cache)
    config = Config.model_validate(
        {
            "cache_dir": str(arguments.cache),
            "run_dir": "unused",
            "target": {"model": arguments.target, "dtype": manifest.dtype, "layer_ids": manifest.layer_ids},
            "data": {"paths": ["unused"]},
        }
    )
    bench = Bench(config, load_target(config.target), read_preparation(config))
    jobs = np.arange(min(arguments.jobs, bench.preparation.jobs.num_jobs))
    seconds = measure(bench, jobs, arguments.repeat)
    num_tokens = bench.num_tokens(jobs)
    rates = {name: num_tokens / took for name, took in seconds.items()}
    ratios = {
        "generate_over_bare": rates["generate"] / rates["bare"],
        "generate_over_one_file_each": rates["generate"] / rates["one file each"],
    }
    table = Table(box=None, pad_edge=False)
    for title in ("", "seconds", "tokens/s", "generate over it"):
        table.add_column(title, justify="right" if title else "left")
    for name, rate in rates.items():
        table.add_row(name, f"{seconds[name]:.2f}", f"{rate:,.0f}", f"{rates['generate'] / rate:.3f}")
    console = Console(highlight=False)
    console.print(table)
    if arguments.json:
        print(json.dumps({**ratios, "tokens_per_second": rates}))


if __name__ == "__main__":
    main()
