"""A cache of 60 samples in many small jobs and shards: its configuration, an observer, and what it must hold."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dflash_cache.cache.files import write_atomically
from dflash_cache.cache.layout import index_dir
from dflash_cache.cache.reader import CacheReader
from dflash_cache.config.settings import Config
from dflash_cache.target.generate import generate
from dflash_cache.target.observer import Estimate, Observer

NUM_SAMPLES = 60
TOKEN_BYTES = 3 * 32 * 4 + 5  # three layers of 32 in float32; id and mask
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def conversation(i: int) -> dict[str, object]:
    answer = " ".join(f"w{(7 * i + 3 * j) % 90}" for j in range(4 + i % 30))
    return {"messages": [{"role": "user", "content": f"w{i % 90} w1"}, {"role": "assistant", "content": answer}]}


class Listener(Observer):
    """Keeps what it is told; calls `on_forward` with the number of calls so far."""

    def __init__(self, on_forward: Callable[[int], None] = lambda _: None) -> None:
        self.notes: list[str] = []
        self.bad: tuple[dict[str, int], dict[str, str]] = ({}, {})
        self.tokens: list[int] = []
        self.estimate: Estimate | None = None
        self._on_forward = on_forward

    def noted(self, sentence: str) -> None:
        self.notes.append(sentence)

    def rejected(self, reasons: dict[str, int], first: dict[str, str]) -> None:
        self.bad = (reasons, first)

    def estimated(self, estimate: Estimate) -> None:
        self.estimate = estimate

    def forwarding(self, done_tokens: int, total_tokens: int) -> None:
        self.tokens.append(done_tokens)
        self._on_forward(len(self.tokens))


def checksums(cache_dir: str | Path) -> dict[int, int]:
    """Each sample's checksum; the cache has one index file, in it each sample once, and nothing left over."""
    folder = Path(cache_dir)
    assert [path.name for path in index_dir(folder).iterdir()] == ["index.parquet"]
    rows = pq.read_table(index_dir(folder) / "index.parquet")
    assert len(set(rows["sample"].to_pylist())) == rows.num_rows
    shards = {path.relative_to(folder).as_posix() for path in folder.glob("bucket-*/*")}
    shards |= {path.relative_to(folder).as_posix() for path in folder.glob("bucket-*/.*")}
    assert shards == set(rows["shard"].to_pylist())
    with CacheReader(folder) as reader:  # which compares every sample with its checksum
        reader.read_batch(np.arange(rows.num_rows))
    return dict(zip(rows["sample"].to_pylist(), rows["checksum"].to_pylist(), strict=True))


def jobs_within(cache_dir: Path, num_samples: int) -> set[int]:
    """The first jobs of the list that hold no more samples than that."""
    sizes = [len(samples) for samples in pq.read_table(cache_dir / "jobs.parquet")["samples"].to_pylist()]
    return {job for job in range(len(sizes)) if sum(sizes[: job + 1]) <= num_samples}


def checksums_of(rows: pa.Table) -> dict[int, int]:
    return dict(zip(rows["sample"].to_pylist(), rows["checksum"].to_pylist(), strict=True))


def whole_checksums(configure: Callable[..., Config], tmp_path: Path) -> dict[int, int]:
    generate(configure("whole"), Observer())
    return checksums(tmp_path / "whole")


def write_rows(path: Path, rows: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink)
    write_atomically(path, sink.getvalue().to_pybytes())
