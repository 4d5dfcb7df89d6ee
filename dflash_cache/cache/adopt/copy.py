"""The second look at a dump: its states, sample by sample, into shards that are planned before the first is written.

A job here is one shard: which samples it holds follows from the table of samples alone. So an import that was killed
writes the missing shards again just as they would have been, and ends with the same files, byte for byte, as one that
was not. Reading and checking (in threads, a bounded number of bytes ahead) overlap with hashing and writing.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from dflash_cache.cache.adopt.dump import Dump, Expected, SampleError, check_sample, load_states
from dflash_cache.cache.adopt.scan import BadSamples
from dflash_cache.cache.codec import TORCH_DTYPES
from dflash_cache.cache.files import write_table
from dflash_cache.cache.index import cached_rows, commit_fragment
from dflash_cache.cache.layout import Manifest, shard_name, shard_path
from dflash_cache.cache.shards import ShardWriter
from dflash_cache.data.plan import JobList
from dflash_cache.data.samples import sample_tokens
from dflash_cache.errors import CacheError

LEFT_OUT = pa.schema(
    [
        pa.field("sample", pa.int64()),  # null: found before the samples were numbered
        pa.field("source", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)
READ_AHEAD_BYTES = 256 << 20
READER_THREADS = 2


@dataclass(frozen=True)
class CopyPlan:
    """What is to be copied where: `samples` as in `data.samples`, `bucket` of each, `jobs` of one shard each."""

    manifest: Manifest
    samples: pa.Table
    bucket_N: np.ndarray
    jobs: JobList

    def shard_number(self, job: int) -> int:
        """The shard's number in its bucket."""
        return int(np.count_nonzero(self.jobs.bucket[:job] == self.jobs.bucket[job]))

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, int64."""
        lengths: np.ndarray = self.samples["length"].to_numpy().astype(np.int64)
        return lengths


def expect(manifest: Manifest, dump: Dump) -> Expected:
    """What every sample of the dump must be for a cache of this manifest."""
    return Expected(len(manifest.layer_ids), manifest.hidden_size, manifest.vocab_size, dump.extra_last_layer)


def plan_shards(lengths_N: np.ndarray, bucket_N: np.ndarray, token_bytes: int, shard_bytes: int) -> JobList:
    """One job a shard: each bucket's samples in their order, cut where they pass a multiple of `shard_bytes`."""
    samples: list[np.ndarray] = []
    buckets: list[int] = []
    for bucket in np.unique(bucket_N).tolist():
        members = np.flatnonzero(bucket_N == bucket)
        ends = np.cumsum(lengths_N[members].astype(np.int64) * token_bytes)
        shard = (ends - lengths_N[members] * token_bytes) // shard_bytes
        parts = np.split(members, np.flatnonzero(np.diff(shard)) + 1)
        samples += parts
        buckets += [bucket] * len(parts)
    begin = np.concatenate([[0], np.cumsum([len(part) for part in samples])]).astype(np.int64)
    return JobList(np.concatenate(samples), begin, np.array(buckets, np.int16))


def remaining_jobs(cache_dir: Path, plan: CopyPlan) -> np.ndarray:
    """Jobs that have neither rows in the index nor all of their samples left out."""
    left_out = read_left_out(cache_dir)["sample"].to_numpy(zero_copy_only=False)
    missing = np.setdiff1d(np.arange(plan.jobs.num_jobs), cached_rows(cache_dir)["job"].to_numpy())
    return np.array([job for job in missing.tolist() if np.setdiff1d(plan.jobs.samples_of(job), left_out).size], int)


def copy_job(cache_dir: Path, dump: Dump, plan: CopyPlan, job: int, bad: BadSamples) -> Iterator[int]:
    """Write one shard and announce it; yields the tokens of each sample as it is done.

    Samples that turn out bad are named in `left_out.parquet`. Raises DataError if too many are, and then, as on any
    other exception, leaves nothing of this shard.
    """
    bucket, number = int(plan.jobs.bucket[job]), plan.shard_number(job)
    members = plan.jobs.samples_of(job).tolist()
    rows: list[tuple[int, ...]] = []
    refused: dict[int, SampleError] = {}
    path = shard_path(cache_dir, bucket, number)
    with ShardWriter(path, bucket, plan.manifest.states) as writer:
        for sample, states in zip(members, read_states(dump, plan, members), strict=True):
            ids, mask = sample_tokens(plan.samples, sample)
            if isinstance(states, SampleError):
                refused[sample] = states
                bad.add(states)
            else:
                row, checksum = writer.append(torch.from_numpy(ids.copy()), torch.from_numpy(mask.copy()), states)
                rows.append((sample, row, len(ids), int(mask.sum()), checksum))
            yield len(ids)
        if rows:
            writer.commit()
    if refused:
        _add_late(cache_dir, refused)
    if rows:
        commit_fragment(cache_dir, _index_rows(rows, bucket, number, job), f"{bucket}-{number:06d}")


