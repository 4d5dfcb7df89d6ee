"""Caches for benchmarks that need no target: random states of samples of given lengths, one shard a bucket."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from dflash_cache.cache.index import commit_fragment, consolidate
from dflash_cache.cache.layout import Manifest, shard_name, shard_path, write_manifest
from dflash_cache.cache.shards import ShardWriter
from dflash_cache.cache.state_format import StateFormat
from dflash_cache.data.buckets import assign_buckets

VOCAB = 4096
NUM_OTHER_LAYERS = 3  # of the target, which are not cached
SHORTEST = 16


def draw_lengths(count: int, longest: int) -> np.ndarray:
    """Lengths as conversations have them: log-normal, most short (320 on average), some as long as may be."""
    return np.clip(np.random.default_rng(0).lognormal(5.5, 0.8, count), SHORTEST, longest).astype(np.int32)


def make_cache(
    cache_dir: Path, states: StateFormat, lengths: np.ndarray, bounds: tuple[int, ...], target_fingerprint: str = "-"
) -> None:
    """A finished cache; all samples have the same states, as far as they go, and train their second half."""
    write_manifest(cache_dir, make_manifest(states, bounds, len(lengths), target_fingerprint))
    generator = torch.Generator().manual_seed(0)
    shape = (int(lengths.max()), states.num_layers, states.hidden_size)
    states_TLH = torch.randn(shape, generator=generator, dtype=torch.bfloat16)
    buckets = assign_buckets(lengths, bounds)
    for bucket in np.unique(buckets).tolist():
        members = np.flatnonzero(buckets == bucket)
        with ShardWriter(shard_path(cache_dir, bucket, 0), bucket, states) as writer:
            placed = [
                writer.append(
                    torch.randint(VOCAB - 1, (n,), generator=generator), torch.arange(n) >= n // 2, states_TLH[:n]
                )
                for n in lengths[members].tolist()
            ]
            writer.commit()
        rows = {
            "sample": members,
            "bucket": [bucket] * len(members),
            "shard": [shard_name(bucket, 0)] * len(members),
            "row": [row for row, _ in placed],
            "length": lengths[members],
            "loss_tokens": lengths[members] - lengths[members] // 2,
            "checksum": pa.array([checksum for _, checksum in placed], pa.uint64()),
            "job": [bucket] * len(members),
        }
        commit_fragment(cache_dir, pa.table(rows), str(bucket))
    consolidate(cache_dir)


def make_manifest(
    states: StateFormat, bounds: tuple[int, ...], num_samples: int, target_fingerprint: str = "-"
) -> Manifest:
    """A manifest of the right sizes, of a target that need not exist."""
    return Manifest(
        tool_version="benchmark",
        target_model="synthetic",
        target_revision=None,
        target_fingerprint=target_fingerprint,
        tokenizer_fingerprint="-",
        template_fingerprint="-",
        data_fingerprint="-",
        mask_rule="-",
        layer_ids=tuple(range(1, states.num_layers + 1)),
        target_num_layers=states.num_layers + NUM_OTHER_LAYERS,
        hidden_size=states.hidden_size,
        vocab_size=VOCAB,
        dtype=states.dtype,
        bucket_bounds=bounds,
        max_length=bounds[-1],
        num_samples=num_samples,
        order_seed=0,
    )


def forget_pages(path: Path) -> None:
    """Let the page cache forget a file."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
