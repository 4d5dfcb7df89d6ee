"""The first stage: the target's forward passes over the job list, into shards and index.

    conversations → (answers) → samples → buckets → job list → forward → shards, index

Samples, job list and manifest stand before the first forward. A shard's index rows appear only when the shard is
whole, so a run stopped at any instant goes on with the jobs that have no rows, and redoing a job gives the same bits.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dflash_cache.cache.files import remove_leftovers, write_table
from dflash_cache.cache.index import commit_fragment, completed_jobs, consolidate
from dflash_cache.cache.layout import (
    Manifest,
    difference,
    jobs_path,
    manifest_path,
    read_manifest,
    samples_dir,
    shard_name,
    shard_path,
    write_manifest,
)
from dflash_cache.cache.shards import TORCH_DTYPES, ShardWriter
from dflash_cache.config.settings import Config
from dflash_cache.data.plan import JobList
from dflash_cache.data.samples import sample_tokens
from dflash_cache.errors import CacheError
from dflash_cache.target.capture import capture_states
from dflash_cache.target.load import Target
from dflash_cache.target.observer import Estimate, Observer
from dflash_cache.target.prepare import Loader, Preparation, prepare

ID_BYTES, MASK_BYTES = 4, 1


def generate(config: Config, observer: Observer) -> Manifest:
    """Fill the cache at `config.cache_dir`, or what is missing of it; returns its manifest.

    Raises ConfigError, DataError, TargetError or CacheError, each before anything is written over.
    """
    cache_dir = Path(config.cache_dir)
    loader = Loader(config)
    preparation = prepare(config, loader, observer)
    claim(cache_dir, preparation)
    remaining = np.setdiff1d(np.arange(preparation.jobs.num_jobs), completed_jobs(cache_dir))
    estimate = estimate_size(cache_dir, preparation, remaining)
    observer.estimated(estimate)
    if len(remaining):
        if estimate.remaining_bytes > estimate.free_bytes:
            raise CacheError(
                f"The cache needs {estimate.remaining_bytes / 1e9:,.1f} GB more and {cache_dir} has "
                f"{estimate.free_bytes / 1e9:,.1f} GB free: make room, name another cache_dir, or cache fewer "
                "conversations or layers (data, target.num_layers)."
            )
        run_jobs(config, loader.load(), preparation, remaining, observer)
    consolidate(cache_dir)
    return preparation.manifest


def claim(cache_dir: Path, preparation: Preparation) -> None:
    """Write manifest, samples and job list, or check that they are this very cache's. Raises CacheError."""
    if manifest_path(cache_dir).exists():
        different = difference(read_manifest(cache_dir), preparation.manifest)
        if different:
            raise CacheError(
                f"The cache at {cache_dir} was made with another configuration ({'; '.join(different)}): set cache_dir "
                "to another folder, or take the configuration back."
            )
        remove_leftovers(cache_dir)
    else:
        write_manifest(cache_dir, preparation.manifest)
    bucketed = preparation.samples.append_column("bucket", pa.array(preparation.bucket_N, pa.int16()))
    write_table(samples_dir(cache_dir) / "samples.parquet", bucketed)
    write_table(jobs_path(cache_dir), job_table(preparation.jobs))


def estimate_size(cache_dir: Path, preparation: Preparation, remaining: np.ndarray) -> Estimate:
    """Size of the whole cache and of what is missing, against the space free where it lies."""
    manifest = preparation.manifest
    lengths = preparation.samples["length"].to_numpy().astype(np.int64)
    state_bytes = len(manifest.layer_ids) * manifest.hidden_size * TORCH_DTYPES[manifest.dtype].itemsize
    return Estimate(
        num_samples=len(lengths),
        num_tokens=int(lengths.sum()),
        remaining_tokens=sum(int(lengths[preparation.jobs.samples_of(job)].sum()) for job in remaining.tolist()),
        token_bytes=state_bytes + ID_BYTES + MASK_BYTES,
        free_bytes=shutil.disk_usage(cache_dir).free,
    )


def run_jobs(
    config: Config, target: Target, preparation: Preparation, remaining: np.ndarray, observer: Observer
) -> None:
    """Forward the remaining jobs in the list's order; when stopped, what is complete is committed first."""
    samples, jobs = preparation.samples, preparation.jobs
    lengths = samples["length"].to_numpy().astype(np.int64)
    total = int(lengths.sum())
    done = total - sum(int(lengths[jobs.samples_of(job)].sum()) for job in remaining.tolist())
    observer.forwarding(done, total)
    with BucketWriters(config, preparation.manifest) as writers:
        for job in remaining.tolist():
            members = jobs.samples_of(job)
            tokens = [sample_tokens(samples, int(i)) for i in members]
            states = forward_job(target, [ids for ids, _ in tokens])
            rows = zip(members.tolist(), tokens, states, strict=True)
            writers.append(int(jobs.bucket[job]), job, rows)
            done += int(lengths[members].sum())
            observer.forwarding(done, total)


