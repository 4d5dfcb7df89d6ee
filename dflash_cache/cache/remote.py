"""Caches in object stores, read by ranges.

Manifest and index are copied into a temporary folder and read there as any cache's. A sample is a few ranged reads,
long ones in pieces, all of them over a pool of connections at once, each tried again as `store` says.
"""

import re
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import numpy as np

from dflash_cache.cache.disk_cache import DiskCache
from dflash_cache.cache.shards import DATA_BEGIN, ShardLayout, checksum_sample, parse_layout
from dflash_cache.cache.storage import DamageError
from dflash_cache.cache.store import RemoteStore
from dflash_cache.config.settings import RemoteSettings
from dflash_cache.errors import CacheError

MARKER = "writer.json"  # who writes the cache, see `marker`
_TABLES = ("index", "rejected")  # folders of small files that are copied
_SHARD = r"bucket-\d+/shard-\d+\.safetensors"
_PIECE_BYTES = 8 << 20
_MAX_KNOWN_SHARDS = 4096


def copy_tables(store: RemoteStore, folder: Path, everything: bool = False) -> None:
    """Manifest, index and records of a cache into a local folder, with `everything` all files but the shards.

    Raises CacheError.
    """
    names = [name for table in _TABLES for name in store.list_sizes(table) if name.endswith(".parquet")]
    if everything:
        names = [name for name in store.list_sizes("") if not name.startswith("bucket-") and name != MARKER]
    try:
        store.fetch(dict.fromkeys(["manifest.json", *names]), folder)
    except FileNotFoundError:
        raise CacheError(
            f"There is no cache at {store.place}: copy one there, let `dflash generate` write one, or correct "
            "cache_dir in the configuration."
        ) from None


def list_shards(store: RemoteStore) -> dict[str, int]:
    """Bytes by name of all shards in a store, announced or not. Raises CacheError."""
    return {name: size for name, size in store.list_sizes("").items() if re.fullmatch(_SHARD, name)}


class RemoteShard:
    """One shard in a store, as `storage.Shard` is one on a disk."""

    def __init__(self, store: RemoteStore, name: str, pool: ThreadPoolExecutor, kept: DiskCache | None) -> None:
        self._store, self._name, self._pool, self._kept = store, name, pool, kept
        self._handle = store.open(name)
        self.head: bytes = self._handle.read_at(DATA_BEGIN, 0)
        self._stamp = store.stamp(name) if kept is not None else ""  # a repaired cache may use a shard's name again
        self.layout: ShardLayout = parse_layout(self.head, self._handle.size())

    def read_sample(
        self, begin: int, hidden_bytes: np.ndarray, ids: np.ndarray, mask: np.ndarray, checked: bool
    ) -> int | None:
        """As `storage.Shard.read_sample`, from the disk cache if it is there."""
        arrays = (hidden_bytes, ids.view(np.uint8), mask)
        key = f"{self._store.place}/{self._name}:{self._stamp}:{begin}:{len(ids)}"
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

    def __init__(self, uri: str, settings: RemoteSettings, all_tables: bool = False) -> None:
        self.store = RemoteStore(uri, settings)
        self.place = self.store.place
        self._folder = tempfile.TemporaryDirectory(prefix="dflash-cache-")
        self.tables_dir = Path(self._folder.name)
        copy_tables(self.store, self.tables_dir, all_tables)
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

    def list_sizes(self) -> dict[str, int]:
        """Bytes by name of all shards that lie there."""
        return list_shards(self.store)

    def close(self) -> None:
        """Let the connections and the copied tables go."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._folder.cleanup()


def _cut(arrays: Sequence[np.ndarray], offsets: Sequence[int]) -> Iterator[tuple[np.ndarray, int]]:
    """Pieces of at most `_PIECE_BYTES` and where each lies in the object."""
    for array, offset in zip(arrays, offsets, strict=True):
        for at in range(0, len(array), _PIECE_BYTES):
            yield array[at : at + _PIECE_BYTES], offset + at
