"""The writer: whole jobs into one open shard a bucket, each shard published with its index rows.

A shard is committed when it is large or old enough, and when the writer is left, however it is left: an interruption
or a full disk costs the job under way, not the whole jobs before it in the same shard. Between the two commits of a
shard (the file, its rows) a kill leaves a file without rows; `remove_orphans` deletes it before the next run.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dflash_cache.cache.files import explain_write_errors
from dflash_cache.cache.index import cached_rows, commit_fragment
from dflash_cache.cache.layout import Manifest, shard_name
from dflash_cache.cache.rejected import write_rejected
from dflash_cache.cache.shards import ShardWriter
from dflash_cache.errors import CacheError, WriteError

_MAX_ORPHANS = 64
SHARDS = "bucket-*/shard-*.safetensors"


@dataclass(frozen=True)
class SampleStates:
    """A sample as it goes into a shard: ids (T) int32, mask (T) bool, states (T, L, H) on the CPU."""

    sample: int
    ids: np.ndarray
    mask: np.ndarray
    states_TLH: Tensor


@dataclass(frozen=True)
class ShardLimits:
    """When a shard is closed."""

    num_bytes: int
    seconds: float


class CacheWriter:
    """Writes jobs into shards and index; a context manager that commits, at its end, every whole job it holds.

    `number_shard` gives a number that no other shard of the bucket has or gets. Raises WriteError.
    """

    def __init__(
        self, cache_dir: Path, manifest: Manifest, limits: ShardLimits, number_shard: Callable[[int], int]
    ) -> None:
        self._cache_dir = cache_dir
        self._manifest = manifest
        self._limits = limits
        self._number_shard = number_shard
        self._open: dict[int, _OpenShard] = {}
        self._rejected: dict[int, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit what can be committed; the first failure is raised, unless an exception is under way already."""
        failures = [failure for bucket in sorted(self._open) if (failure := self._try(self._commit, bucket))]
        if failure := self._try(self._commit_rejected):
            failures.append(failure)
        if failures and error is None:
            raise failures[0]

    def append(self, bucket: int, job: int, samples: Iterable[SampleStates]) -> None:
        """Write one whole job, or nothing of it: a job never spans two shards."""
        shard = self._open.get(bucket) or self._begin(bucket)
        shard.write_job(job, samples)
        now = time.monotonic()
        for each, candidate in list(self._open.items()):
            full = candidate.writer.num_bytes >= self._limits.num_bytes
            if candidate.rows and (full or now - candidate.started >= self._limits.seconds):
                self._commit(each)

    def reject(self, sample: int, reason: str) -> None:
        """Record that a sample is left out; on disk with the next commit."""
        self._rejected[sample] = reason

    def _begin(self, bucket: int) -> "_OpenShard":
        name = shard_name(bucket, self._number_shard(bucket))
        writer = ShardWriter(self._cache_dir / name, bucket, self._manifest.states)
        shard = self._open[bucket] = _OpenShard(writer, name, bucket)
        return shard

    def _commit(self, bucket: int) -> None:
        shard = self._open.pop(bucket)
        shard.commit(self._cache_dir)
        self._commit_rejected()

    def _commit_rejected(self) -> None:
        if self._rejected:
            write_rejected(self._cache_dir, self._rejected)
            self._rejected.clear()

    def _try(self, action: Callable[..., None], *arguments: int) -> WriteError | None:
        try:
            action(*arguments)
        except WriteError as failure:
            return failure
        return None


class _OpenShard:
    """A shard being written and the index rows that will announce it."""

    def __init__(self, writer: ShardWriter, name: str, bucket: int) -> None:
        self.writer = writer.__enter__()
        self.name = name
        self.rows: list[dict[str, int]] = []
        self.started = time.monotonic()
        self._bucket = bucket

    def write_job(self, job: int, samples: Iterable[SampleStates]) -> None:
        """Append a job's samples; if one fails, the shard is as it was before the job."""
        num_tokens, num_rows = self.writer.num_tokens, len(self.rows)
        try:
            for sample in samples:
                self.rows.append({**self._write(sample), "job": job, "bucket": self._bucket})
        except BaseException:
            del self.rows[num_rows:]
            try:
                self.writer.cut(num_tokens)
            except WriteError:  # what the file holds is not known any more: it must not be committed
                self.rows.clear()
            raise

    def _write(self, sample: SampleStates) -> dict[str, int]:
        ids, mask = torch.from_numpy(sample.ids.copy()), torch.from_numpy(sample.mask.copy())  # arrow's are read-only
        row, checksum = self.writer.append(ids, mask, sample.states_TLH)
        loss_tokens = int(np.count_nonzero(sample.mask))
        return {
            "sample": sample.sample,
            "row": row,
            "length": len(ids),
            "loss_tokens": loss_tokens,
            "checksum": checksum,
        }

    def commit(self, cache_dir: Path) -> None:
        """Publish the shard, then its rows; without rows, leave nothing."""
        try:
            if not self.rows:
                return
            self.writer.commit()
        finally:
            self.writer.__exit__(None, None, None)
        columns = {name: [row[name] for row in self.rows] for name in self.rows[0]}
        checksums = pa.array(columns.pop("checksum"), pa.uint64())
        table = pa.table({**columns, "checksum": checksums, "shard": [self.name] * len(self.rows)})
        commit_fragment(cache_dir, table, fragment_name(self.name))


def fragment_name(shard: str) -> str:
    """The name of the index fragment that announces the shard of that name."""
    bucket, _, number = shard.removeprefix("bucket-").removesuffix(".safetensors").partition("/shard-")
    return f"{bucket}-{number}"


def next_shard_numbers(cache_dir: Path, num_buckets: int) -> list[int]:
    """For each bucket the first number after all its shards, those that the index names and those that lie there."""
    numbers = [0] * num_buckets
    found = [path.relative_to(cache_dir).as_posix() for path in cache_dir.glob(SHARDS)]
    for name in [*cached_rows(cache_dir)["shard"].unique().to_pylist(), *found]:
        bucket, number = map(int, fragment_name(name).split("-"))
        numbers[bucket] = max(numbers[bucket], number + 1)
    return numbers


def remove_orphans(cache_dir: Path) -> int:
    """Delete the shards that no index row names (a kill came between the two commits); returns how many there were.

    Call it only while the cache is locked: a shard that is just being announced looks the same. A kill leaves at most
    one for each worker; raises CacheError, and deletes nothing, if there are so many that index files must be lost.
    """
    named = set(cached_rows(cache_dir)["shard"].unique().to_pylist())
    orphans = [path for path in cache_dir.glob(SHARDS) if path.relative_to(cache_dir).as_posix() not in named]
    refuse_lost_index(str(cache_dir), len(orphans))
    for orphan in orphans:
        with explain_write_errors(orphan):
            orphan.unlink()
    return len(orphans)


def refuse_lost_index(place: str, num_orphans: int) -> None:
    """Raise CacheError if so many shards have no rows that no kill can be the reason."""
    if num_orphans > _MAX_ORPHANS:
        raise CacheError(
            f"{num_orphans:,} shards of the cache at {place} have no rows in its index, which must have lost "
            "files: restore its folder index from a copy, or delete those bucket folders to have all states made anew."
        )
