"""The first stage under what can happen to it: kills, full disks, failing writes, second writers."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from target.small_cache import (
    ENVIRONMENT,
    NUM_SAMPLES,
    Listener,
    checksums,
    checksums_of,
    jobs_within,
    whole_checksums,
    write_rows,
)

from dflash_cache.cache import files
from dflash_cache.cache.index import cached_rows
from dflash_cache.cache.layout import index_dir
from dflash_cache.cache.lock import lock_cache
from dflash_cache.cache.writer import CacheWriter
from dflash_cache.config.loading import dump_config
from dflash_cache.errors import CacheError, WriteError
from dflash_cache.target.generate import generate
from dflash_cache.target.observer import Observer


@pytest.mark.parametrize("num_workers", [1, 2])
def test_fifty_kills_at_random_instants_lose_and_double_nothing(configure, tmp_path: Path, num_workers: int) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(configure()))
    program = [sys.executable, str(Path(__file__).with_name("killing.py")), str(path), str(num_workers), "50", "7"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report["victims"]) == 50
    assert set(report["victims"]) == ({"all"} if num_workers == 1 else {"all", "driver", "worker"})
    whole = checksums(report["whole"])
    assert sorted(whole) == list(range(NUM_SAMPLES))
    for cache in report["caches"]:
        assert checksums(cache) == whole


def test_a_full_disk_stops_the_run_and_the_same_command_goes_on(configure, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=False).returncode:
        pytest.skip("no small disk to fill: mounting a tmpfs needs root, which this process is not")
    try:
        config = configure(disk / "cache", buffer_bytes=1)

        def fill(call: int) -> None:
            if call == 8:
                with (disk / "ballast").open("wb", buffering=0) as ballast, pytest.raises(OSError, match="No space"):
                    while True:
                        ballast.write(bytes(1 << 12))

        with pytest.raises(WriteError, match=r"No space left on device\).* Committed so far: \d+ of 60 samples"):
            generate(config, Listener(fill))
        safe = cached_rows(disk / "cache")["sample"].to_pylist()
        assert 0 < len(safe) < NUM_SAMPLES
        with pytest.raises(CacheError, match=r"No space|make room"):  # it is still full
            generate(config, Observer())
        assert cached_rows(disk / "cache")["sample"].to_pylist() == safe
        (disk / "ballast").unlink()
        generate(config, Observer())
        generate(configure("whole"), Observer())
        assert checksums(disk / "cache") == checksums(tmp_path / "whole")
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("partly", [True, False])
def test_a_write_that_fails_costs_only_its_job(
    configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, partly: bool
) -> None:
    """The tenth large write fails, having written nothing or a part; all shards open then are committed."""
    config = configure(shard_bytes=1 << 20)  # no shard is full before the end
    write_all, num_writes = files.write_all, 0

    def fail(file: Any, data: memoryview) -> None:
        nonlocal num_writes
        num_writes += len(data) > 4096
        if num_writes == 10 and len(data) > 4096:
            if partly:
                write_all(file, data[: len(data) // 2])
            raise OSError(code, os.strerror(code))
        write_all(file, data)

    monkeypatch.setattr("dflash_cache.cache.shards.write_all", fail)
    with pytest.raises(WriteError) as caught:
        generate(config, Observer())
    monkeypatch.undo()
    rows = cached_rows(tmp_path / "cache")
    assert set(rows["job"].to_pylist()) == jobs_within(tmp_path / "cache", 9)
    message = str(caught.value)
    assert f"could not be written ({os.strerror(code)})" in message
    assert "then run the same command again" in message
    assert f"{rows.num_rows} of 60 samples, {sum(rows['length'].to_pylist()):,} of 1,590 tokens." in message
    assert checksums_of(rows).items() <= whole_checksums(configure, tmp_path).items()
    generate(config, Observer())
    assert checksums(tmp_path / "cache") == checksums(tmp_path / "whole")


def test_a_file_size_limit_of_the_kernel_ends_in_one_sentence(configure, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(configure(shard_bytes=1 << 20)))
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"
        "from dflash_cli.__main__ import main\n"
        f"sys.argv = ['dflash', 'generate', {str(path)!r}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 2
    assert "could not be written (File too large)" in done.stderr
    assert "Traceback" not in done.stderr
    committed = cached_rows(tmp_path / "cache").num_rows
    assert committed > 0
    assert f"Committed so far: {committed} of 60 samples" in done.stderr


def hold(cache_dir: Path, held: Any, release: Any) -> None:
    with lock_cache(cache_dir):
        held.set()
        release.wait()


def test_a_second_writer_is_refused_until_the_first_is_gone_even_by_kill(configure, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(tmp_path / "cache", held, release))
    holder.start()
    held.wait(60)
    with pytest.raises(
        CacheError, match=rf"Another `dflash generate` is writing .*\(process {holder.pid} on .*\): wait"
    ):
        generate(configure(), Observer())
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    generate(configure(), Observer())
    assert len(checksums(tmp_path / "cache")) == NUM_SAMPLES


def test_a_terminated_run_commits_its_whole_jobs(configure, tmp_path: Path) -> None:
    def terminate(call: int) -> None:
        if call == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    listener = Listener(terminate)
    with pytest.raises(KeyboardInterrupt):
        generate(configure(shard_bytes=1 << 20), listener)
    assert signal.getsignal(signal.SIGTERM) is before
    rows = cached_rows(tmp_path / "cache")
    assert sum(rows["length"].to_pylist()) == listener.tokens[8]  # all that was handed to the writer
    assert 0 < rows.num_rows < NUM_SAMPLES


def test_a_shard_without_rows_is_removed_and_told(configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate(configure(), Observer())
    whole = checksums(tmp_path / "cache")
    orphan = tmp_path / "cache" / "bucket-1" / "shard-000077.safetensors"
    shutil.copy(next((tmp_path / "cache" / "bucket-1").iterdir()), orphan)
    listener = Listener()
    generate(configure(), listener)
    assert listener.notes == ["Removed 1 shards that a stopped run had not announced yet."]
    assert checksums(tmp_path / "cache") == whole


def test_an_index_or_a_manifest_that_was_lost_never_costs_the_shards(configure, tmp_path: Path) -> None:
    config = configure(shard_bytes=1)
    generate(config, Observer())
    whole = checksums(tmp_path / "cache")
    shards = sorted((tmp_path / "cache").glob("bucket-*/*"))
    for i in range(65 - len(shards)):
        shutil.copy(shards[0], shards[0].with_name(f"shard-{i + 1000:06d}.safetensors"))
    num_shards = len(list((tmp_path / "cache").glob("bucket-*/*")))
    index = index_dir(tmp_path / "cache") / "index.parquet"
    kept = index.rename(tmp_path / "kept")
    with pytest.raises(CacheError, match=rf"{num_shards} shards .* have no rows in its index, which must have lost"):
        generate(config, Observer())
    assert len(list((tmp_path / "cache").glob("bucket-*/*"))) == num_shards
    kept.rename(index)
    manifest = (tmp_path / "cache" / "manifest.json").rename(tmp_path / "manifest")
    with pytest.raises(CacheError, match=r"holds cached samples but no manifest\.json"):
        generate(config, Observer())
    manifest.rename(tmp_path / "cache" / "manifest.json")
    generate(config, Observer())
    assert checksums(tmp_path / "cache") == whole


def test_a_sample_taken_from_the_index_is_redone_to_the_bit_and_no_other_is(configure, tmp_path: Path) -> None:
    generate(configure(), Observer())
    whole, path = checksums(tmp_path / "cache"), index_dir(tmp_path / "cache") / "index.parquet"
    rows = cached_rows(tmp_path / "cache")
    write_rows(path, rows.filter(pa.array([sample not in (3, 44) for sample in rows["sample"].to_pylist()])))
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").glob("bucket-*/*")}
    listener = Listener()
    generate(configure(), listener)
    assert checksums(tmp_path / "cache") == whole
    lengths = rows["length"].to_pylist()
    assert listener.tokens[0] == sum(lengths) - lengths[3] - lengths[44]
    assert listener.tokens[-1] == sum(lengths)
    assert before.items() <= {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").glob("bucket-*/*")}.items()


def holds_the_lock(pid: int) -> bool:
    """Whether the process has the lock's descriptor, so that the cache stays locked if its parent is killed."""
    with suppress(OSError):
        return any(path.readlink().name == "writer.lock" for path in Path(f"/proc/{pid}/fd").iterdir())
    return False


