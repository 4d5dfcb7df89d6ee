"""How fast samples come out of a cache, against a plain `preadv` loop over the same bytes and against peers' files.

Samples of 64 to 4,096 tokens, 40,960 bytes a token (five layers of 4,096 in bfloat16), two threads, warm page cache;
all ways run alternately in one process, both threads always at the same way, and each read's median over the rounds
counts, so that the ratios survive a machine whose speed drifts. Where others use the processors too, the ratios of
the threads' own processor time tell more (waiting for the GIL is not in them). Cold: the shards' pages are dropped
from the page cache (as `posix_fadvise` can, without privileges) and the reader reads past it; `dd` with direct I/O
reads the same files into one small buffer. A virtual disk's speed may change twofold within seconds, so each run of the
one is compared with its neighbour of the other, and the median of these ratios counts; the best of each would compare
two moments.

    python benchmarks/read.py [--gigabytes 1.2 --rounds 9 --folder DIR] [--json]

*warm_over_preadv*: samples one by one, checksum off. *warm_checked_over_preadv*: checksum on. *over_safetensors*,
*over_torch_load*: checked, against a file a sample (loaded and copied out of its mapping; loaded). *batches_over_
preadv*: padded micro-batches, checksum off, only the samples' own bytes counted. *cold_over_direct*: checksum on.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import local
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from synthetic_cache import forget_pages, make_cache

from dflash_cache.cache.reader import CacheReader
from dflash_cache.cache.shards import DATA_BEGIN
from dflash_cache.cache.state_format import StateFormat
from dflash_cache.data.plan import BatchLimits, plan_epoch

L, H, TOKEN_BYTES = 5, 4096, 40_960
SHORTEST, LONGEST = 64, 4096
BOUNDS = (128, 256, 512, 1024, 2048, 4096)
TOKEN_BUDGET = 4096
PAGE = 4096
THREADS = 2
GOALS = {
    "warm_over_preadv": 0.85,
    "warm_checked_over_preadv": 0.6,
    "over_safetensors": 1.6,
    "over_torch_load": 2.4,
    "batches_over_preadv": 0.75,
    "cold_over_direct": 0.9,
}


def draw_lengths(num_bytes: float) -> np.ndarray:
    """Log-uniform lengths of samples that together take so many bytes, or a little more."""
    random = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) * TOKEN_BYTES < num_bytes:
        lengths.append(round(np.exp(random.uniform(np.log(SHORTEST), np.log(LONGEST)))))
    return np.array(lengths, np.int32)


def save_as_peers(peers_dir: Path, lengths: np.ndarray) -> None:
    """Samples as a file each, in both peers' formats."""
    states = torch.randn(LONGEST, L, H, dtype=torch.bfloat16)
    for sample, length in enumerate(lengths.tolist()):
        tensors = {"hidden_states": states[:length].clone(), "input_ids": torch.arange(length)}
        save_file(tensors, peers_dir / f"{sample}.safetensors")
        torch.save(tensors, peers_dir / f"{sample}.pt")


def read_plainly(reader: CacheReader, descriptors: dict[str, int], place: local, row: int) -> None:
    """The same byte ranges with `preadv` alone, into one buffer a thread."""
    if not hasattr(place, "buffer"):
        room = np.empty(LONGEST * TOKEN_BYTES + PAGE, np.uint8)  # on huge pages, as numpy asks for them
        # Where numpy puts it, 16 bytes into a page, some processors copy from a page at a quarter of the speed.
        place.buffer = room[-room.ctypes.data % PAGE :]
    index = reader.index
    name = index.shard_names[index.shard[row]]
    begin, length = int(index.row[row]), int(index.length[row])
    num_tokens = (os.fstat(descriptors[name]).st_size - DATA_BEGIN) // (TOKEN_BYTES + 5)
    offset = DATA_BEGIN
    for item_bytes in (TOKEN_BYTES, 4, 1):
        os.preadv(descriptors[name], [place.buffer[: length * item_bytes].data], offset + begin * item_bytes)
        offset += num_tokens * item_bytes


