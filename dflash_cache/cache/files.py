"""One way to write any file: aside, flushed to disk, renamed, the folder flushed.

Whoever looks, at any instant and after any crash, sees the old file, or the new one whole, or none. It costs one
fsync of the file and one of its folder. A killed process leaves at most a temporary sibling `.<name>.<token>.partial`,
which no reader looks at and `remove_leftovers` deletes.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_cache.cache.seal import BLANK_SEAL, seal_bytes
from dflash_cache.errors import WriteError

_SUFFIX = ".partial"


def write_atomically(path: Path, data: bytes) -> None:
    """Make `path` hold exactly `data`, all at once, replacing what was there. Raises WriteError if it cannot."""
    with atomic_file(path) as file:
        write_all(file, memoryview(data))


@contextmanager
def atomic_file(path: Path) -> Iterator[FileIO]:
    """An unbuffered, write-only file that gets the name `path` when the block ends, and vanishes if it raises.

    Missing parent folders are made. An OSError of the block or of publishing becomes a WriteError.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_SUFFIX}")
    with explain_write_errors(path):
        make_folder(path.parent)
        try:
            with temporary.open("xb", buffering=0) as file:
                yield file
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        flush_folder(path.parent)


def write_table(path: Path, table: pa.Table) -> None:
    """Make `path` a sealed parquet file of `table`, all at once. Raises WriteError if it cannot."""
    sink = pa.BufferOutputStream()
    metadata = {**(table.schema.metadata or {}), "seal": BLANK_SEAL}
    pq.write_table(table.replace_schema_metadata(metadata), sink, compression="zstd")
    write_atomically(path, seal_bytes(sink.getvalue().to_pybytes()))


def write_all(file: FileIO, data: memoryview) -> None:
    """Write every byte of `data` (one-dimensional, unsigned bytes); one raw `write` takes 2 GiB at most."""
    while data:
        data = data[file.write(data) :]


def make_folder(folder: Path) -> None:
    """Make `folder` and its missing parents such that they outlive a power cut."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        flush_folder(folder.parent)


def flush_folder(folder: Path) -> None:
    """Flush the names in `folder` to disk: only then is a rename or a removal durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> int:
    """Delete the temporaries that killed processes left in `folder` and below; returns how many there were.

    Call it only while nothing is being written there: a live writer's temporary looks the same.
    """
    leftovers = list(folder.rglob(f".*{_SUFFIX}"))
    for leftover in leftovers:
        with explain_write_errors(leftover):
            leftover.unlink(missing_ok=True)
    return len(leftovers)


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a WriteError that names `path` and says what is safe."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"{path} could not be written ({error.strerror or error}); what was committed before is safe: "
            "make room or mend the storage, then run the same command again."
        ) from error