def forward_job(target: Target, ids: list[np.ndarray]) -> Iterator[Tensor]:
    """States (length, L, H) of each sample on the CPU, from one padded forward pass."""
    lengths_S = torch.tensor([len(row) for row in ids])
    input_ids_ST = torch.zeros(len(ids), int(lengths_S.max()), dtype=torch.int64)
    for s, row in enumerate(ids):
        input_ids_ST[s, : len(row)] = torch.from_numpy(row.astype(np.int64))
    states_STLH = capture_states(target, input_ids_ST, lengths_S).cpu()
    return (states_STLH[s, :length] for s, length in enumerate(lengths_S.tolist()))


class BucketWriters:
    """One open shard a bucket; a shard is committed, with its index rows, when it is large or old enough.

    A context manager: left by an interruption or normally, it commits what is complete; left by an error, only what
    was committed before stands.
    """

    def __init__(self, config: Config, manifest: Manifest) -> None:
        self._cache_dir = Path(config.cache_dir)
        self._settings = config.generate
        self._manifest = manifest
        self._open: dict[int, OpenShard] = {}
        self._next = {bucket: self._first_free(bucket) for bucket in range(len(manifest.bucket_bounds))}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        complete = kind is None or issubclass(kind, KeyboardInterrupt)
        for shard in self._open.values():
            if complete and shard.rows:
                shard.commit(self._cache_dir)
            else:
                shard.abandon()
        self._open.clear()

    def append(
        self, bucket: int, job: int, samples: Iterator[tuple[int, tuple[np.ndarray, np.ndarray], Tensor]]
    ) -> None:
        """Write one whole job; `samples` yields sample id, (ids, mask), states. A job never spans two shards."""
        shard = self._open.get(bucket) or self._begin(bucket)
        written = [shard.write(sample, tokens, states) for sample, tokens, states in samples]
        shard.rows += [{**row, "bucket": bucket, "job": job} for row in written]
        age = time.monotonic() - shard.started
        if shard.writer.num_bytes >= self._settings.shard_bytes or age >= self._settings.shard_seconds:
            self._open.pop(bucket).commit(self._cache_dir)

    def _begin(self, bucket: int) -> "OpenShard":
        number, self._next[bucket] = self._next[bucket], self._next[bucket] + 1
        manifest = self._manifest
        path = shard_path(self._cache_dir, bucket, number)
        writer = ShardWriter(path, bucket, len(manifest.layer_ids), manifest.hidden_size, manifest.dtype)
        shard = self._open[bucket] = OpenShard(writer, shard_name(bucket, number), f"{bucket}-{number:06d}")
        return shard

    def _first_free(self, bucket: int) -> int:
        """After the last shard of the bucket, with index rows or without (then it is left over and harmless)."""
        paths = shard_path(self._cache_dir, bucket, 0).parent.glob("shard-*.safetensors")
        return max((int(path.stem.removeprefix("shard-")) + 1 for path in paths), default=0)


class OpenShard:
    """A shard being written and the index rows that will announce it."""

    def __init__(self, writer: ShardWriter, name: str, fragment: str) -> None:
        self.writer = writer.__enter__()
        self.name = name
        self.fragment = fragment
        self.rows: list[dict[str, int]] = []
        self.started = time.monotonic()

    def write(self, sample: int, tokens: tuple[np.ndarray, np.ndarray], states_TLH: Tensor) -> dict[str, int]:
        """Append one sample; returns its index row but for bucket and job. Raises CacheError on states not finite."""
        ids, mask = tokens
        if not bool(torch.isfinite(states_TLH).all()):
            raise CacheError(f"The target's states of sample {sample} are not finite: try target.dtype float32.")
        row, checksum = self.writer.append(torch.from_numpy(ids.copy()), torch.from_numpy(mask.copy()), states_TLH)
        return {
            "sample": sample,
            "row": row,
            "length": len(ids),
            "loss_tokens": int(mask.sum()),
            "checksum": checksum,
        }

    def commit(self, cache_dir: Path) -> None:
        """Publish the shard, then its rows."""
        self.writer.commit()
        self.writer.__exit__(None, None, None)
        columns = {name: [row[name] for row in self.rows] for name in self.rows[0]}
        checksums = pa.array(columns.pop("checksum"), pa.uint64())
        table = pa.table({**columns, "checksum": checksums, "shard": [self.name] * len(self.rows)})
        commit_fragment(cache_dir, table, self.fragment)

    def abandon(self) -> None:
        """Leave nothing."""
        self.writer.__exit__(None, None, None)


def job_table(jobs: JobList) -> pa.Table:
    """One row a job: job, bucket, samples."""
    samples = pa.ListArray.from_arrays(pa.array(jobs.begin, pa.int32()), pa.array(jobs.samples, pa.int64()))
    numbers = pa.array(np.arange(jobs.num_jobs), pa.int32())
    return pa.table({"job": numbers, "bucket": pa.array(jobs.bucket, pa.int16()), "samples": samples})
