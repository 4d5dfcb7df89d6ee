from pathlib import Path

import numpy as np
import pytest

from dflash_cache.cache import marker
from dflash_cache.cache.repair import repair
from dflash_cache.cache.store import RemoteStore
from dflash_cache.cache.structure import Finding
from dflash_cache.cache.verify import Report
from dflash_cache.config.settings import RemoteSettings
from dflash_cache.errors import CacheError


def test_a_store_that_someone_writes_is_not_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"WATCH_SECONDS": 2.0, "BEAT_SECONDS": 0.05, "_POLL_SECONDS": 0.2}.items():
        monkeypatch.setattr(marker, name, seconds)
    (tmp_path / "index").mkdir()
    damaged = tmp_path / "index" / "index.parquet"
    damaged.write_bytes(b"no parquet")
    uri = tmp_path.as_uri()
    other = marker.WriterMarker(RemoteStore(uri, RemoteSettings()), "another folder")
    other.claim()
    report = Report([Finding("index/index.parquet", "damaged", np.zeros(0, np.int64))], [], 1, 0, 0, 0)
    with pytest.raises(CacheError, match=r"^Another `dflash generate` is writing the cache at file://"):
        repair(uri, report)
    assert damaged.read_bytes() == b"no parquet"
    other.release()
    assert not (tmp_path / "writer.json").exists()
