"""A cache in a store is made in a local folder and put there shard by shard: the shard, its index rows, then the local
copy goes.

In the folder all is as on any disk: lock, tables, open shards, fragments. The store has the last word: at the start
its tables replace the local ones. What a stopped run had committed here and not yet put goes first, unless another
machine has cached those samples in the meantime. Nothing is remembered: a local shard is one that waits.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_64_hexdigest

from dflash_cache.cache.files import explain_write_errors, remove_leftovers, write_atomically
from dflash_cache.cache.index import SCHEMA, fragment_path, list_index_files, read_index_file
from dflash_cache.cache.layout import data_report_path, index_dir, jobs_path, manifest_path, responses_dir, samples_dir
from dflash_cache.cache.lock import lock_cache
from dflash_cache.cache.marker import WriterMarker
from dflash_cache.cache.rejected import rejected_dir
from dflash_cache.cache.remote import MARKER, list_shards
from dflash_cache.cache.store import RemoteStore
from dflash_cache.cache.writer import SHARDS, fragment_name, refuse_lost_index
from dflash_cache.config.settings import RemoteSettings
from dflash_cache.errors import CacheError, WriteError

_POLL_SECONDS = 0.2
_KEPT = ("writer.lock",)
_TABLES = (".parquet", ".json", ".yaml")


class Staging:
    """The folder of one store's cache; a context manager that holds its lock and the store's marker.

    `noted` is told what the user should know; a worker that joins the first one gives that one's `token` and its own
    number. Raises CacheError if someone else writes the cache.
    """

    def __init__(
        self,
        uri: str,
        settings: RemoteSettings,
        noted: Callable[[str], None] = lambda sentence: None,
        joins: tuple[str, int] | None = None,
    ) -> None:
        self._store = RemoteStore(uri, settings)
        self.place = self._store.place
        self.folder = staging_folder(uri, settings, joins[1] if joins else 0)
        self.lock: int | None = None
        self._settings = settings
        self._noted = noted
        self._stack = ExitStack()
        self._joins = joins
        self._stamps: dict[str, tuple[int, int]] = {}  # of local files that are in the store as they are
        self._marker: WriterMarker | None = None

    def __enter__(self) -> Self:
        with self._stack:
            self.lock = self._stack.enter_context(lock_cache(self.folder))
            if self._joins is not None:
                self._marker = WriterMarker(self._store, "", self._joins[0])
            else:
                self._marker = WriterMarker(self._store, self._own_name())
                self._stack.callback(self._marker.release)
                if sentence := self._marker.claim():
                    self._noted(sentence)
            self._fetch()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def token(self) -> str:
        """What other workers of this run join with."""
        assert self._marker is not None
        return self._marker.token

    def put_tables(self) -> None:
        """Put what is known before the first forward, the manifest last. Raises WriteError."""
        self._put_changed(responses_dir(self.folder), samples_dir(self.folder), jobs_path(self.folder))
        self._put_changed(data_report_path(self.folder), self.folder / "config.yaml", manifest_path(self.folder))

    @contextmanager
    def putting(self, pause: Callable[[bool], None], stop: Callable[[], None]) -> Iterator[None]:
        """Put shards as they are committed, on a thread, while the block runs; at its end all of them are there.

        `pause` is told whether more shards wait than may; `stop` is called when a put has failed for good. Raises
        WriteError at the end of the block, unless another exception is under way.
        """
        failures: list[BaseException] = []
        ended = Event()

        def put() -> None:
            try:
                while not ended.wait(_POLL_SECONDS):
                    self.put_ready()
            except BaseException as failure:  # raised where the block ends
                failures.append(failure)
                stop()

        def watch() -> None:
            is_paused = False
            while not ended.wait(_POLL_SECONDS):
                is_full = not failures and self._waiting_bytes() > self._settings.staging_bytes
                if is_full != is_paused:
                    pause(is_full)
                    is_paused = is_full

        threads = [Thread(target=work, name=f"staging {work.__name__}", daemon=True) for work in (put, watch)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()
            self._put_last(failures)
        if failures:
            raise self._explain(failures[0])

    def put_ready(self) -> None:
        """Put all shards that wait, each with its rows after it, and the records of left-out samples before."""
        self._put_changed(rejected_dir(self.folder))
        for fragment, shard in self._list_waiting().items():
            self._check_marker()
            self._store.put_file(self._name(shard), shard, self._settings.check_puts)
            self._check_marker()
            self._put_changed(fragment)
            with explain_write_errors(shard):
                shard.unlink()

    def gather(self) -> None:
        """Fetch the rows and records that other workers have put."""
        for name, size in {**self._store.list_sizes("index"), **self._store.list_sizes("rejected")}.items():
            if name.endswith(".parquet") and not (self.folder / name).exists():
                self._fetch_table(name, size)

    def finish(self) -> None:
        """Put the consolidated index and whatever else is new, drop the fragments, and empty the folder."""
        self.put_ready()
        self.put_tables()
        self._check_marker()
        self._put_changed(index_dir(self.folder))
        here = {self._name(path) for path in list_index_files(self.folder)}
        for name in self._store.list_sizes("index"):
            if name.startswith("index/fragment-") and name not in here:
                self._store.delete(name)
        self.clear()

    def clear(self) -> None:
        """Empty the folder."""
        with explain_write_errors(self.folder):
            for path in self.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name not in _KEPT:
                    path.unlink()

    def _fetch(self) -> None:
        """Bring the folder to the state of the store, but for shards that wait."""
        in_store = self._store.list_sizes("")
        remove_leftovers(self.folder)
        waiting = self._list_waiting() if "manifest.json" in in_store and self._joins is None else {}
        self._drop_all_but(waiting)
        tables = [name for name in in_store if name.endswith(_TABLES) and name != MARKER]
        if self._joins is not None:  # the first worker has prepared the samples that the answers are for
            tables = [name for name in tables if not name.startswith("responses/")]
        for name in tables:
            self._fetch_table(name, in_store[name])
        if self._joins is None:
            self._drop_overtaken(waiting, [name for name in tables if name.startswith("index/")])

    def _fetch_table(self, name: str, size: int) -> None:
        path = self.folder / name
        never_changes = name.startswith(("samples/", "responses/"))
        if not (never_changes and path.exists() and path.stat().st_size == size):
            self._store.fetch([name], self.folder)
        self._stamps[name] = _stamp(path)

    def _list_waiting(self) -> dict[Path, Path]:
        """Local shards by the fragments that announce them."""
        shards = sorted(self.folder.glob(SHARDS))
        fragments = [fragment_path(self.folder, fragment_name(self._name(shard))) for shard in shards]
        return {fragment: shard for fragment, shard in zip(fragments, shards, strict=True) if fragment.exists()}

    def _drop_all_but(self, waiting: dict[Path, Path]) -> None:
        kept = {*waiting, *waiting.values()}
        old = [*index_dir(self.folder).glob("*.parquet"), *rejected_dir(self.folder).glob("*.parquet")]
        old += [jobs_path(self.folder), manifest_path(self.folder), *self.folder.glob(SHARDS)]
        old += [] if waiting else list(samples_dir(self.folder).glob("*.parquet"))
        with explain_write_errors(self.folder):
            for path in old:
                if path not in kept:
                    path.unlink(missing_ok=True)

    def _drop_overtaken(self, waiting: dict[Path, Path], index: list[str]) -> None:
        """Forget waiting shards whose samples, or whose names, the store has; delete its shards without rows."""
        rows = pa.concat_tables([SCHEMA.empty_table(), *(read_index_file(self.folder / name) for name in index)])
        named, listed = set(pc.unique(rows["shard"]).to_pylist()), rows["sample"].to_numpy()
        for fragment, shard in waiting.items():
            is_announced = self._name(fragment) in index  # killed between its put and the removal of the shard
            if not is_announced:
                samples = read_index_file(fragment)["sample"].to_numpy()
                if self._name(shard) not in named and not np.isin(samples, listed).any():
                    continue
                fragment.unlink()
            shard.unlink()
        orphans = [name for name in list_shards(self._store) if name not in named]
        refuse_lost_index(self.place, len(orphans))
        for name in orphans:
            self._store.delete(name)
        if orphans:
            self._noted(f"Removed {len(orphans):,} shards from the store that a stopped run had not announced yet.")

    def _put_last(self, failures: list[BaseException]) -> None:
        """Put what came after the thread's last look, unless a put has failed; then ask the store for nothing more."""
        if not failures:
            try:
                self.put_ready()
            except CacheError as failure:
                failures.append(failure)
        if failures and self._marker is not None:
            self._marker.abandon()

    def _put_changed(self, *places: Path) -> None:
        """Put files, and those in folders, that are not in the store as they are."""
        for place in places:
            paths = sorted(place.rglob("*")) if place.is_dir() else [place] if place.exists() else []
            for path in paths:
                if not path.name.endswith(_TABLES) or path.name.startswith("."):
                    continue
                name, stamp = self._name(path), _stamp(path)
                if self._stamps.get(name) != stamp:
                    self._store.put_file(name, path, self._settings.check_puts)
                    self._stamps[name] = stamp

    def _check_marker(self) -> None:
        assert self._marker is not None
        self._marker.check()

    def _waiting_bytes(self) -> int:
        total = 0
        for path in self.folder.glob(SHARDS):
            with suppress(FileNotFoundError):  # it was put just now
                total += path.stat().st_size
        return total

    def _explain(self, failure: BaseException) -> BaseException:
        num_waiting = len(self._list_waiting())
        if not isinstance(failure, CacheError):
            return failure
        how = "" if isinstance(failure, WriteError) else " Then run the same command again."
        waiting = f" {num_waiting:,} committed shards wait in {self.folder} and are put first." if num_waiting else ""
        return WriteError(f"{failure}{how}{waiting}")

    def _own_name(self) -> str:
        """This folder's name in a marker: no other machine's folder has it, even at the same path."""
        path = self.folder / "staging-id"
        if not path.exists():
            write_atomically(path, xxh3_64_hexdigest(np.random.default_rng().bytes(16)).encode())
        return path.read_text()

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()


def staging_folder(uri: str, settings: RemoteSettings, worker: int = 0) -> Path:
    """The local folder in which a worker makes the cache of a URI: its own, the same in every run."""
    base = settings.staging_dir or (settings.disk_cache_dir and f"{settings.disk_cache_dir}/staging")
    scheme, _, rest = uri.partition("://")
    without_credentials = rest.rpartition("@")[2]
    name = without_credentials.partition("?")[0].rstrip("/").replace("/", "-")
    digest = xxh3_64_hexdigest(f"{scheme}://{without_credentials}".encode())[:8]
    return (
        Path(base or "~/.cache/dflash-cache/staging").expanduser() / f"{name}-{digest}{f'-{worker}' if worker else ''}"
    )


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
