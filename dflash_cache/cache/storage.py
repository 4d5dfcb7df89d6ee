"""Shards as byte ranges: open files shared by threads, positioned reads into memory that the caller owns.

A sample's states are one read and one hash, both of which let other threads run. Measured with two threads, cutting
both into pieces that stay in the processor's cache was slower at every size from 128 KiB to 16 MiB, and a loop in C
without Python's lock between its pieces no more than 3 % faster. With direct I/O hidden states bypass the page cache
where their rows lie on pages (`token_bytes` a multiple of 4,096) and the file system allows it; all else is read as
usual.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np

from dflash_cache.cache.shards import DATA_BEGIN, ID_BYTES, MASK_BYTES, ShardLayout, checksum_sample, read_layout

PAGE_BYTES = 4096


class DamageError(Exception):
    """What is wrong with a shard or a sample; who reads adds which."""


@dataclass
class Shard:
    """One open shard; `direct` is a second descriptor past the page cache, -1 without."""

    descriptor: int
    direct: int
    layout: ShardLayout
    num_users: int = 0

    def read_sample(
        self, begin: int, hidden_bytes: np.ndarray, ids: np.ndarray, mask: np.ndarray, checked: bool
    ) -> int | None:
        """Fill one sample's arrays (flat bytes; int32; uint8), from token `begin` of the shard on.

        Returns its checksum (as `shards.checksum_sample`) if `checked`. Raises DamageError or OSError.
        """
        layout = self.layout
        offset = layout.hidden_begin + begin * layout.token_bytes
        read_exactly(self._descriptor_for(hidden_bytes, offset), hidden_bytes.data, offset)
        read_exactly(self.descriptor, ids.view(np.uint8).data, layout.ids_begin + begin * ids.itemsize)
        read_exactly(self.descriptor, mask.data, layout.mask_begin + begin)
        return checksum_sample(hidden_bytes, ids, mask) if checked else None

    @property
    def head(self) -> bytes:
        """All bytes before the data."""
        return os.pread(self.descriptor, DATA_BEGIN, 0)

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self.descriptor)
        if self.direct >= 0:
            os.close(self.direct)

    def _descriptor_for(self, target: np.ndarray, offset: int) -> int:
        on_pages = (offset | len(target) | target.ctypes.data) % PAGE_BYTES == 0
        return self.direct if self.direct >= 0 and on_pages else self.descriptor


class OpenShards:
    """Recently used shards of a cache; at most `limit` are open, or as many as are in use at once."""

    def __init__(self, cache_dir: Path, limit: int, direct_io: bool = False) -> None:
        self.tables_dir = cache_dir
        self.place = str(cache_dir)
        self._limit = limit
        self._direct_io = direct_io
        self._lock = Lock()
        self._open: OrderedDict[str, Shard] = OrderedDict()  # least recently used first
        self._closed = False

    @contextmanager
    def borrow(self, name: str) -> Iterator[Shard]:
        """The shard, open at least until the block ends. Raises DamageError if it is missing or not whole."""
        shard = self._take(name) or self._keep(name, open_shard(self.tables_dir / name, self._direct_io))
        try:
            yield shard
        finally:
            with self._lock:
                shard.num_users -= 1
                self._evict()

    def list_sizes(self) -> dict[str, int]:
        """Bytes by name of all shards that lie there."""
        paths = self.tables_dir.glob("bucket-*/shard-*.safetensors")
        return {path.relative_to(self.tables_dir).as_posix(): path.stat().st_size for path in paths}

    def close(self) -> None:
        """Close what is idle now, and the rest when it is given back."""
        with self._lock:
            self._closed = True
            self._evict()

    def _take(self, name: str) -> Shard | None:
        with self._lock:
            if self._closed:
                raise ValueError("the reader is closed")
            shard = self._open.get(name)
            if shard is not None:
                shard.num_users += 1
                self._open.move_to_end(name)
            return shard

    def _keep(self, name: str, opened: Shard) -> Shard:
        """Remember a shard opened outside the lock; if another thread was faster, use that one's."""
        with self._lock:
            shard = self._open.setdefault(name, opened)
            if shard is not opened:
                opened.close()
            shard.num_users += 1
            return shard

    def _evict(self) -> None:
        surplus = len(self._open) - (0 if self._closed else self._limit)
        if surplus <= 0:
            return
        for name in [name for name, shard in self._open.items() if not shard.num_users][:surplus]:
            self._open.pop(name).close()


def open_shard(path: Path, direct_io: bool = False) -> Shard:
    """Open a shard and read its header. Raises DamageError if it is missing or not whole, OSError if unreadable."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise DamageError("the shard is missing") from None
    shard_direct = -1
    try:
        layout = read_layout(descriptor)
        if direct_io and layout.token_bytes % PAGE_BYTES == 0:
            with suppress(OSError):  # a file system without direct I/O, e.g. tmpfs: through the page cache then
                shard_direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                # Ids and mask go through the page cache: all in one request, instead of two waits a sample.
                num_bytes = layout.num_tokens * (ID_BYTES + MASK_BYTES)
                os.posix_fadvise(descriptor, layout.ids_begin, num_bytes, os.POSIX_FADV_WILLNEED)
        return Shard(descriptor, shard_direct, layout)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, ValueError):
            raise DamageError(f"the shard is damaged: {error}") from None
        raise


def read_exactly(descriptor: int, view: memoryview, offset: int) -> None:
    """Fill `view` (flat, unsigned bytes) from `offset` of the file; one read takes 2 GiB at most."""
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise DamageError("the shard ends too early")
        view, offset = view[count:], offset + count
