"""How fast coded states come out of a cache and go into one, against states as they are, and what they lose.

Padded micro-batches of samples of 64 to 2,048 tokens (five layers of 4,096 in bfloat16), read by two threads from a
warm page cache, checksum on; one intra-op thread each, as many as there are processors on most machines that share
theirs. All codecs alternate in one process, and the fastest of the rounds counts. Rates are of the states in memory,
whatever they take on disk, so that a rate below the disk's own says that the codec, not the disk, is the limit.

    python benchmarks/codec.py [--rounds 7 --folder DIR] [--states CACHE] [--json]

*int8_over_none*, *int4_over_none*: decoded bytes a second over those of no codec, all from memory: the worst case, for
a cache larger than memory is read from a disk, which gives int8 nearly twice, int4 three times the tokens a second.
*int8_encode*, *int4_encode*: bytes a second of one thread that codes. *int8_error*, *int4_error*: the median relative
error of a token's layer, on random numbers with outliers, or on the states of a cache without a codec (`--states`).
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import torch
from read import BOUNDS, THREADS, H, L, make_manifest
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dflash_cache.cache.codec import code_states, encode_states
from dflash_cache.cache.index import commit_fragment
from dflash_cache.cache.layout import shard_name, shard_path, write_manifest
from dflash_cache.cache.reader import CacheReader
from dflash_cache.cache.shards import ShardWriter
from dflash_cache.cache.state_format import StateFormat
from dflash_cache.config.dtypes import Codec

CODECS: tuple[Codec, ...] = get_args(Codec)
TOKEN_BUDGET, NUM_TOKENS = 4096, 16_384


def make_states(num_tokens: int) -> Tensor:
    """Random numbers (T, L, H) with a few channels of fifty times the size."""
    states = torch.randn(num_tokens, L, H, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    states[:, :, :: H // 8] *= 50
    return states


def make_cache(folder: Path, codec: Codec, states: Tensor) -> None:
    """Samples of log-uniform length in one shard."""
    random = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < NUM_TOKENS:
        lengths.append(round(np.exp(random.uniform(np.log(64), np.log(len(states))))))
    manifest = replace(make_manifest(len(lengths)), codec=codec)
    write_manifest(folder, manifest)
    with ShardWriter(shard_path(folder, 0, 0), 0, manifest.states) as writer:
        placed = [
            writer.append(torch.arange(length), torch.ones(length, dtype=torch.bool), states[:length])
            for length in lengths
        ]
        writer.commit()
    count = len(lengths)
    columns = {
        "sample": range(count), "bucket": np.searchsorted(BOUNDS, lengths), "shard": [shard_name(0, 0)] * count,
        "row": [row for row, _ in placed], "length": lengths, "loss_tokens": lengths,
        "checksum": pa.array([checksum for _, checksum in placed], pa.uint64()), "job": [0] * count,
    }  # fmt: skip
    commit_fragment(folder, pa.table({name: pa.array(column) for name, column in columns.items()}), "all")


def cut_batches(lengths: np.ndarray) -> list[np.ndarray]:
    """Positions of samples by length, as many in a batch as the padded token budget holds."""
    batches: list[list[int]] = [[]]
    for row in np.argsort(lengths).tolist():
        if batches[-1] and (len(batches[-1]) + 1) * lengths[row] > TOKEN_BUDGET:
            batches.append([])
        batches[-1].append(row)
    return [np.array(batch) for batch in batches]


def measure_reads(folders: dict[Codec, Path], rounds: int) -> dict[Codec, float]:
    """Bytes of states a second in memory, by codec."""
    readers = {codec: CacheReader(folder) for codec, folder in folders.items()}
    lengths = readers["raw"].index.length
    batches, best = cut_batches(lengths), dict.fromkeys(folders, float("inf"))
    with ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for _ in range(rounds + 1):
            for codec, reader in readers.items():
                started = time.perf_counter()
                for future in [pool.submit(lambda rows, reader=reader: len(reader.read_batch(rows).length), rows)
                               for rows in batches]:  # fmt: skip
                    future.result()
                best[codec] = min(best[codec], time.perf_counter() - started)
    return {codec: int(lengths.sum()) * L * H * 2 / seconds for codec, seconds in best.items()}


def measure_encoding(form: StateFormat, states: Tensor, rounds: int) -> float:
    """Bytes of states a second, in one thread."""
    torch.set_num_threads(1)
    best = float("inf")
    for _ in range(rounds + 1):
        started = time.perf_counter()
        encode_states(form, states)
        best = min(best, time.perf_counter() - started)
    return states.nbytes / best


def measure_error(form: StateFormat, parts: Sequence[Tensor]) -> list[float]:
    """The median over tokens of the relative error, for each layer."""
    errors = []
    for part in parts:
        own = part.float()
        errors.append((code_states(form, part).float() - own).norm(dim=-1) / own.norm(dim=-1).clamp_min(1e-12))
    return [float(error) for error in torch.cat(errors).median(0).values]


def read_states(cache: Path) -> list[Tensor]:
    """The states (T, L, H) of up to 64 samples of a cache without a codec."""
    with CacheReader(cache) as reader:
        if reader.manifest.codec != "raw":
            raise SystemExit(f"The cache at {cache} is coded itself: name one made with generate.codec none.")
        rows = np.linspace(0, len(reader.index.sample) - 1, min(64, len(reader.index.sample))).astype(int)
        return [reader.read_batch(np.array([row])).hidden_STLH[0] for row in rows]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where the caches are made (default: a temporary folder)")
    parser.add_argument("--states", type=Path, help="a cache without a codec whose states are coded for the error")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    states = make_states(2048)
    parts = read_states(arguments.states) if arguments.states else [states]
    form = StateFormat(parts[0].shape[1], parts[0].shape[2], "bfloat16")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        folders = {codec: Path(folder) / codec for codec in CODECS}
        for codec, path in folders.items():
            make_cache(path, codec, states)
        rates = measure_reads(folders, arguments.rounds)
    figures: dict[str, float] = {}
    table = Table("codec", "bits a number", "read GB/s", "over none", "code GB/s", "relative error by layer", box=None)
    for codec in CODECS:
        bits = StateFormat(L, H, "bfloat16", codec).token_bytes * 8 / (L * H)
        row = [codec, f"{bits:g}", f"{rates[codec] / 1e9:.2f}", f"{rates[codec] / rates['raw']:.2f}"]
        if codec != "raw":
            encoding = measure_encoding(StateFormat(L, H, "bfloat16", codec), states, arguments.rounds)
            errors = measure_error(replace(form, codec=codec), parts)
            row += [f"{encoding / 1e9:.2f}", " ".join(f"{error:.4f}" for error in errors)]
            figures |= {
                f"{codec}_over_none": rates[codec] / rates["raw"],
                f"{codec}_encode": encoding,
                f"{codec}_error": float(np.median(errors)),
            }
        table.add_row(*row)
    Console().print(table)
    if arguments.json:
        print(json.dumps({**figures, "bytes_per_second": rates}))


if __name__ == "__main__":
    main()
