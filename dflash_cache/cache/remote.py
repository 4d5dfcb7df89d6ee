"""Caches in object stores (S3, GCS, HDFS, whatever pyarrow.fs opens by a URI), read by ranges.

Manifest and index are copied into a temporary folder and read there as any cache's. A sample is a few ranged reads,
long ones in pieces, all of them over a pool of connections at once. Stores fail now and then: whatever fails is tried
again with growing pauses until `retry_seconds` are over; only then, or if the object does not exist, is it an error.
"""

import re
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from pyarrow import fs

from dflash_cache.cache.disk_cache import DiskCache
from dflash_cache.cache.shards import DATA_BEGIN, ShardLayout, checksum_sample, parse_layout
from dflash_cache.cache.storage import DamageError
from dflash_cache.config.settings import RemoteSettings
from dflash_cache.errors import CacheError, ConfigError

Result = TypeVar("Result")
_TABLES = ("index", "rejected")  # folders of small files that are copied
_PIECE_BYTES = 8 << 20
_MAX_KNOWN_SHARDS = 4096
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0  # seconds between two tries


def is_remote(cache_dir: Path | str) -> bool:
    """Whether it is a URI."""
    return isinstance(cache_dir, str) and re.match(r"[a-z][a-z0-9+]*://", cache_dir) is not None


class RemoteStore:
    """One cache's objects. `place` is its URI without credentials and options; `num_retries` counts second tries."""

    def __init__(self, uri: str, settings: RemoteSettings) -> None:
        self.place = re.sub(r"//[^/@]*@", "//", uri.partition("?")[0]).rstrip("/")
        self.num_retries = 0
        self._settings = settings
        try:
            self._files, self._root = fs.FileSystem.from_uri(uri)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ConfigError(
                f"The store of cache_dir {self.place} cannot be opened ({_first_line(error)}): correct the URI."
            ) from None

    def open(self, name: str) -> Any:
        """A handle for positioned reads of an object. Raises FileNotFoundError or OSError."""
        return self._files.open_input_file(f"{self._root}/{name}")

    def copy_tables(self, folder: Path) -> None:
        """Manifest, index and records of the cache into a local folder. Raises CacheError."""

        def copy() -> None:
            selectors = [fs.FileSelector(f"{self._root}/{name}", allow_not_found=True) for name in _TABLES]
            found = [info.path for selector in selectors for info in self._files.get_file_info(selector)]
            for path in [f"{self._root}/manifest.json", *(path for path in found if path.endswith(".parquet"))]:
                local = folder / path.removeprefix(f"{self._root}/")
                local.parent.mkdir(exist_ok=True)
                with self._files.open_input_stream(path) as stream:
                    local.write_bytes(stream.read())

        try:
            self.try_again(copy)
        except FileNotFoundError:
            raise CacheError(
                f"There is no cache at {self.place}: copy one there, or correct cache_dir in the configuration."
            ) from None
        except OSError as error:
            raise CacheError(
                f"The cache at {self.place} cannot be reached ({_first_line(error)}): see that the store runs and that "
                "its credentials are right."
            ) from None

    def try_again(self, action: Callable[[], Result]) -> Result:
        """The action's result; an OSError other than a missing object is tried again until the time is over."""
        begun, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            try:
                return action()
            except FileNotFoundError:
                raise
            except OSError:
                if time.monotonic() - begun + pause > self._settings.retry_seconds:
                    raise
            self.num_retries += 1
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


class RemoteShard:
    """One shard in a store, as `storage.Shard` is one on a disk."""

    def __init__(self, store: RemoteStore, name: str, pool: ThreadPoolExecutor, kept: DiskCache | None) -> None:
        self._store, self._name, self._pool, self._kept = store, name, pool, kept
        self._handle = store.open(name)
        head = self._handle.read_at(DATA_BEGIN, 0)
        self.layout: ShardLayout = parse_layout(head, self._handle.size())

    def read_sample(
        self, begin: int, hidden_bytes: np.ndarray, ids: np.ndarray, mask: np.ndarray, checked: bool
    ) -> int | None:
        """As `storage.Shard.read_sample`, from the disk cache if it is there."""
        arrays = (hidden_bytes, ids.view(np.uint8), mask)
        key = f"{self._store.place}/{self._name}:{begin}:{len(ids)}"
        if self._kept is None or not self._kept.read(key, arrays):
            layout = self.layout
            offsets = (
                layout.hidden_begin + begin * layout.token_bytes,
                layout.ids_begin + begin * ids.itemsize,
                layout.mask_begin + begin,
            )
            self._fetch(list(_cut(arrays, offsets)))
            if self._kept is not None:
                self._kept.write(key, arrays)
        return checksum_sample(hidden_bytes, ids, mask) if checked else None

    def _fetch(self, pieces: list[tuple[np.ndarray, int]]) -> None:
        """Read all pieces at once, each as often as need be."""
        for _ in self._pool.map(self._fetch_piece, pieces):
            pass

    def _fetch_piece(self, piece: tuple[np.ndarray, int]) -> None:
        target, offset = piece
        data = self._store.try_again(lambda: self._handle.read_at(len(target), offset))
        if len(data) != len(target):
            raise DamageError("the shard ends too early")
        target[:] = np.frombuffer(data, np.uint8)


class RemoteShards:
    """A remote cache's shards, as `storage.OpenShards` are a local one's."""

    def __init__(self, uri: str, settings: RemoteSettings) -> None:
        self.store = RemoteStore(uri, settings)
        self.place = self.store.place
        self._folder = tempfile.TemporaryDirectory(prefix="dflash-cache-")
        self.tables_dir = Path(self._folder.name)
        self.store.copy_tables(self.tables_dir)
        kept_dir = settings.disk_cache_dir
        self._kept = DiskCache(Path(kept_dir), settings.disk_cache_bytes) if kept_dir is not None else None
        self._pool = ThreadPoolExecutor(settings.connections, thread_name_prefix="remote")
        self._lock = Lock()
        self._known: OrderedDict[str, RemoteShard] = OrderedDict()  # least recently used first

    @contextmanager
    def borrow(self, name: str) -> Iterator[RemoteShard]:
        """The shard. Raises DamageError if it is missing or not whole, OSError if the store fails for too long."""
        with self._lock:
            shard = self._known.get(name)
        if shard is None:
            try:
                shard = self.store.try_again(lambda: RemoteShard(self.store, name, self._pool, self._kept))
            except FileNotFoundError:
                raise DamageError("the shard is missing") from None
            except ValueError as error:
                raise DamageError(f"the shard is damaged: {error}") from None
        with self._lock:
            self._known[name] = shard
            self._known.move_to_end(name)
            while len(self._known) > _MAX_KNOWN_SHARDS:
                self._known.popitem(last=False)
        yield shard

    def close(self) -> None:
        """Let the connections and the copied tables go."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._folder.cleanup()


def _cut(arrays: Sequence[np.ndarray], offsets: Sequence[int]) -> Iterator[tuple[np.ndarray, int]]:
    """Pieces of at most `_PIECE_BYTES` and where each lies in the object."""
    for array, offset in zip(arrays, offsets, strict=True):
        for at in range(0, len(array), _PIECE_BYTES):
            yield array[at : at + _PIECE_BYTES], offset + at


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
