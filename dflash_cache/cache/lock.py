"""One writer a folder: a lock of the kernel's on a file in it, gone with the process that held it, however it ended.

`flock` belongs to the open file, not to the process: workers that inherit the descriptor keep the folder locked until
the last of them is gone, so a killed parent never leaves it open to a second writer while its workers still write. It
guards one machine; over a network it is as good as the file system's own `flock`.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_cache.cache.files import explain_write_errors, make_folder
from dflash_cache.errors import CacheError, DFlashError

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # some cluster file systems
_POLL_SECONDS = 0.05


@contextmanager
def lock_cache(cache_dir: Path) -> Iterator[int | None]:
    """Hold the cache's lock in the block; gives the descriptor that holds it, None where the storage knows no locks.

    Raises CacheError if another writer holds it.
    """
    held = f"Another `dflash generate` is writing the cache at {cache_dir}"
    with lock_folder(cache_dir, "writer.lock", held, CacheError) as descriptor:
        yield descriptor


@contextmanager
def lock_folder(
    folder: Path, name: str, held: str, error: type[DFlashError], patience_seconds: float = 0.0
) -> Iterator[int | None]:
    """The same for any folder, which is made; raises `error` that begins with `held` if another holds it for longer."""
    path = folder / name
    with explain_write_errors(path):
        make_folder(folder)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        locked = _lock(descriptor, held, error, path, time.monotonic() + patience_seconds)
        yield descriptor if locked else None
        if locked:
            os.ftruncate(descriptor, 0)  # what is finished says nothing of who wrote it
    finally:
        os.close(descriptor)


def _lock(descriptor: int, held: str, error: type[DFlashError], path: Path, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as refused:
            if refused.errno in _UNSUPPORTED:
                return False
            if refused.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise error(f"The file {path} cannot be locked ({refused.strerror}): mend its storage.") from None
            if time.monotonic() >= deadline:
                holder = os.pread(descriptor, 64, 0).decode("ascii", "replace").strip()
                raise error(f"{held}{f' ({holder})' if holder else ''}: wait until it has ended, or stop it.") from None
            time.sleep(_POLL_SECONDS)
    with suppress(OSError):  # whoever is refused reads who holds it; on a full disk it is locked without
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode()[:64], 0)
    return True
