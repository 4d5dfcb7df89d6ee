"""One writer a cache: a lock of the kernel's on a file in it, gone with the process that held it, however it ended.

`flock` belongs to the open file, not to the process: workers that inherit the descriptor keep the cache locked until
the last of them is gone, so a killed parent never leaves it open to a second writer while its workers still write. It
guards one machine; over a network it is as good as the file system's own `flock`.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_cache.cache.files import explain_write_errors, make_folder
from dflash_cache.errors import CacheError

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # some cluster file systems


@contextmanager
def lock_cache(cache_dir: Path) -> Iterator[int | None]:
    """Hold the cache's lock in the block; gives the descriptor that holds it, None where the storage knows no locks.

    Raises CacheError if another writer holds it.
    """
    path = cache_dir / "writer.lock"
    with explain_write_errors(path):
        make_folder(cache_dir)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        locked = _lock(descriptor, cache_dir)
        yield descriptor if locked else None
        if locked:
            os.ftruncate(descriptor, 0)  # a finished cache says nothing of who wrote it
    finally:
        os.close(descriptor)


def _lock(descriptor: int, cache_dir: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise CacheError(
                f"The cache at {cache_dir} cannot be locked ({error.strerror}): mend its storage."
            ) from None
        holder = os.pread(descriptor, 64, 0).decode("ascii", "replace").strip()
        raise CacheError(
            f"Another `dflash generate` is writing the cache at {cache_dir}{f' ({holder})' if holder else ''}: wait "
            "until it has ended, or stop it."
        ) from None
    os.ftruncate(descriptor, 0)  # whoever is refused reads who holds it
    os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode()[:64], 0)
    return True
