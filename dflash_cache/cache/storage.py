"""Shards as byte ranges: open files shared by threads, positioned reads into memory that the caller owns.

A sample's states are one read and one hash, both of which let other threads run. Measured with two threads, cutting
both into pieces that stay in the processor's cache was slower at every size from 128 KiB to 16 MiB, and a loop in C
without Python's lock between its pieces at most 5 % faster. With direct I/O hidden states bypass the page cache where
the file system allows it: straight into the caller's memory where rows lie on pages (`token_bytes` a multiple of
4,096), else in whole pages beside it, of which the states are copied.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from dflash_cache.cache.buffers import BufferPool
from dflash_cache.cache.codec import as_bytes
from dflash_cache.cache.shards import DATA_BEGIN, ID_BYTES, MASK_BYTES, ShardLayout, checksum_sample, read_layout

PAGE_BYTES = 4096
_MAX_IDLE_PAGES = 4  # buffers that wait between two reads


class DamageError(Exception):
    """What is wrong with a shard or a sample; who reads adds which."""


class DirectFile:
    """A file read past the page cache; what does not lie on pages is copied out of a buffer of `pages`."""

    def __init__(self, path: Path, pages: BufferPool) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        self._pages = pages

    def read(self, target: np.ndarray, offset: int) -> None:
        """Fill `target` (flat bytes) from `offset` of the file. Raises DamageError or OSError."""
        if (offset | len(target) | target.ctypes.data) % PAGE_BYTES == 0:
            read_exactly(self._descriptor, target.data, offset)
            return
        skipped = offset % PAGE_BYTES
        num_bytes = skipped + len(target)
        pages = as_bytes(self._pages.lend((-(-num_bytes // PAGE_BYTES) * PAGE_BYTES,), torch.uint8))
        read_exactly(self._descriptor, pages.data, offset - skipped, num_bytes)  # the file may end within the last page
        target[:] = pages[skipped:num_bytes]

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


@dataclass
class Shard:
    """One open shard; `direct` is the same file past the page cache, if it is to be read so."""

    descriptor: int
    direct: DirectFile | None
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
        if self.direct is not None:
            self.direct.read(hidden_bytes, offset)
        else:
            read_exactly(self.descriptor, hidden_bytes.data, offset)
        read_exactly(self.descriptor, ids.view(np.uint8).data, layout.ids_begin + begin * ids.itemsize)
        read_exactly(self.descriptor, mask.data, layout.mask_begin + begin)
        return checksum_sample(hidden_bytes, ids, mask) if checked else None

    @property
    def head(self) -> bytes:
        """All bytes before the data."""
        return os.pread(self.descriptor, DATA_BEGIN, 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)
        if self.direct is not None:
            self.direct.close()


class OpenShards:
    """Recently used shards of a cache; at most `limit` are open, or as many as are in use at once."""

    def __init__(self, cache_dir: Path, limit: int, direct_io: bool = False) -> None:
        self.tables_dir = cache_dir
        self.place = str(cache_dir)
        self._limit = limit
        self._pages = BufferPool(_MAX_IDLE_PAGES) if direct_io else None
        self._lock = Lock()
        self._open: OrderedDict[str, Shard] = OrderedDict()  # least recently used first
        self._closed = False

    @contextmanager
    def borrow(self, name: str) -> Iterator[Shard]:
        """The shard, open at least until the block ends. Raises DamageError if it is missing or not whole."""
        shard = self._take(name) or self._keep(name, open_shard(self.tables_dir / name, self._pages))
        try:
            yield shard
        finally:
            with self._lock:
                shard.num_users -= 1
                self._evict()

    def list_sizes(self) -> dict[str, int]:
        """Bytes by name of all shards that lie there; a link to a disk that is gone is itself what lies there."""
        paths = self.tables_dir.glob("bucket-*/shard-*.safetensors")
        return {path.relative_to(self.tables_dir).as_posix(): _count_bytes(path) for path in paths}

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


def open_shard(path: Path, pages: BufferPool | None = None) -> Shard:
    """Open a shard and read its header; with `pages`, read its states past the page cache if the file system can.

    Raises DamageError if it is missing or not whole, OSError if unreadable.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise DamageError("the shard is missing") from None
    try:
        shard = Shard(descriptor, None, read_layout(descriptor))
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, ValueError):
            raise DamageError(f"the shard is damaged: {error}") from None
        raise
    if pages is not None:
        with suppress(OSError):  # a file system without direct I/O, e.g. tmpfs
            shard.direct = DirectFile(path, pages)
            # Ids and mask go through the page cache: all in one request, instead of two waits a sample.
            num_bytes = shard.layout.num_tokens * (ID_BYTES + MASK_BYTES)
            os.posix_fadvise(descriptor, shard.layout.ids_begin, num_bytes, os.POSIX_FADV_WILLNEED)
    return shard


def read_exactly(descriptor: int, view: memoryview, offset: int, num_bytes: int | None = None) -> None:
    """Fill `view` (flat, unsigned bytes), or its first `num_bytes` at least, from `offset` of the file.

    One read takes 2 GiB at most. Raises DamageError if the file ends before.
    """
    done, wanted = 0, len(view) if num_bytes is None else num_bytes
    while done < wanted:
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise DamageError("the shard ends too early")
        done += count


def _count_bytes(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    with suppress(FileNotFoundError):  # a writer may have removed it meanwhile
        return path.lstat().st_size
    return 0
