"""The reader: padded batches of samples, read straight from the shards into the batch's own memory.

A sample's hidden states are one contiguous range of its shard, so each is one positioned read into its row of the
padded tensor: no second copy, only the padding is zeroed. Reads, zeroing and checksums of large buffers release the
GIL, so threads share one reader and scale. What a reader sees is fixed when it opens: the index rows then present,
named by `fingerprint`.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Self

import numpy as np
import torch
from torch import Tensor

from dflash_cache.cache.index import IndexColumns, index_fingerprint, open_index, split_columns
from dflash_cache.cache.layout import Manifest, read_manifest
from dflash_cache.cache.shards import TORCH_DTYPES, ShardLayout, as_bytes, checksum_sample, read_layout
from dflash_cache.errors import CacheError


@dataclass(frozen=True)
class Batch:
    """S samples padded to the longest, T tokens, on the CPU.

    sample, length: (S,) int64; input_ids: (S, T) int64, padded with 0; loss_mask: (S, T) bool, padded with False;
    hidden_STLH: in the cache's dtype, padded with 0.
    """

    sample: Tensor
    length: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    hidden_STLH: Tensor


class CacheReader:
    """Random access to a cache's samples; any number of threads may call `read_batch` at once."""

    def __init__(self, cache_dir: Path, verify_checksums: bool = True, max_open_shards: int = 128) -> None:
        self._manifest = read_manifest(cache_dir)
        table = open_index(cache_dir)
        self._index = split_columns(table)
        self._fingerprint = index_fingerprint(table)
        self._verify_checksums = verify_checksums
        self._shards = _OpenShards(cache_dir, max_open_shards)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all shards, each as soon as no read uses it."""
        self._shards.close()

    @property
    def manifest(self) -> Manifest:
        """What the cache holds and what it was made from."""
        return self._manifest

    @property
    def index(self) -> IndexColumns:
        """The index, one position a sample."""
        return self._index

    @property
    def fingerprint(self) -> str:
        """Identifies the set of samples, and their bits, that this reader sees."""
        return self._fingerprint

    def read_batch(self, rows: np.ndarray) -> Batch:
        """The samples at these positions of the index, in this order.

        Raises CacheError, naming shard and sample, on a missing or damaged shard or a wrong checksum; IndexError on
        a position outside the index.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if rows.ndim != 1 or len(rows) == 0 or rows.min() < 0:
            raise IndexError(f"read_batch needs a one-dimensional array of positions from 0, got {rows}")
        length = self._index.length[rows].astype(np.int64)
        S, T, L, H = len(rows), int(length.max()), len(self._manifest.layer_ids), self._manifest.hidden_size
        ids = np.zeros((S, T), dtype="<i4")
        mask = np.zeros((S, T), dtype=np.uint8)
        hidden_STLH = torch.empty(S, T, L, H, dtype=TORCH_DTYPES[self._manifest.dtype])
        for s, row in enumerate(rows.tolist()):
            n = int(length[s])
            hidden_STLH[s, n:].zero_()
            self._read_sample(row, hidden_STLH[s, :n], ids[s, :n], mask[s, :n])
        return Batch(
            sample=torch.from_numpy(self._index.sample[rows]),
            length=torch.from_numpy(length),
            input_ids=torch.from_numpy(ids.astype(np.int64)),
            loss_mask=torch.from_numpy(mask != 0),
            hidden_STLH=hidden_STLH,
        )

    def _read_sample(self, row: int, hidden_TLH: Tensor, ids: np.ndarray, mask: np.ndarray) -> None:
        """Fill one sample's part of the batch, and compare its checksum."""
        shard = self._index.shard_names[self._index.shard[row]]
        begin, length = int(self._index.row[row]), int(self._index.length[row])
        hidden_bytes = as_bytes(hidden_TLH)
        try:
            with self._shards.borrow(shard) as (descriptor, layout):
                self._check_layout(layout, begin + length)
                _read_exactly(descriptor, hidden_bytes, layout.hidden_begin + begin * layout.token_bytes)
                _read_exactly(descriptor, ids.view(np.uint8), layout.ids_begin + begin * ids.itemsize)
                _read_exactly(descriptor, mask, layout.mask_begin + begin)
            if self._verify_checksums and checksum_sample(hidden_bytes, ids, mask) != int(self._index.checksum[row]):
                raise _DamageError("its checksum is not the index's")
        except (_DamageError, OSError) as error:
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            raise CacheError(
                f"Sample {self._index.sample[row]} cannot be read from shard {shard} of {self._shards.cache_dir} "
                f"({reason}): run `dflash verify` to list all damage, then restore those shards from a copy or "
                "generate the cache anew."
            ) from None

    def _check_layout(self, layout: ShardLayout, end: int) -> None:
        found = layout.num_layers, layout.hidden_size, layout.dtype
        expected = len(self._manifest.layer_ids), self._manifest.hidden_size, self._manifest.dtype
        if found != expected:
            raise _DamageError(f"the shard holds layers, hidden size and dtype {found}, the manifest says {expected}")
        if end > layout.num_tokens:
            raise _DamageError(f"the shard holds {layout.num_tokens:,} tokens, the index points up to {end:,}")


