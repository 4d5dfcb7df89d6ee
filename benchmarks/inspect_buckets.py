"""How long `dflash inspect-buckets` takes over a cache of a million samples, all orders compared.

*inspect_seconds*: the whole command in a process of its own, the middle of three runs (goal: under 5).

    python benchmarks/inspect_buckets.py [--samples 1000000] [--json]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from order import draw_lengths, make_manifest

from dflash_cache.cache.index import commit_fragment, consolidate
from dflash_cache.cache.layout import shard_name, write_manifest
from dflash_cache.data.buckets import assign_buckets, quantile_bounds

LONGEST = 8192


def make_index(folder: Path, num_samples: int) -> None:
    """A cache without states: its manifest, and the index of its samples, a shard a bucket."""
    lengths = draw_lengths(num_samples, LONGEST)
    bounds = quantile_bounds(lengths, 6, LONGEST)
    buckets = assign_buckets(lengths, bounds)
    write_manifest(folder, make_manifest(bounds, num_samples))
    for bucket in range(len(bounds)):
        members = np.flatnonzero(buckets == bucket)
        ends = np.cumsum(lengths[members], dtype=np.int64)
        rows = {
            "sample": members,
            "bucket": np.full(len(members), bucket),
            "shard": pa.DictionaryArray.from_arrays(np.zeros(len(members), np.int32), [shard_name(bucket, 0)]),
            "row": ends - lengths[members],
            "length": lengths[members],
            "loss_tokens": lengths[members] // 2,
            "checksum": pa.array(np.zeros(len(members), np.uint64)),
            "job": members,
        }
        commit_fragment(folder, pa.table(rows), str(bucket))
    consolidate(folder)


def main() -> None:
    """Measure, and print a line or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_index(Path(folder), options.samples)
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            command = [sys.executable, "-m", "dflash_cli", "inspect-buckets", folder]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - started)
    figures = {"inspect_seconds": statistics.median(seconds)}
    print(f"inspect_seconds  {figures['inspect_seconds']:.2f} for {options.samples:,} samples (goal: under 5)")
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