def read_states(dump: Dump, plan: CopyPlan, members: list[int]) -> Iterator[Tensor | SampleError]:
    """The states of each member in order, or why they cannot be used.

    READ_AHEAD_BYTES and one sample are read ahead at most.
    """
    expected = expect(plan.manifest, dump)
    lengths = plan.lengths

    def read(sample: int) -> Tensor | SampleError:
        name = plan.samples["source"][sample].as_py()
        try:
            dumped = dump.open_sample(name)
            ids = check_sample(name, dumped, expected).input_ids[: lengths[sample]]
            planned_ids, _ = sample_tokens(plan.samples, sample)
            if not np.array_equal(ids, planned_ids) or dumped.dtype != TORCH_DTYPES[plan.manifest.dtype]:
                raise SampleError(name, "a sample that has changed since the first look")
            return load_states(name, dumped, expected, len(ids))
        except SampleError as error:
            return error

    waiting: deque[tuple[int, Future[Tensor | SampleError]]] = deque()
    begun = waiting_bytes = 0
    with ThreadPoolExecutor(READER_THREADS) as pool:
        for _ in members:
            while begun < len(members) and (not waiting or waiting_bytes < READ_AHEAD_BYTES):
                size = int(lengths[members[begun]]) * plan.manifest.states.unpacked_token_bytes
                waiting.append((size, pool.submit(read, members[begun])))
                begun, waiting_bytes = begun + 1, waiting_bytes + size
            size, future = waiting.popleft()
            waiting_bytes -= size
            yield future.result()


def read_left_out(cache_dir: Path) -> pa.Table:
    """The samples of the dump that are not in the cache, with their reasons (LEFT_OUT). Raises CacheError."""
    path = left_out_path(cache_dir)
    if not path.exists():
        return LEFT_OUT.empty_table()
    try:
        return pq.read_table(path).cast(LEFT_OUT)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CacheError(
            f"The list {path} is damaged ({str(error).splitlines()[0]}): name another cache and import again."
        ) from None


def note_bad_samples(cache_dir: Path, scanned: Sequence[SampleError]) -> None:
    """Make the list name the samples that were bad at the first look, beside those found since then."""
    late = read_left_out(cache_dir)
    late = late.filter(pc.is_valid(late["sample"]))
    if scanned or late.num_rows:
        write_table(left_out_path(cache_dir), pa.concat_tables([_list_errors(scanned, [None] * len(scanned)), late]))


def late_errors(cache_dir: Path) -> list[SampleError]:
    """The samples whose states were found bad in this or an earlier run."""
    late = read_left_out(cache_dir)
    rows = late.filter(pc.is_valid(late["sample"])).to_pylist()
    return [SampleError(row["source"], row["reason"], row["detail"]) for row in rows]


def left_out_path(cache_dir: Path) -> Path:
    """What of the dump is not in the cache, and why."""
    return cache_dir / "left_out.parquet"


def _add_late(cache_dir: Path, refused: dict[int, SampleError]) -> None:
    """Name more samples by their numbers; a shard that is written again names its own once."""
    table = read_left_out(cache_dir)
    numbered = pa.concat_tables(
        [table.filter(pc.is_valid(table["sample"])), _list_errors([*refused.values()], [*refused])]
    )
    _, first = np.unique(numbered["sample"].to_numpy(), return_index=True)
    scanned = table.filter(pc.is_null(table["sample"]))
    write_table(left_out_path(cache_dir), pa.concat_tables([scanned, numbered.take(pa.array(first))]))


def _list_errors(errors: Sequence[SampleError], samples: Sequence[int | None]) -> pa.Table:
    columns = {
        "sample": pa.array(samples, pa.int64()),
        "source": [error.source for error in errors],
        "reason": [error.reason for error in errors],
        "detail": [error.detail for error in errors],
    }
    return pa.table(columns, LEFT_OUT)


def _index_rows(rows: list[tuple[int, ...]], bucket: int, number: int, job: int) -> pa.Table:
    names = ("sample", "row", "length", "loss_tokens", "checksum")
    columns = {name: pa.array(column, pa.uint64()) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    constants = {"bucket": bucket, "job": job, "shard": shard_name(bucket, number)}
    return pa.table(columns | {name: [value] * len(rows) for name, value in constants.items()})