class _DamageError(Exception):
    """What is wrong with a shard; becomes a CacheError that names the sample."""


@dataclass
class _OpenShard:
    descriptor: int
    layout: ShardLayout
    num_users: int = 0


class _OpenShards:
    """Descriptors of recently used shards; at most `limit` are open, or as many as are in use at once."""

    def __init__(self, cache_dir: Path, limit: int) -> None:
        self.cache_dir = cache_dir
        self._limit = limit
        self._lock = Lock()
        self._open: OrderedDict[str, _OpenShard] = OrderedDict()  # least recently used first
        self._closed = False

    @contextmanager
    def borrow(self, name: str) -> Iterator[tuple[int, ShardLayout]]:
        """The shard's descriptor and layout, open at least until the block ends."""
        shard = self._take(name) or self._keep(name, _open_shard(self.cache_dir / name))
        try:
            yield shard.descriptor, shard.layout
        finally:
            with self._lock:
                shard.num_users -= 1
                self._evict()

    def close(self) -> None:
        """Close what is idle now, and the rest when it is given back."""
        with self._lock:
            self._closed = True
            self._evict()

    def _take(self, name: str) -> _OpenShard | None:
        with self._lock:
            if self._closed:
                raise ValueError("the reader is closed")
            shard = self._open.get(name)
            if shard is not None:
                shard.num_users += 1
                self._open.move_to_end(name)
            return shard

    def _keep(self, name: str, opened: _OpenShard) -> _OpenShard:
        """Remember a shard opened outside the lock; if another thread was faster, use that one's."""
        with self._lock:
            shard = self._open.setdefault(name, opened)
            if shard is not opened:
                os.close(opened.descriptor)
            shard.num_users += 1
            return shard

    def _evict(self) -> None:
        surplus = len(self._open) - (0 if self._closed else self._limit)
        if surplus <= 0:
            return
        for name in [name for name, shard in self._open.items() if not shard.num_users][:surplus]:
            os.close(self._open.pop(name).descriptor)


def _open_shard(path: Path) -> _OpenShard:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _DamageError("the shard is missing") from None
    try:
        return _OpenShard(descriptor, read_layout(descriptor))
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, ValueError):
            raise _DamageError(f"the shard is damaged: {error}") from None
        raise


def _read_exactly(descriptor: int, target: np.ndarray, offset: int) -> None:
    """Fill `target` (flat, uint8) from `offset` of the file; one read takes 2 GiB at most."""
    view = target.data
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise _DamageError("the shard ends too early")
        view, offset = view[count:], offset + count
