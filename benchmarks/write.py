"""The first stage's speed: `generate` against the forward alone, and against one file a conversation, side by side.

    bare           the padded forwards of the same jobs, ended after the deepest captured layer, nothing kept
    generate       a worker as `dflash generate` runs it: the same forwards, states captured, checked, summed, written
                   into shards that are flushed to disk, index rows committed
    one file each  one conversation at a time: the whole model with all hidden states, torch.save of a file each
                   (what Model Optimizer's compute_hidden_states_hf.py does)

Each round gives all three the same jobs of a finished cache, in another order, in one process; the medians over the
rounds of the ratios are told, so that they survive a machine whose speed drifts.

    python benchmarks/write.py --cache CACHE --target TARGET [--rounds 5 --jobs 1] [--json]
"""

import argparse
import json
import statistics
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


def measure(bench: Bench, rounds: int, num_jobs: int) -> dict[str, list[float]]:
    """Tokens per second of each variant in each round."""
    variants: dict[str, Variant] = {
        "bare": bench.bare,
        "generate": bench.generate,
        "one file each": bench.one_file_each,
    }
    rates: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for i in range(rounds + 1):  # the first round warms up
        jobs = np.arange(i * num_jobs, (i + 1) * num_jobs) % bench.preparation.jobs.num_jobs
        for name in names[i % 3 :] + names[: i % 3]:
            with tempfile.TemporaryDirectory() as folder:
                started = time.perf_counter()
                variants[name](jobs, Path(folder) / "out")
                seconds = time.perf_counter() - started
            if i:
                rates[name].append(bench.num_tokens(jobs) / seconds)
    return rates


def main() -> None:
    """Print a table, and with --json one object with the ratios as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="a finished cache: its samples and jobs are taken")
    parser.add_argument("--target", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="jobs of a round")
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
    rates = measure(bench, arguments.rounds, arguments.jobs)
    ratios = {
        f"generate_over_{other.replace(' ', '_')}": statistics.median(
            ours / theirs for ours, theirs in zip(rates["generate"], rates[other], strict=True)
        )
        for other in ("bare", "one file each")
    }
    table = Table(box=None, pad_edge=False)
    for title in ("", "tokens/s (median)", "slowest", "fastest"):
        table.add_column(title, justify="right" if title else "left")
    for name, found in rates.items():
        table.add_row(name, *(f"{value:,.0f}" for value in (statistics.median(found), min(found), max(found))))
    console = Console(highlight=False)
    console.print(table)
    for name, ratio in ratios.items():
        console.print(f"{name}: {ratio:.3f}")
    if arguments.json:
        print(json.dumps({**ratios, "tokens_per_second": {name: statistics.median(r) for name, r in rates.items()}}))


if __name__ == "__main__":
    main()
