"""The objects of one cache in an object store (S3, GCS, HDFS, whatever pyarrow.fs opens by a URI): read, put, delete.

Stores fail now and then: whatever fails is tried again with growing pauses until `retry_seconds` are over; only then,
or if the object does not exist, is it an error. An object is put whole, in parts that are sent in parallel, and its
size is compared; a large one is read back on request, the one proof that its bytes arrived.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import fs
from xxhash import xxh3_64

from dflash_cache.cache.layout import place_of
from dflash_cache.config.settings import RemoteSettings
from dflash_cache.errors import CacheError, ConfigError, WriteError

Result = TypeVar("Result")
_PIECE_BYTES = 8 << 20
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0  # seconds between two tries
_FINAL = ("ACCESS_DENIED", "NO_SUCH_BUCKET", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH")  # time mends none
_WITHOUT_FOLDERS = ("s3", "gcs", "abfs")


class RemoteStore:
    """One cache's objects, by their names relative to it. `place` is its URI without credentials and options.

    `num_retries` counts second tries. Any number of threads may use it.
    """

    def __init__(self, uri: str, settings: RemoteSettings) -> None:
        self.place = place_of(uri)
        self.num_retries = 0
        self._retry_seconds = settings.retry_seconds
        try:
            self._files, root = _open(uri)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise ConfigError(
                f"The store of cache_dir {self.place} cannot be opened ({first_line(error)}): correct the URI."
            ) from None
        self._root = root.rstrip("/")

    def open(self, name: str) -> Any:
        """A handle for positioned reads of an object. Raises FileNotFoundError or OSError."""
        return self._files.open_input_file(f"{self._root}/{name}")

    def stamp(self, name: str) -> str:
        """Tells an object from one that is put under its name at another time. Raises OSError."""
        found = self._files.get_file_info(f"{self._root}/{name}")
        return f"{found.size}-{found.mtime_ns}"

    def list_sizes(self, folder: str) -> dict[str, int]:
        """Size by name of all objects in a folder and below. Raises CacheError."""
        selector = fs.FileSelector(f"{self._root}/{folder}", allow_not_found=True, recursive=True)
        found = self._read(lambda: self._files.get_file_info(selector))
        return {entry.path.removeprefix(f"{self._root}/"): entry.size for entry in found if entry.is_file}

    def read(self, name: str) -> bytes | None:
        """A small object's bytes, None if there is none. Raises CacheError."""

        def read() -> bytes:
            with self._files.open_input_stream(f"{self._root}/{name}") as stream:
                data: bytes = stream.read()
            return data

        try:
            return self._read(read)
        except FileNotFoundError:
            return None

    def fetch(self, names: Iterable[str], folder: Path) -> None:
        """Copy objects into a local folder, each all at once or not at all. Raises CacheError, FileNotFoundError."""
        for name in names:
            data = self.read(name)
            if data is None:
                raise FileNotFoundError(name)
            local = folder / name
            local.parent.mkdir(parents=True, exist_ok=True)
            aside = local.with_name(f".{local.name}.partial")
            aside.write_bytes(data)
            aside.replace(local)

    def put(self, name: str, data: bytes) -> None:
        """Make a small object hold `data`. Raises WriteError."""
        self._write(name, lambda: self._send(name, [data], len(data)))

    def put_file(self, name: str, path: Path, read_back: bool) -> None:
        """Make an object a copy of a local file, and compare its size, or every byte. Raises WriteError."""

        def send() -> None:
            hasher = xxh3_64()

            def pieces() -> Iterable[bytes]:
                with path.open("rb") as file:
                    while piece := file.read(_PIECE_BYTES):
                        hasher.update(piece)
                        yield piece

            self._send(name, pieces(), path.stat().st_size)
            if read_back and self._hash(name) != hasher.digest():
                raise OSError("what was read back is not what was put")

        self._write(name, send)

    def delete(self, name: str) -> None:
        """Make sure that there is no such object. Raises WriteError."""

        def delete() -> None:
            with suppress(FileNotFoundError):
                self._files.delete_file(f"{self._root}/{name}")

        self._write(name, delete)

    def try_again(self, action: Callable[[], Result]) -> Result:
        """The action's result; an OSError that time may mend is tried again until the time is over."""
        begun, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            try:
                return action()
            except FileNotFoundError:
                raise
            except OSError as error:
                is_final = any(word in str(error) for word in _FINAL)
                if is_final or time.monotonic() - begun + pause > self._retry_seconds:
                    raise
            self.num_retries += 1
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def stop_retrying(self) -> None:
        """From now on take the first failure as the last: the run is at its end."""
        self._retry_seconds = 0.0

    def _send(self, name: str, pieces: Iterable[bytes], size: int) -> None:
        path = f"{self._root}/{name}"
        if self._files.type_name not in _WITHOUT_FOLDERS:
            self._files.create_dir(str(PurePosixPath(path).parent), recursive=True)
        with self._files.open_output_stream(path) as stream:
            for piece in pieces:
                stream.write(piece)
        found = self._files.get_file_info(path).size
        if found != size:
            raise OSError(f"the store holds {found or 0:,} of {size:,} bytes")

    def _hash(self, name: str) -> bytes:
        hasher = xxh3_64()
        with self._files.open_input_stream(f"{self._root}/{name}") as stream:
            while piece := stream.read(_PIECE_BYTES):
                hasher.update(piece)
        return hasher.digest()

    def _read(self, action: Callable[[], Result]) -> Result:
        try:
            return self.try_again(action)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise CacheError(
                f"The cache at {self.place} cannot be reached ({first_line(error)}): see that the store runs and that "
                "its credentials are right."
            ) from None

    def _write(self, name: str, action: Callable[[], None]) -> None:
        try:
            self.try_again(action)
        except OSError as error:
            raise WriteError(
                f"{self.place}/{name} could not be put ({first_line(error)}); what was committed before is safe: see "
                "that the store runs, has room and lets you write, then run the same command again."
            ) from error


def _open(uri: str) -> tuple[Any, str]:
    """The file system of a URI and the path in it; one that puts a small object with one request, if it knows how."""
    if uri.startswith("s3:"):
        with suppress(pa.ArrowInvalid):  # releases of pyarrow that do not know the option
            opened: tuple[Any, str] = fs.FileSystem.from_uri(
                f"{uri}{'&' if '?' in uri else '?'}allow_delayed_open=true"
            )
            return opened
    opened = fs.FileSystem.from_uri(uri)
    return opened


def first_line(error: Exception) -> str:
    """What an error says first, to stand in a sentence."""
    return str(error).partition("\n")[0].rstrip(".")
