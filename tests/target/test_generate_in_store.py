"""The first stage into an object store: an S3 server on loopback, killed and restarted, and writers that are killed."""

import json
import multiprocessing
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from cache.object_store import S3Server
from target.small_cache import NUM_SAMPLES, TOKEN_BYTES, Listener, checksums, conversation, whole_checksums

from dflash_cache.cache import marker, staging
from dflash_cache.cache.index import cached_rows
from dflash_cache.cache.reader import CacheReader
from dflash_cache.cache.rejected import read_rejected
from dflash_cache.cache.staging import staging_folder
from dflash_cache.cache.store import RemoteStore
from dflash_cache.config.settings import Config, RemoteSettings
from dflash_cache.errors import CacheError, WriteError
from dflash_cache.target import pipeline
from dflash_cache.target.generate import generate

Configure = Callable[..., Config]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    (tmp_path / "store").mkdir()
    running = S3Server(tmp_path / "store")
    running.start()
    yield running
    running.kill()


def shorten_pauses(poll_seconds: float = 0.02) -> dict[tuple[ModuleType, str], float]:
    """Puts begin at once, so that they meet forwards of milliseconds; a writer that is gone is not watched for long."""
    return {
        (staging, "_POLL_SECONDS"): poll_seconds,
        (marker, "WATCH_SECONDS"): 0.5,
        (marker, "_POLL_SECONDS"): 0.1,
    }


@pytest.fixture(autouse=True)
def small_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for (module, name), seconds in shorten_pauses().items():
        monkeypatch.setattr(module, name, seconds)


@pytest.fixture
def in_store(configure: Configure, server: S3Server, tmp_path: Path) -> Configure:
    """Configurations of the small cache in the store; `machine` names the disk that the staging folder lies on."""

    def make(machine: str = "a", remote: dict[str, Any] | None = None, **settings: Any) -> Config:
        config = configure(**settings)
        changed = {"staging_dir": str(tmp_path / machine), "retry_seconds": 30.0, "staging_bytes": 1, **(remote or {})}
        return config.model_copy(update={"cache_dir": server.uri("cache"), "remote": RemoteSettings(**changed)})

    return make


def put_shards(server: S3Server) -> list[Path]:
    return sorted((server.folder / "cache").glob("bucket-*/*"))


