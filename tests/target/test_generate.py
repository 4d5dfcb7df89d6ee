"""The first stage: bad states, the bound on memory, and several workers."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from target.small_cache import ENVIRONMENT, NUM_SAMPLES, TOKEN_BYTES, Listener, checksums, whole_checksums

from dflash_cache.cache.index import cached_rows
from dflash_cache.cache.rejected import read_rejected, rejected_dir
from dflash_cache.config.loading import dump_config
from dflash_cache.errors import TargetError
from dflash_cache.target import pipeline
from dflash_cache.target.generate import generate
from dflash_cache.target.observer import Observer


def spoil(monkeypatch: pytest.MonkeyPatch, faults: dict[int, float]) -> None:
    """Make the target's states at token 1, layer 1 those numbers for samples whose first word has that id."""
    capture = pipeline.capture_states

    def bad(target: Any, ids_ST: Any, lengths_S: Any, out_STLH: Any = None) -> Any:
        states = capture(target, ids_ST, lengths_S, out_STLH)
        for place, word in enumerate(ids_ST[:, 2].tolist()):  # the user's first word tells the samples apart
            if word in faults:
                states[place, 1, 1] = faults[word]
        return states

    monkeypatch.setattr(pipeline, "capture_states", bad)


def test_bad_samples_are_left_out_recorded_and_the_cache_is_finished_without_them(
    configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, {7 + 11: float("nan"), 7 + 23: 0.0, 7 + 30: float("-inf")})  # w0 is id 7
    config = configure(max_bad_share=0.05)
    listener = Listener()
    generate(config, listener)
    monkeypatch.undo()
    reasons = {11: "states that are not finite", 23: "states that are all zero at a token"}
    reasons[30] = reasons[11]
    assert dict(zip(*read_rejected(tmp_path / "cache").to_pydict().values(), strict=True)) == reasons
    data = tmp_path / "data.jsonl"
    assert listener.bad[0] == {reasons[11]: 2, reasons[23]: 1}
    assert listener.bad[1] == {reasons[11]: f"sample 11, {data}:12", reasons[23]: f"sample 23, {data}:24"}
    kept = checksums(tmp_path / "cache")
    assert set(kept) == set(range(NUM_SAMPLES)) - set(reasons)
    assert kept.items() <= whole_checksums(configure, tmp_path).items()
    again = Listener()
    generate(config, again)  # the target would do well now, but what was left out stays out
    assert again.estimate is not None
    assert again.estimate.remaining_tokens == 0
    assert again.bad == listener.bad
    shutil.rmtree(rejected_dir(tmp_path / "cache"))
    generate(config, Observer())
    assert checksums(tmp_path / "cache") == checksums(tmp_path / "whole")


def test_too_many_bad_samples_end_the_run_and_it_stays_ended(
    configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, {7 + i: 0.0 for i in range(5)})
    with pytest.raises(
        TargetError, match=r"bad states for 4 of 60 samples, .*max_bad_share \(0\.05\).*Committed so far"
    ):
        generate(configure(max_bad_share=0.05, token_budget=34), Observer())
    monkeypatch.undo()
    assert read_rejected(tmp_path / "cache").num_rows == 4
    with pytest.raises(TargetError, match="bad states for 4 of 60"):
        generate(configure(max_bad_share=0.05, token_budget=34), Observer())
    generate(configure(max_bad_share=0.07, token_budget=34), Observer())


@pytest.mark.parametrize("buffer_bytes", [1, 50_000, 1 << 30])
def test_the_memory_bound_is_told_and_does_not_change_a_bit(configure, tmp_path: Path, buffer_bytes: int) -> None:
    listener = Listener()
    generate(configure(buffer_bytes=buffer_bytes), listener)
    assert listener.estimate is not None
    job_bytes = 96 // 12 * 12 * 3 * 32 * 4  # at most 96 padded tokens
    assert listener.estimate.buffer_bytes <= max(buffer_bytes, job_bytes)
    assert listener.estimate.token_bytes == TOKEN_BYTES
    assert checksums(tmp_path / "cache") == whole_checksums(configure, tmp_path)


def test_workers_of_our_own_and_of_torchrun_make_the_same_cache_as_one(configure, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(configure()))
    whole = whole_checksums(configure, tmp_path)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    commands = {
        "crew": [sys.executable, "-m", "dflash_cli", "generate", path, "--devices", "cpu:2"],
        "torchrun": [*launch, "-m", "dflash_cli", "generate", path],
    }
    for name, command in commands.items():
        command += ["--set", f"cache_dir={tmp_path / name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        assert "(2 workers)" in " ".join(done.stdout.split())
        assert " ".join(done.stdout.split()).count("is complete: 60 samples.") == 1
        assert checksums(tmp_path / name) == whole


def test_jobs_cut_by_another_token_budget_complete_the_same_cache(configure, tmp_path: Path) -> None:
    def stop(call: int) -> None:
        if call == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(configure(), Listener(stop))
    assert 0 < cached_rows(tmp_path / "cache").num_rows < NUM_SAMPLES
    generate(configure(token_budget=200), Observer())
    assert sorted(checksums(tmp_path / "cache")) == list(range(NUM_SAMPLES))
