"""One worker: takes a job from the deal, forwards it, and hands it to the thread that writes, until none is left."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_cache.cache.index import cached_rows
from dflash_cache.cache.rejected import read_rejected
from dflash_cache.cache.writer import CacheWriter, SampleStates, ShardLimits
from dflash_cache.config.settings import Config
from dflash_cache.data.samples import sample_tokens
from dflash_cache.errors import TargetError
from dflash_cache.target.dealer import Dealer
from dflash_cache.target.faults import REASONS
from dflash_cache.target.load import Target
from dflash_cache.target.observer import Observer
from dflash_cache.target.pipeline import Job, JobPipeline, JobStates
from dflash_cache.target.prepare import Preparation


@dataclass(frozen=True)
class BufferPlan:
    """How many buffers a worker has, each of `size` numbers of the target's dtype, together `num_bytes`."""

    count: int
    size: int
    num_bytes: int


def work(config: Config, target: Target, preparation: Preparation, dealer: Dealer, observer: Observer) -> None:
    """Do jobs until none is left; however it ends, every whole job handed to the writer is committed if it can be."""
    settings, manifest = config.generate, preparation.manifest
    limits = ShardLimits(settings.shard_bytes, settings.shard_seconds)
    buffers = plan_buffers(config, preparation)
    lengths = preparation.lengths
    total = int(lengths.sum())
    observer.forwarding(dealer.add_tokens(0), total)
    with CacheWriter(Path(config.cache_dir), manifest, limits, dealer.next_shard) as writer:
        sink = JobSink(config, preparation, writer, dealer)
        with JobPipeline(target, sink.write, buffers.count, buffers.size) as pipeline:
            while (number := dealer.next_job()) is not None:
                samples = preparation.jobs.samples_of(number)
                ids = [sample_tokens(preparation.samples, int(sample))[0] for sample in samples]
                pipeline.forward(Job(number, int(preparation.jobs.bucket[number]), samples, ids))
                observer.forwarding(dealer.add_tokens(int(lengths[samples][sink.missing[samples]].sum())), total)


class JobSink:
    """Takes forwarded jobs to the writer; bad samples are left out, recorded and counted."""

    def __init__(self, config: Config, preparation: Preparation, writer: CacheWriter, dealer: Dealer) -> None:
        self.missing = missing_samples(Path(config.cache_dir), len(preparation.bucket_N))
        self._max_bad_share = config.generate.max_bad_share
        self._preparation = preparation
        self._writer = writer
        self._dealer = dealer

    def write(self, states: JobStates) -> None:
        """Write a job's missing samples. Raises TargetError when more samples are bad than may be, or WriteError."""
        good, num_bad, job = [], 0, states.job
        for place, (sample, fault) in enumerate(zip(job.samples.tolist(), states.faults_S.tolist(), strict=True)):
            if not self.missing[sample]:  # a job redone for the sake of some: the others are there
                continue
            if fault:
                self._writer.reject(sample, REASONS[fault])
                num_bad += 1
                continue
            ids, mask = sample_tokens(self._preparation.samples, sample)
            good.append(SampleStates(sample, ids, mask, states.sample_states(place)))
        if good:
            self._writer.append(job.bucket, job.number, good)
        if num_bad:
            check_bad_share(self._dealer.add_bad(num_bad), len(self.missing), self._max_bad_share)


def check_bad_share(num_bad: int, num_samples: int, max_share: float) -> None:
    """Raise TargetError if more than `max_share` of all samples are bad."""
    if num_bad > max_share * num_samples:
        raise TargetError(
            f"The target gave bad states for {num_bad:,} of {num_samples:,} samples, more than generate.max_bad_share "
            f"({max_share:g}): see that the target is whole and computes right (target.dtype float32 overflows least), "
            "or raise that share."
        )


def missing_samples(cache_dir: Path, num_samples: int) -> np.ndarray:
    """Which samples are neither cached nor recorded as bad, bool (N,)."""
    missing = np.ones(num_samples, np.bool_)
    missing[cached_rows(cache_dir)["sample"].to_numpy()] = False
    missing[read_rejected(cache_dir)["sample"].to_numpy()] = False
    return missing


def plan_buffers(config: Config, preparation: Preparation) -> BufferPlan:
    """As many buffers of the largest job's size as `generate.buffer_bytes` holds; at least one, at most one a job."""
    manifest, jobs = preparation.manifest, preparation.jobs
    longest_J = preparation.lengths[jobs.samples[jobs.begin[1:] - 1]]  # a job's samples ascend by length
    num_tokens = int((longest_J * np.diff(jobs.begin)).max())
    num_bytes = num_tokens * manifest.states.unpacked_token_bytes
    count = max(1, min(config.generate.buffer_bytes // num_bytes, jobs.num_jobs))
    return BufferPlan(count, num_tokens * len(manifest.layer_ids) * manifest.hidden_size, count * num_bytes)
