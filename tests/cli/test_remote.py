"""A cache in an object store, read from an S3 server on loopback that is killed and restarted."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from cache.object_store import S3Server

from dflash_cache.cache.index import open_index
from dflash_cache.cache.reader import CacheReader
from dflash_cache.config.settings import RemoteSettings
from dflash_cache.errors import CacheError
from dflash_cache.train.checkpoint import latest_path, load_checkpoint


@pytest.fixture
def server(dflash, project: Path) -> Iterator[S3Server]:
    """A server that holds the project's finished cache as `cache`."""
    assert dflash("generate", project).code == 0
    running = S3Server(project.parent)
    running.start()
    yield running
    running.kill()


def num_reads(server: S3Server) -> int:
    """Reads of shards that the running or last process answered."""
    return sum("GET /caches/cache/bucket-" in line for line in server.requests())


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
        reads.append(num_reads(server))
        time.sleep(0.5)
        server.start()

    disturber = Thread(target=disturb)
    disturber.start()
    options += ("--set", f'cache_dir="{server.uri("cache")}"', "--set", f"run_dir={remote_run}")
    trained = dflash("train", project, *options)
    disturber.join()
    assert trained.code == 0, trained.err
    reads.append(num_reads(server))
    assert min(reads) > 10  # before the kill, and after it
    expected, found = (load_checkpoint(latest_path(run)) for run in (project.parent / "run", remote_run))
    assert found.step == expected.step
    assert all(torch.equal(found.drafter[name], tensor) for name, tensor in expected.drafter.items())


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in map(json.loads, (run / "log.jsonl").read_text().splitlines())]


def test_a_cache_written_to_a_store_trains_as_the_one_in_a_folder(dflash, project, server, tmp_path) -> None:
    in_store = f'cache_dir="{server.uri("written")}"'
    made = dflash("generate", project, "--set", in_store, "--set", f"remote.staging_dir={tmp_path / 'here'}")
    assert made.code == 0, made.err
    assert "The cache s3://caches/written is complete: 60 samples." in made.out
    assert "secret" not in made.out + (project.parent / "written" / "config.yaml").read_text()
    assert not (project.parent / "written" / "writer.json").exists()
    run, options = tmp_path / "remote-run", ("--set", "train.max_steps=3")
    assert dflash("train", project, *options).code == 0
    trained = dflash("train", project, *options, "--set", in_store, "--set", f"run_dir={run}")
    assert trained.code == 0, trained.err
    assert losses(run) == losses(project.parent / "run")
    assert len(losses(run)) >= 3


def test_verify_finds_a_flipped_byte_and_a_missing_shard_in_a_store(dflash, project, server) -> None:
    cache, uri = project.parent / "cache", server.uri("cache")
    whole = dflash("verify", uri, "--full")
    assert whole.code == 0, whole.out + whole.err
    assert "\ns3://caches/cache is whole: 60 of 60 samples in " in whole.out
    rows = open_index(cache).to_pylist()
    missing, flipped = sorted({row["shard"] for row in rows})[:2]
    hit = next(row for row in rows if row["shard"] == flipped and row["row"] > 0)
    data = bytearray((cache / flipped).read_bytes())
    data[4096 + hit["row"] * 3 * 32 * 4] ^= 4  # three layers of 32 in float32
    (cache / flipped).write_bytes(data)
    (cache / missing).rename(cache / "bucket-0" / "shard-000099.safetensors")
    server.kill()
    server.start()
    lost = [row["sample"] for row in rows if row["shard"] == missing]
    for options, expected in (((), [(missing, lost)]), (("--full",), [(missing, lost), (flipped, [hit["sample"]])])):
        outcome = dflash("verify", uri, "--json", *options)
        assert outcome.code == 2
        report = json.loads(outcome.out)
        assert [(finding["place"], finding["samples"]) for finding in report["findings"]] == expected
        assert "the first is s3://caches/cache/bucket-0/shard-000099.safetensors." in report["notes"][0]


def test_repair_takes_damaged_samples_and_tables_out_of_a_store_and_generate_makes_the_same_bits_anew(
    dflash, project, server, tmp_path
) -> None:
    cache, uri = project.parent / "cache", server.uri("cache")
    before = open_index(cache)
    row = before.slice(7, 1).to_pylist()[0]
    data = bytearray((cache / row["shard"]).read_bytes())
    data[4096 + row["row"] * 3 * 32 * 4] ^= 8
    (cache / row["shard"]).write_bytes(data)
    (cache / "jobs.parquet").write_bytes((cache / "jobs.parquet").read_bytes()[:-30])
    server.kill()
    server.start()
    repaired = dflash("verify", uri, "--full", "--repair")
    assert repaired.code == 2
    same_job = [each["sample"] for each in before.to_pylist() if each["job"] == row["job"]]
    assert f"{len(same_job)} samples are taken out" in repaired.out
    assert sorted(set(before["sample"].to_pylist()) - set(open_index(cache)["sample"].to_pylist())) == same_job
    assert (cache / "jobs.parquet.damaged").exists()
    assert not (cache / "jobs.parquet").exists()
    assert not (cache / "writer.json").exists()
    options = ("--set", f'cache_dir="{uri}"', "--set", f"remote.staging_dir={tmp_path / 'here'}")
    made = dflash("generate", project, *options)
    assert made.code == 0, made.err
    assert dflash("verify", uri, "--full").code == 0
    found = open_index(cache)
    for name in ("sample", "checksum", "job"):
        assert found[name].to_pylist() == before[name].to_pylist()


def test_a_disk_cache_forgets_what_a_shard_held_before_it_was_put_anew(server, project, tmp_path) -> None:
    settings = RemoteSettings(disk_cache_dir=str(tmp_path / "kept"))
    shard = project.parent / "cache" / open_index(project.parent / "cache")["shard"][0].as_py()
    with CacheReader(server.uri("cache"), remote=settings) as reader:
        read_all(reader)
    data = bytearray(shard.read_bytes())
    data[4096:8192] = bytes(4096)
    server.kill()
    time.sleep(1)  # stores tell times in seconds
    shard.write_bytes(data)
    server.start()
    with CacheReader(server.uri("cache"), remote=settings) as reader, pytest.raises(CacheError, match="its checksum"):
        read_all(reader)


def test_buckets_of_a_cache_in_a_store_are_those_of_the_folder(dflash, project, server) -> None:
    caches = project.parent / "cache", server.uri("cache")
    local, remote = (json.loads(dflash("inspect-buckets", cache, "--json").out) for cache in caches)
    assert remote["cache"] == "s3://caches/cache"
    assert {**remote, "cache": local["cache"]} == local
