"""A cache in an object store, read from an S3 server on loopback that is killed and restarted."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

from dflash_cache.cache.reader import CacheReader
from dflash_cache.config.settings import RemoteSettings
from dflash_cache.errors import CacheError
from dflash_cache.train.checkpoint import latest_path, load_checkpoint


class S3Server:
    """Serves a folder as bucket `caches`; what is written to the folder is seen after a restart."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._folder = folder
        self._log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        script = Path(__file__).with_name("s3_server.py")
        command = [sys.executable, script, str(self._port), self._folder]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            assert self._process.poll() is None
            time.sleep(0.1)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def num_reads(self) -> int:
        """Reads of shards that the running or last process answered."""
        return sum("GET /caches/cache/bucket-" in line for line in self._log.read_text().splitlines())

    def uri(self, cache: str) -> str:
        return f"s3://key:secret@caches/{cache}?endpoint_override=127.0.0.1:{self._port}&scheme=http"


@pytest.fixture
def server(dflash, project: Path) -> Iterator[S3Server]:
    """A server that holds the project's finished cache as `cache`."""
    assert dflash("generate", project).code == 0
    running = S3Server(project.parent)
    running.start()
    yield running
    running.kill()


def read_all(reader: CacheReader) -> list[torch.Tensor]:
    rows = range(0, len(reader.index.sample) - 1, 2)
    return [tensor for row in rows for tensor in vars(reader.read_batch(np.array([row + 1, row]))).values()]


def test_a_remote_cache_gives_the_same_bits_with_and_without_a_disk_cache(server, project, tmp_path) -> None:
    with CacheReader(project.parent / "cache") as local, CacheReader(server.uri("cache")) as remote:
        assert remote.fingerprint == local.fingerprint
        assert remote.manifest == local.manifest
        expected = read_all(local)
        assert all(torch.equal(*pair) for pair in zip(read_all(remote), expected, strict=True))
    settings = RemoteSettings(disk_cache_dir=str(tmp_path / "kept"), retry_seconds=0)
    with CacheReader(server.uri("cache"), remote=settings) as remote:
        read_all(remote)
        server.kill()
        found = read_all(remote)  # from the disk alone
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    server.start()


def test_a_store_that_stays_away_is_an_error_after_the_time_for_retries(server, project) -> None:
    with CacheReader(server.uri("cache"), remote=RemoteSettings(retry_seconds=0)) as reader:
        server.kill()
        with pytest.raises(CacheError, match=r"Sample \d+ cannot be read from shard .* of s3://caches/cache"):
            read_all(reader)
    with pytest.raises(CacheError, match="The cache at s3://caches/cache cannot be reached"):
        CacheReader(server.uri("cache"), remote=RemoteSettings(retry_seconds=0))
    server.start()


def test_generate_refuses_to_write_to_a_store(dflash, project) -> None:
    outcome = dflash("generate", project, "--set", "cache_dir=s3://bucket/cache")
    assert outcome.code == 2
    assert "generate writes to a folder" in outcome.err


def test_a_missing_cache_and_a_damaged_shard_are_told_without_credentials(server, project) -> None:
    with pytest.raises(CacheError) as caught:
        CacheReader(server.uri("nowhere"))
    assert str(caught.value).startswith("There is no cache at s3://caches/nowhere: ")
    shard = next((project.parent / "cache").glob("bucket-*/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[4096] ^= 1
    shard.write_bytes(data)
    server.kill()
    server.start()
    with CacheReader(server.uri("cache")) as reader, pytest.raises(CacheError) as caught:
        read_all(reader)
    assert f"shard {shard.parent.name}/{shard.name} of s3://caches/cache (its checksum" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_server_killed_and_restarted_in_the_middle_of_training_costs_retries_and_not_the_run(
    dflash, project, server, tmp_path
) -> None:
    options = ("--set", "train.read_ahead_bytes=1", "--set", "train.reader_threads=1", "--set", "train.epochs=4")
    assert dflash("train", project, *options).code == 0
    remote_run = tmp_path / "remote-run"
    log = remote_run / "log.jsonl"
    reads = []

    def disturb() -> None:
        while not log.exists() or len(log.read_text().splitlines()) < 3:
            time.sleep(0.01)
        server.kill()
        reads.append(server.num_reads())
        time.sleep(0.5)
        server.start()

    disturber = Thread(target=disturb)
    disturber.start()
    options += ("--set", f'cache_dir="{server.uri("cache")}"', "--set", f"run_dir={remote_run}")
    trained = dflash("train", project, *options)
    disturber.join()
    assert trained.code == 0, trained.err
    reads.append(server.num_reads())
    assert min(reads) > 10  # before the kill, and after it
    expected, found = (load_checkpoint(latest_path(run)) for run in (project.parent / "run", remote_run))
    assert found.step == expected.step
    assert all(torch.equal(found.drafter[name], tensor) for name, tensor in expected.drafter.items())
