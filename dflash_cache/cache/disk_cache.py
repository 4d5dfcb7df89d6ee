"""A local disk before an object store: samples as they were read, at most so many bytes, the longest unused go first.

An entry is one file: the arrays back to back and the hash of them. What is damaged, cut or gone is a miss, never an
error. Losing the folder, or a kill, costs nothing but reading again; so nothing is flushed.
"""

import os
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

import numpy as np
from xxhash import xxh3_64, xxh3_64_hexdigest

from dflash_cache.cache.files import explain_write_errors

_SUFFIX = ".sample"
_HASH_BYTES = 8


class DiskCache:
    """Arrays by key in one folder; several threads may use it, one process."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._lock = Lock()
        self._held = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()  # longest unused first
        with explain_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            found = sorted(
                (path.stat().st_mtime, path.name, path.stat().st_size) for path in folder.glob(f"*{_SUFFIX}")
            )
        for _, name, size in found:
            self._remember(name, size)

    def read(self, key: str, arrays: Sequence[np.ndarray]) -> bool:
        """Fill the arrays (flat, contiguous) with what was kept under `key`; False if it is not there or damaged."""
        name = _file_name(key)
        views = [array.view(np.uint8) for array in arrays]
        digest = np.empty(_HASH_BYTES, np.uint8)
        try:
            descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            count = os.preadv(descriptor, [*(view.data for view in views), digest.data], 0)
            os.utime(descriptor)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        if count != sum(map(len, views)) + _HASH_BYTES or digest.tobytes() != _hash(views):
            return False
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)
        return True

    def write(self, key: str, arrays: Sequence[np.ndarray]) -> None:
        """Keep the arrays; a full disk is no error, they are then not kept."""
        name = _file_name(key)
        views = [array.view(np.uint8) for array in arrays]
        size = sum(map(len, views)) + _HASH_BYTES
        if size > self._max_bytes:
            return
        temporary = self._folder / f".{secrets.token_hex(8)}"
        try:
            with temporary.open("xb") as file:
                for view in views:
                    file.write(view.data)
                file.write(_hash(views))
            temporary.replace(self._folder / name)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            return
        self._remember(name, size)

    def _remember(self, name: str, size: int) -> None:
        with self._lock:
            self._held += size - self._sizes.pop(name, 0)
            self._sizes[name] = size
            while self._held > self._max_bytes:
                oldest, freed = self._sizes.popitem(last=False)
                self._held -= freed
                with suppress(OSError):
                    (self._folder / oldest).unlink()


def _file_name(key: str) -> str:
    return xxh3_64_hexdigest(key.encode()) + _SUFFIX


def _hash(views: Sequence[np.ndarray]) -> bytes:
    hasher = xxh3_64()
    for view in views:
        hasher.update(view.data)
    return hasher.digest()
