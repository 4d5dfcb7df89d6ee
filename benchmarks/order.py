"""What the order costs: the sampler without data, and the stream with data against the reader alone.

`batches_per_second`: micro-batches of an epoch of a million samples that the sampler orders and deals to a rank.
`stream_over_reader`: micro-batches a second of the whole stream (order, reading ahead, checksums, anchors drawn) over
those of threads that only read the same batches, of a cache as it is made of a target with five captured layers of
2,048. Both run in turn in one process, so that the ratio survives a machine whose speed drifts; files lie in the
page cache, so that reading is as fast as it can be. Among 160 samples (35 micro-batches) begin and end weigh 3 %.

    python benchmarks/order.py [--samples 480 --threads 2 --rounds 11 --json]
"""

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from dflash_cache.cache.index import commit_fragment, consolidate
from dflash_cache.cache.layout import Manifest, shard_name, shard_path, write_manifest
from dflash_cache.cache.reader import CacheReader
from dflash_cache.cache.shards import ShardWriter
from dflash_cache.cache.state_format import StateFormat
from dflash_cache.config.settings import TrainSettings
from dflash_cache.data.buckets import assign_buckets, quantile_bounds
from dflash_cache.data.plan import BatchLimits, EpochPlan, plan_epoch
from dflash_cache.train.sampler import EpochOrder
from dflash_cache.train.stream import AnchorDraw, ReadAhead, load_micro_batch

LAYERS, HIDDEN, LONGEST = (1, 8, 15, 22, 29), 2048, 1024
SETTINGS = TrainSettings(token_budget=2048, accumulation=4)
DRAW = AnchorDraw(count=SETTINGS.anchors_per_sample, seed=0, epoch=0)


def draw_lengths(count: int, longest: int) -> np.ndarray:
    """Lengths as conversations have them: log-normal, most short, some as long as may be."""
    return np.clip(np.random.default_rng(0).lognormal(5.5, 0.8, count), 16, longest).astype(np.int32)


def measure_sampler(num_samples: int) -> tuple[int, float]:
    """Micro-batches of an epoch, and the seconds to order and deal them all for one of two ranks."""
    lengths = draw_lengths(num_samples, 8192)
    buckets = assign_buckets(lengths, quantile_bounds(lengths, 6, 8192))
    plan = plan_epoch(lengths, buckets, BatchLimits(8192, 64), 0, 0)
    started = time.perf_counter()
    order = EpochOrder.from_plan(plan, SETTINGS, 0, world_size=2)
    for _ in order.steps(0, 1):
        pass
    return plan.num_micro_batches, time.perf_counter() - started


def make_manifest(bounds: tuple[int, ...], num_samples: int) -> Manifest:
    """Of a cache of a target that does not exist."""
    return Manifest(
        tool_version="benchmark", target_model="none", target_revision=None, target_fingerprint="0",
        tokenizer_fingerprint="0", template_fingerprint="0", mask_rule="none", layer_ids=LAYERS,
        target_num_layers=32, hidden_size=HIDDEN, vocab_size=1000, dtype="bfloat16", bucket_bounds=bounds,
        max_length=bounds[-1], data_fingerprint="0", num_samples=num_samples, order_seed=0,
    )  # fmt: skip


def make_cache(folder: Path, lengths: np.ndarray) -> None:
    """A cache of random states, one shard a bucket."""
    bounds = quantile_bounds(lengths, 6, LONGEST)
    buckets = assign_buckets(lengths, bounds)
    write_manifest(folder, make_manifest(bounds, len(lengths)))
    generator = torch.Generator().manual_seed(0)
    for bucket in range(len(bounds)):
        members = np.flatnonzero(buckets == bucket)
        with ShardWriter(shard_path(folder, bucket, 0), bucket, StateFormat(len(LAYERS), HIDDEN, "bfloat16")) as writer:
            placed = []
            for length in lengths[members].tolist():
                hidden = torch.randn(length, len(LAYERS), HIDDEN, generator=generator, dtype=torch.bfloat16)
                placed.append(writer.append(torch.arange(length), torch.arange(length) > length // 2, hidden))
            writer.commit()
        rows = {
            "sample": members,
            "bucket": [bucket] * len(members),
            "shard": [shard_name(bucket, 0)] * len(members),
            "row": [row for row, _ in placed],
            "length": lengths[members],
            "loss_tokens": lengths[members] // 2,
            "checksum": pa.array([checksum for _, checksum in placed], pa.uint64()),
            "job": [bucket] * len(members),
        }
        commit_fragment(folder, pa.table(rows), str(bucket))
    consolidate(folder)


def time_reader(reader: CacheReader, plan: EpochPlan, places: list[int], threads: int) -> float:
    """Seconds in which threads that do nothing else read all micro-batches; as in training, another drops them."""
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda place: reader.read_batch(plan.rows_of(place)), places):
            pass
    return time.perf_counter() - started


def time_stream(reader: CacheReader, plan: EpochPlan, threads: int) -> float:
    """Seconds in which the stream yields all micro-batches, from the plan on, as `train` takes them."""
    token_bytes = len(LAYERS) * HIDDEN * 2
    started = time.perf_counter()
    order = EpochOrder.from_plan(plan, SETTINGS, 0)
    items = (
        (place, int(plan.padded_tokens[place]) * token_bytes)
        for places in order.steps(0, 0)
        for place in places[places >= 0].tolist()
    )
    stream = ReadAhead(
        items,
        lambda place: load_micro_batch(reader.read_batch, plan.rows_of(place), int(plan.bucket[place]), DRAW),
        threads,
        1 << 28,
    )
    count = sum(1 for _ in stream)
    assert count == plan.num_micro_batches
    return time.perf_counter() - started


def main() -> None:
    """Print both figures, and with --json one object with them as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("samples", 480), ("threads", 2), ("rounds", 11)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    num_micro_batches, seconds = measure_sampler(1_000_000)
    rate = num_micro_batches / seconds
    print(f"sampler alone        {rate:12,.0f} micro-batches/s ({num_micro_batches:,} in {seconds:.2f} s)")
    with tempfile.TemporaryDirectory() as folder:
        lengths = draw_lengths(arguments.samples, LONGEST)
        make_cache(Path(folder), lengths)
        with CacheReader(Path(folder)) as reader:
            plan = plan_epoch(reader.index.length, reader.index.bucket, BatchLimits(SETTINGS.token_budget, 64), 0, 0)
            places = EpochOrder.from_plan(plan, SETTINGS, 0).order.tolist()
            pairs = [
                (time_reader(reader, plan, places, arguments.threads), time_stream(reader, plan, arguments.threads))
                for _ in range(arguments.rounds + 1)  # the first round warms up
            ][1:]
    M = plan.num_micro_batches
    alone, with_data = (M / statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(reader_seconds / stream_seconds for reader_seconds, stream_seconds in pairs)
    print(f"reader alone         {alone:12,.1f} micro-batches/s ({M} of {SETTINGS.token_budget} tokens at most)")
    print(f"stream with data     {with_data:12,.1f} micro-batches/s")
    print(f"stream over reader   {ratio:12.3f} (median of {arguments.rounds} rounds)")
    if arguments.json:
        print(json.dumps({"batches_per_second": rate, "stream_over_reader": ratio}))


if __name__ == "__main__":
    main()
