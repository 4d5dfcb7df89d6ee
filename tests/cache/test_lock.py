"""The lock of a folder, where its storage has no room left."""

import resource
from pathlib import Path

import pytest

from dflash_cache.cache.lock import lock_cache
from dflash_cache.errors import CacheError


def test_a_disk_without_room_for_the_holders_name_is_locked_all_the_same(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no file may grow, as on a full disk
    try:
        with lock_cache(tmp_path), pytest.raises(CacheError, match="Another `dflash generate`"), lock_cache(tmp_path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "writer.lock").stat().st_size == 0