def load_safetensors(peers_dir: Path, row: int) -> None:
    """A file a sample, copied out of its mapping into fresh memory, as collators do."""
    load_file(peers_dir / f"{row}.safetensors")["hidden_states"].clone()


def load_into_buffer(peers_dir: Path, place: local, row: int) -> None:
    """The same into one buffer a thread, as no peer's collator does: to see what the reuse alone is worth."""
    if not hasattr(place, "states"):
        place.states = torch.empty(LONGEST, L, H, dtype=torch.bfloat16)
    states = load_file(peers_dir / f"{row}.safetensors")["hidden_states"]
    place.states[: len(states)].copy_(states)


def load_pickled(peers_dir: Path, row: int) -> None:
    """A file a sample, as `torch.load` gives it."""
    torch.load(peers_dir / f"{row}.pt", weights_only=True)


def measure(pool: ThreadPoolExecutor, work: Callable[[Any], object], items: Sequence[Any]) -> np.ndarray:
    """(N, 2): seconds and the thread's own processor seconds of `work` for each item, on the pool's threads at once.

    Results are dropped as they come.
    """

    def timed(item: Any) -> tuple[float, float]:
        started, processor = time.perf_counter(), time.thread_time()
        work(item)
        return time.perf_counter() - started, time.thread_time() - processor

    return np.array(list(pool.map(timed, items)))