def wait_for(happened: Callable[[], bool], seconds: float = 60.0) -> None:
    """The threads that seal, list and put shards may be far behind the forwards on a busy machine."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def generate_and_kill_itself(
    config: Config, put: Path, num_put: int, call: int, poll_seconds: float, staged: bool
) -> None:
    """Kills itself at a forward, not before so many shards are in the store.

    With `staged`, nor before some samples are safe in the staging folder.
    """
    for (module, name), seconds in shorten_pauses(poll_seconds).items():
        setattr(module, name, seconds)

    def kill(current: int) -> None:
        if current == call:
            wait_for(lambda: len(list(put.glob("bucket-*/*"))) >= num_put)
            if staged:
                wait_for(lambda: cached_rows(staging_folder(config.cache_dir, config.remote)).num_rows > 0)
            os.kill(os.getpid(), signal.SIGKILL)

    generate(config, Listener(kill))


def run_and_kill(
    config: Config,
    server: S3Server,
    num_put: int = 0,
    call: int = 8,
    poll_seconds: float = 0.02,
    staged: bool = False,
) -> None:
    """In a new process: one forked from this one, which has the threads of an S3 client, may wait for ever."""
    arguments = (config, server.folder / "cache", num_put, call, poll_seconds, staged)
    process = multiprocessing.get_context("spawn").Process(target=generate_and_kill_itself, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def test_the_cache_in_the_store_is_the_one_that_a_folder_would_hold_and_the_local_disk_is_empty_again(
    configure, in_store, server, tmp_path
) -> None:
    listener = Listener()
    config = in_store(remote={"staging_bytes": 30_000})
    generate(config, listener)
    whole = whole_checksums(configure, tmp_path)
    assert checksums(server.folder / "cache") == whole
    for name in ("manifest.json", "samples/samples.parquet", "jobs.parquet"):
        found, expected = ((folder / name).read_bytes() for folder in (server.folder / "cache", tmp_path / "whole"))
        assert found == expected or name == "manifest.json"
    found, expected = (
        json.loads((at / "manifest.json").read_text()) for at in (server.folder / "cache", tmp_path / "whole")
    )
    assert {**found, "settings": 0, "seal": 0} == {**expected, "settings": 0, "seal": 0}
    assert not (server.folder / "cache" / "writer.json").exists()
    assert "secret" not in "".join(path.read_text(errors="ignore") for path in (server.folder / "cache").glob("*.*"))
    assert listener.estimate is not None
    assert listener.estimate.disk_bytes == 30_000 + 3 * 16_000  # what waits, and one open shard a bucket
    assert listener.estimate.remaining_bytes == 1590 * TOKEN_BYTES
    folder = staging_folder(config.cache_dir, config.remote)
    assert [path.name for path in folder.iterdir()] == ["writer.lock"]
    again = Listener()
    generate(in_store("b"), again)
    assert again.estimate is not None
    assert again.estimate.remaining_tokens == 0
    assert checksums(server.folder / "cache") == whole


def test_killed_runs_go_on_here_or_on_another_machine_and_make_the_same_cache(
    configure, in_store, server, tmp_path
) -> None:
    run_and_kill(in_store("a"), server, num_put=2)
    run_and_kill(in_store("a"), server, num_put=4)
    run_and_kill(in_store("b"), server, call=6)  # whose shards most likely wait for their put
    assert not list((server.folder / "cache" / "index").glob("index.parquet"))
    assert cached_rows(server.folder / "cache").num_rows < NUM_SAMPLES
    for machine in ("c", "a"):
        listener = Listener(lambda call, machine=machine: stop_first(call, machine))
        try:
            generate(in_store(machine), listener)
        except KeyboardInterrupt:
            assert machine == "c"
        assert (machine == "c") == any(
            note.startswith("Took over s3://caches/cache from process") for note in listener.notes
        )
    assert checksums(server.folder / "cache") == whole_checksums(configure, tmp_path)
    assert not (server.folder / "cache" / "writer.json").exists()


def stop_first(call: int, machine: str) -> None:
    if machine == "c" and call == 4:
        raise KeyboardInterrupt


def test_what_waits_after_a_kill_is_put_and_not_made_again_unless_the_store_has_it_by_now(
    configure, in_store, server, tmp_path
) -> None:
    run_and_kill(in_store(), server, call=12, poll_seconds=1000.0, staged=True)  # nothing is put before the kill
    folder = staging_folder(in_store().cache_dir, in_store().remote)
    safe = cached_rows(folder)["length"].to_numpy().sum()
    assert safe > 0
    assert not put_shards(server)
    shutil.copytree(tmp_path / "a", tmp_path / "late")
    listener = Listener()
    generate(in_store(), listener)
    assert listener.tokens[0] == safe
    whole = whole_checksums(configure, tmp_path)
    assert checksums(server.folder / "cache") == whole
    before = put_shards(server)
    late = Listener()
    generate(in_store("late"), late)  # a machine that was away, with shards of its own
    assert late.tokens == []
    assert put_shards(server) == before
    assert checksums(server.folder / "cache") == whole


def test_a_writer_that_lives_is_left_alone_and_one_that_is_gone_is_taken_over(in_store, server, monkeypatch) -> None:
    monkeypatch.setattr(marker, "BEAT_SECONDS", 0.1)
    store = RemoteStore(server.uri("cache"), RemoteSettings())
    other = marker.WriterMarker(store, "another folder")
    assert other.claim() is None
    with pytest.raises(CacheError, match=r"^Another `dflash generate` is writing the cache at s3://caches/cache \(pro"):
        generate(in_store(), Listener())
    assert not put_shards(server)
    other.abandon()
    listener = Listener()
    generate(in_store(), listener)
    assert listener.notes == [
        f"Took over s3://caches/cache from process {os.getpid()} on {os.uname().nodename}, which was not heard of for "
        "0.5 s."
    ]
    with pytest.raises(WriteError, match="is not this run's any more"):
        other.check()


def test_a_writer_that_was_taken_over_announces_nothing_more(configure, in_store, server, tmp_path) -> None:
    listed: list[set[str]] = []

    def take_over(call: int) -> None:
        if call == 8:
            wait_for(lambda: len(put_shards(server)) >= 2)
            RemoteStore(server.uri("cache"), RemoteSettings()).put("writer.json", b'{"owner": "process 1 on other"}')
            time.sleep(3)  # the announcement that was under way
            listed.append({path.name for path in (server.folder / "cache" / "index").iterdir()})

    with pytest.raises(
        WriteError, match=r"not this run's any more, process 1 on other has taken it over: let that one"
    ):
        generate(in_store(), Listener(take_over))
    assert {path.name for path in (server.folder / "cache" / "index").iterdir()} == listed[0]
    assert json.loads((server.folder / "cache" / "writer.json").read_text()) == {"owner": "process 1 on other"}
    generate(in_store(), Listener())
    assert checksums(server.folder / "cache") == whole_checksums(configure, tmp_path)


def test_further_conversations_are_appended_in_the_store_as_in_a_folder(configure, in_store, server, tmp_path) -> None:
    generate(in_store(), Listener())
    other = in_store()
    target = other.target.model_copy(update={"layer_ids": (0, 3)})
    with pytest.raises(CacheError, match=r"cache at s3://caches/cache was made with another .*is 0, 3\)"):
        generate(other.model_copy(update={"target": target}), Listener())
    generate(configure("local"), Listener())
    more = tmp_path / "more.jsonl"
    more.write_text("".join(json.dumps(conversation(i)) + "\n" for i in range(60, 70)))
    for config in (in_store("b"), configure("local")):
        data = config.data.model_copy(update={"paths": (str(more),)})
        generate(config.model_copy(update={"data": data}), Listener(), append=True)
    found = checksums(server.folder / "cache")
    assert len(found) == NUM_SAMPLES + 10
    assert found == checksums(tmp_path / "local")


def test_bad_samples_are_recorded_in_the_store(configure, in_store, server, tmp_path, monkeypatch) -> None:
    capture = pipeline.capture_states

    def bad(target: Any, ids_ST: Any, lengths_S: Any, out_STLH: Any = None) -> Any:
        states = capture(target, ids_ST, lengths_S, out_STLH)
        states[ids_ST[:, 2] == 7 + 11, 1, 1] = float("nan")  # w11 is the first word of sample 11
        return states

    monkeypatch.setattr(pipeline, "capture_states", bad)
    generate(in_store(max_bad_share=0.05), Listener())
    monkeypatch.undo()
    assert read_rejected(server.folder / "cache").to_pydict()["sample"] == [11]
    assert set(checksums(server.folder / "cache")) == set(range(NUM_SAMPLES)) - {11}


def generate_launched(config: Config, rank: int, port: int, put: Path, num_put: int) -> None:
    """One of two workers; the first does no job before so many shards are in the store."""
    places = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    for (module, name), seconds in shorten_pauses().items():
        setattr(module, name, seconds)
    generate(config, Listener(lambda call: wait_for(lambda: call > 1 or len(list(put.glob("bucket-*/*"))) >= num_put)))


def launch_both(in_store: Configure, server: S3Server, num_put: int) -> list[Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank, machine in enumerate("ab"):
        arguments = (in_store(machine), rank, port, server.folder / "cache", num_put)
        processes.append(multiprocessing.get_context("spawn").Process(target=generate_launched, args=arguments))
        processes[-1].start()
    return processes


def test_workers_of_several_machines_put_what_they_make_and_killed_at_any_instant_go_on(
    configure, in_store, server, tmp_path
) -> None:
    killed = launch_both(in_store, server, num_put=1000)
    wait_for(lambda: len(put_shards(server)) >= 3)  # the second worker's, for the first does none
    for process in killed:
        process.kill()
        process.join()
    safe = len(put_shards(server))
    assert cached_rows(server.folder / "cache").num_rows < NUM_SAMPLES
    for process in launch_both(in_store, server, num_put=safe + 2):
        process.join(120)
        assert process.exitcode == 0
    assert checksums(server.folder / "cache") == whole_checksums(configure, tmp_path)
    assert not (server.folder / "cache" / "writer.json").exists()
    config = in_store("b")
    folders = [
        staging_folder(in_store().cache_dir, in_store().remote),
        staging_folder(config.cache_dir, config.remote, 1),
    ]
    assert [[path.name for path in folder.iterdir()] for folder in folders] == [["writer.lock"]] * 2


def test_a_server_killed_and_restarted_in_the_middle_costs_retries_and_not_the_run(
    configure, in_store, server, tmp_path
) -> None:
    kept = []

    def disturb(call: int) -> None:
        if call == 8:
            wait_for(lambda: len(put_shards(server)) >= 3)
            server.kill()
            kept.append(len(put_shards(server)))
            Thread(target=lambda: (time.sleep(1), server.start())).start()

    generate(in_store(), Listener(disturb))
    assert 3 <= kept[0] < len(put_shards(server))
    assert checksums(server.folder / "cache") == whole_checksums(configure, tmp_path)


def test_a_store_that_stays_away_stops_the_run_and_the_same_command_goes_on(
    configure, in_store, server, tmp_path
) -> None:
    def disturb(call: int) -> None:
        if call == 8:
            wait_for(lambda: len(put_shards(server)) >= 3)
            server.kill()
        if call >= 8:
            time.sleep(0.3)  # the retries end before the forwards do, however far the puts are behind

    with pytest.raises(WriteError) as caught:
        generate(in_store(remote={"retry_seconds": 0.5}), Listener(disturb))
    message = str(caught.value)
    assert "s3://caches/cache" in message
    assert "run the same command again" in message
    assert "committed shards wait in" in message
    assert "secret" not in message
    rows = cached_rows(staging_folder(in_store().cache_dir, in_store().remote))
    assert f"Committed so far: {rows.num_rows} of 60 samples" in message
    assert rows.num_rows < NUM_SAMPLES
    server.start()
    listener = Listener()
    generate(in_store(), listener)
    assert listener.tokens[0] == rows["length"].to_numpy().sum()
    assert checksums(server.folder / "cache") == whole_checksums(configure, tmp_path)


def test_a_coded_cache_in_the_store_gives_the_bits_of_one_in_a_folder(configure, in_store, server, tmp_path) -> None:
    generate(in_store(codec="int4"), Listener())
    generate(configure("folder", codec="int4"), Listener())
    remote = RemoteSettings(retry_seconds=30.0)
    with CacheReader(server.uri("cache"), remote=remote) as put, CacheReader(tmp_path / "folder") as own:
        rows = np.arange(NUM_SAMPLES)
        assert torch.equal(put.read_batch(rows).hidden_STLH, own.read_batch(rows).hidden_STLH)
        assert put.index.checksum.tolist() == own.index.checksum.tolist()
