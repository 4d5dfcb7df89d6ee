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

from synthetic_cache import draw_lengths, make_cache

from dflash_cache.cache.reader import CacheReader
from dflash_cache.cache.state_format import StateFormat
from dflash_cache.config.settings import TrainSettings
from dflash_cache.data.buckets import assign_buckets, quantile_bounds
from dflash_cache.data.plan import BatchLimits, EpochPlan, plan_epoch
from dflash_cache.train.sampler import EpochOrder
from dflash_cache.train.stream import AnchorDraw, ReadAhead, load_micro_batch

STATES = StateFormat(num_layers=5, hidden_size=2048, dtype="bfloat16")
LONGEST = 1024
SETTINGS = TrainSettings(token_budget=2048, accumulation=4)
DRAW = AnchorDraw(count=SETTINGS.anchors_per_sample, seed=0, epoch=0)


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


def time_reader(reader: CacheReader, plan: EpochPlan, places: list[int], threads: int) -> float:
    """Seconds in which threads that do nothing else read all micro-batches; as in training, another drops them."""
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda place: reader.read_batch(plan.rows_of(place)), places):
            pass
    return time.perf_counter() - started


def time_stream(reader: CacheReader, plan: EpochPlan, threads: int) -> float:
    """Seconds in which the stream yields all micro-batches, from the plan on, as `train` takes them."""
    started = time.perf_counter()
    order = EpochOrder.from_plan(plan, SETTINGS, 0)
    items = (
        (place, int(plan.padded_tokens[place]) * STATES.token_bytes)
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
        make_cache(Path(folder), STATES, lengths, quantile_bounds(lengths, 6, LONGEST))
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