def measure_warm(cache_dir: Path, peers_dir: Path, rounds: int) -> dict[str, tuple[float, float]]:
    """Seconds and processor seconds of each way for all samples, two threads at once: each read's median, summed."""
    with (
        CacheReader(cache_dir, verify_checksums=False) as reader,
        CacheReader(cache_dir) as checked,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        index = reader.index
        descriptors = {name: os.open(cache_dir / name, os.O_RDONLY) for name in index.shard_names}
        plan = plan_epoch(index.length, index.bucket, BatchLimits(TOKEN_BUDGET, 64), 0, 0)
        rows = plan.rows.tolist()
        batches = [plan.rows_of(i) for i in range(plan.num_micro_batches)]
        ways: dict[str, tuple[Callable[[Any], object], list[Any]]] = {
            "preadv": (partial(read_plainly, reader, descriptors, local()), rows),
            "reader": (reader.read_batch, [np.array([row]) for row in rows]),
            "reader, checked": (checked.read_batch, [np.array([row]) for row in rows]),
            "micro-batches": (reader.read_batch, batches),
            "safetensors": (partial(load_safetensors, peers_dir), rows),
            "safetensors, reused buffer": (partial(load_into_buffer, peers_dir, local()), rows),
            "torch.load": (partial(load_pickled, peers_dir), rows),
        }
        seconds: dict[str, list[np.ndarray]] = {name: [] for name in ways}
        for _ in range(rounds + 1):  # the first round warms up
            for name, (work, items) in ways.items():
                seconds[name].append(measure(pool, work, items))
        for descriptor in descriptors.values():
            os.close(descriptor)
    typical = {name: np.median(times[1:], axis=0).sum(axis=0) / THREADS for name, times in seconds.items()}
    return {name: (float(wall), float(processor)) for name, (wall, processor) in typical.items()}


def measure_cold(cache_dir: Path, rounds: int) -> tuple[dict[str, float], float]:
    """Median bytes a second of the reader past the page cache and of `dd`, and the median ratio of neighbouring runs.

    Each goes first in every other round; both read the largest shards first, so that both threads end at once.
    """
    shards = sorted(cache_dir.glob("bucket-*/*.safetensors"), key=lambda path: -path.stat().st_size)
    with CacheReader(cache_dir, direct_io=True) as reader, ThreadPoolExecutor(THREADS) as pool:
        index = reader.index
        num_bytes = int(index.length.sum(dtype=np.int64)) * TOKEN_BYTES
        place = {path.relative_to(cache_dir).as_posix(): number for number, path in enumerate(shards)}
        number = np.array([place[name] for name in index.shard_names])[index.shard]
        order = np.lexsort((index.row, number))[:, None]
        ways = {
            "reader, cold": lambda: num_bytes / time_reads(pool, reader, order),
            "dd, direct": lambda: read_with_dd(shards),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for at in range(rounds + 1):  # the first round faults the buffers in
            for name in list(ways)[:: 1 if at % 2 else -1]:
                for path in shards:
                    forget_pages(path)
                rates[name].append(ways[name]())
    ours, other = (np.array(found[1:]) for found in rates.values())
    return {name: float(np.median(found[1:])) for name, found in rates.items()}, float(np.median(ours / other))


def time_reads(pool: ThreadPoolExecutor, reader: CacheReader, batches: np.ndarray) -> float:
    """Seconds in which the pool reads all batches; each is dropped as it comes."""
    started = time.perf_counter()
    for _ in pool.map(lambda rows: reader.read_batch(rows).length, batches):
        pass
    return time.perf_counter() - started


def read_with_dd(paths: list[Path]) -> float:
    """Bytes a second over whole files, by dd's own figures."""
    num_bytes = seconds = 0.0
    for path in paths:
        command = ["dd", f"if={path}", "of=/dev/null", "bs=8M", "iflag=direct"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, env={"LC_ALL": "C"}).stderr
        found = re.search(r"(\d+) bytes.*copied, ([\d.e-]+) s", shown)
        assert found is not None, shown
        num_bytes, seconds = num_bytes + int(found[1]), seconds + float(found[2])
    return num_bytes / seconds


def main() -> None:
    """Print a table, and with --json one object of figures as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", help="where files are made, and removed in the end; default: the system's")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the two threads are the readers'
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        cache_dir, peers_dir = Path(folder) / "cache", Path(folder) / "peers"
        peers_dir.mkdir()
        lengths = draw_lengths(arguments.gigabytes * 1e9)
        make_cache(cache_dir, StateFormat(L, H, "bfloat16"), lengths, BOUNDS)
        save_as_peers(peers_dir, lengths)
        seconds = measure_warm(cache_dir, peers_dir, arguments.rounds)
        num_bytes = int(lengths.sum()) * TOKEN_BYTES
        cold, cold_ratio = measure_cold(cache_dir, arguments.rounds)
    wall = {name: num_bytes / took for name, (took, _) in seconds.items()} | cold
    processor = {name: num_bytes / took for name, (_, took) in seconds.items()}
    undisturbed = compare(processor)
    figures = compare(wall) | {"cold_over_direct": cold_ratio}
    console = Console()
    table = Table("way", "GB/s", "of processor time", box=None)
    for name, rate in wall.items():
        table.add_row(name, f"{rate / 1e9:.2f}", f"{processor[name] / 1e9:.2f}" if name in processor else "")
    console.print(table)
    table = Table("figure", "ratio", "of processor time", "goal", box=None)
    for name, ratio in figures.items():
        shown = f"{undisturbed[name]:.2f}" if name in undisturbed else ""
        table.add_row(name, f"{ratio:.2f}", shown, f"≥ {GOALS[name]}")
    console.print(table)
    if arguments.json:
        print(json.dumps({**figures, "of_processor_time": undisturbed, "bytes_per_second": wall}))


def compare(rates: dict[str, float]) -> dict[str, float]:
    """The named figures of warm reads."""
    pairs = {
        "warm_over_preadv": ("reader", "preadv"),
        "warm_checked_over_preadv": ("reader, checked", "preadv"),
        "over_safetensors": ("reader, checked", "safetensors"),
        "over_torch_load": ("reader, checked", "torch.load"),
        "batches_over_preadv": ("micro-batches", "preadv"),
    }
    return {name: rates[ours] / rates[other] for name, (ours, other) in pairs.items()}


if __name__ == "__main__":
    main()
