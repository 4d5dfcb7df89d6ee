from pathlib import Path

import numpy as np
import pytest
from cache.object_store import S3Server

from dflash_cache.cache.store import RemoteStore
from dflash_cache.config.settings import RemoteSettings
from dflash_cache.errors import WriteError


def test_a_large_file_is_put_in_parts_and_read_back_and_what_is_deleted_is_gone(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    server = S3Server(tmp_path / "store")
    server.start()
    try:
        store = RemoteStore(server.uri("cache"), RemoteSettings(retry_seconds=0))
        data = np.random.default_rng(0).bytes(25_000_001)
        (tmp_path / "file").write_bytes(data)
        store.put_file("bucket-0/file", tmp_path / "file", read_back=True)
        assert sum("partNumber" in line for line in server.requests()) == 3
        assert store.read("bucket-0/file") == data
        store.put("small", b"abc")
        assert store.list_sizes("") == {"bucket-0/file": 25_000_001, "small": 3}
        store.delete("small")
        store.delete("small")
        assert store.read("small") is None
    finally:
        server.kill()


def test_an_object_that_is_not_what_was_put_is_found_by_reading_it_back(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "store" / "linked").symlink_to("/dev/null")  # swallows what it is given
    store = RemoteStore((tmp_path / "store").as_uri(), RemoteSettings(retry_seconds=0))
    store.put_file("whole", tmp_path / "file", read_back=True)
    with pytest.raises(WriteError, match=r"store/linked could not be put \("):
        store.put_file("linked", tmp_path / "file", read_back=True)