def test_a_worker_that_dies_ends_the_run_with_its_name_and_what_is_safe(configure, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(configure(devices="cpu:2")))
    command = [sys.executable, "-m", "dflash_cli", "generate", path]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    workers: list[int] = []
    while not (len(workers) == 2 and all(map(holds_the_lock, workers))) and run.poll() is None:
        # the resource tracker is a child too, the first one
        workers = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()][1:]
        time.sleep(0.01)
    os.kill(workers[1], signal.SIGKILL)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 2, (out, err)
    assert "Error: Worker 1 (cpu) was killed by signal 9: run the same command again. Committed so far: " in err
    assert "Traceback" not in err
    generate(configure(), Observer())
    assert checksums(tmp_path / "cache") == whole_checksums(configure, tmp_path)


def test_a_writer_left_by_an_error_of_ours_commits_whole_jobs_too(
    configure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    append, calls = CacheWriter.append, []

    def fail(self: CacheWriter, *arguments: Any) -> None:
        if len(calls) == 7:
            raise RuntimeError("a fault of ours")
        calls.append(arguments)
        append(self, *arguments)

    monkeypatch.setattr(CacheWriter, "append", fail)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        generate(configure(), Observer())
    assert set(cached_rows(tmp_path / "cache")["job"].to_pylist()) == {arguments[1] for arguments in calls}
