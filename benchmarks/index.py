"""Ten million samples: the index opened, an epoch planned, a random sample looked up; in seconds and memory.

    python benchmarks/index.py [--samples 10000000] [--json]

The index is made first, in a process of its own, so that *peak_gib* is what opening and planning take: the largest
resident size of a process that does just that. *plan_seconds*: from nothing to the epoch's list, the opening
included.
"""

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from dflash_cache.cache.index import SCHEMA, commit_fragment, consolidate
from dflash_cache.cache.layout import Manifest, write_manifest
from dflash_cache.cache.reader import CacheReader
from dflash_cache.data.buckets import assign_buckets, quantile_bounds
from dflash_cache.data.plan import BatchLimits, plan_epoch

MAX_LENGTH = 4096
PER_SHARD = 1000
GOALS = {"plan_seconds": 20.0, "peak_gib": 3.0}
LOOKUPS = 10_000


def make_index(cache_dir: Path, num_samples: int) -> None:
    """Log-normal lengths, six buckets, shards of a thousand samples, in the order in which jobs would leave them."""
    random = np.random.default_rng(0)
    length = np.clip(random.lognormal(6.5, 0.8, num_samples), 16, MAX_LENGTH).astype(np.int32)
    bounds = quantile_bounds(length, 6, MAX_LENGTH)
    bucket = assign_buckets(length, bounds)
    order = np.lexsort((length, bucket))
    number = np.arange(num_samples) // PER_SHARD
    names = pa.array([f"bucket-{bucket[order[i]]}/shard-{i // PER_SHARD:06d}.safetensors"
                      for i in range(0, num_samples, PER_SHARD)])  # fmt: skip
    ends = np.cumsum(length[order], dtype=np.int64)
    starts = ends - length[order]
    columns = {
        "sample": pa.array(order),
        "bucket": pa.array(bucket[order]),
        "shard": pa.DictionaryArray.from_arrays(pa.array(number, pa.int32()), names).cast(pa.string()),
        "row": pa.array(starts - starts[number * PER_SHARD]),
        "length": pa.array(length[order]),
        "loss_tokens": pa.array(length[order] // 2),
        "checksum": pa.array(random.integers(0, 2**64, num_samples, np.uint64)),
        "job": pa.array((np.arange(num_samples) // 16).astype(np.int32)),
    }
    unknown = ("tool_version", "target_model", "target_fingerprint", "tokenizer_fingerprint", "template_fingerprint",
               "mask_rule", "data_fingerprint")  # fmt: skip
    manifest = Manifest(
        target_revision=None, layer_ids=(0,), target_num_layers=1, hidden_size=1, vocab_size=1, dtype="bfloat16",
        bucket_bounds=bounds, max_length=MAX_LENGTH, num_samples=num_samples, order_seed=0,
        **dict.fromkeys(unknown, "-"),
    )  # fmt: skip
    write_manifest(cache_dir, manifest)
    commit_fragment(cache_dir, pa.table(columns).cast(SCHEMA), "all")
    consolidate(cache_dir)


def use_index(cache_dir: Path, figures: "multiprocessing.Queue[dict[str, float]]") -> None:
    """Open, plan, look up; puts its figures into the queue."""
    bare_gib = peak_gib()
    started = time.perf_counter()
    with CacheReader(cache_dir) as reader:
        opened = time.perf_counter()
        index = reader.index
        plan = plan_epoch(index.length, index.bucket, BatchLimits(16_384, 64), 0, 0)
        planned = time.perf_counter()
        peak = peak_gib()
        assert len(plan.rows) == len(index.sample)
        rows = np.random.default_rng(1).integers(0, len(index.sample), LOOKUPS)
        looked_up = time.perf_counter()
        places = [(index.shard_names[index.shard[row]], int(index.row[row])) for row in rows]
        done = time.perf_counter()
    assert all(place < PER_SHARD * MAX_LENGTH for _, place in places)
    figures.put({
        "open_seconds": opened - started, "plan_seconds": planned - started, "peak_gib": peak, "bare_gib": bare_gib,
        "lookup_microseconds": (done - looked_up) / LOOKUPS * 1e6, "micro_batches": plan.num_micro_batches,
    })  # fmt: skip


def peak_gib() -> float:
    """The largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Print a table, and with --json one object of figures as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    queue = processes.Queue()
    with tempfile.TemporaryDirectory() as folder:
        for work, argument in ((make_index, arguments.samples), (use_index, queue)):
            process = processes.Process(target=work, args=(Path(folder), argument))
            process.start()
            found = queue.get() if work is use_index else {}
            process.join()
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.parquet"))
    found["index_bytes_per_sample"] = size / arguments.samples
    table = Table("figure", "value", "goal", title=f"{arguments.samples:,} samples", box=None)
    for name, value in found.items():
        table.add_row(name, f"{value:,.2f}", f"< {GOALS[name]:g}" if name in GOALS else "")
    Console().print(table)
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
