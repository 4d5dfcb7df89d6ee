"""`dflash train --devices`: its checkpoints are used like others, a rank that dies ends all; a run is locked."""

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.test_errors import check
from safetensors.torch import load_file
from train.rank_runs import server

from dflash_cache.cache.lock import lock_folder
from dflash_cache.errors import RunError
from dflash_cache.train import processes, setup
from dflash_cache.train.checkpoint import latest_path, load_checkpoint, load_drafter

SHARDED = ("--devices", "cpu:2", "--set", "train.parallel=sharded")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def cached(dflash, project: Path, monkeypatch) -> Path:
    """The project with its cache; ranks come from a server that has imported torch already."""
    monkeypatch.setattr(processes, "get_context", lambda _: server)
    assert dflash("generate", project).code == 0
    return project


def without_times(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of an evaluation that do not depend on its speed."""
    timed = {"tokens_per_second", "tokens_per_second_plain", "speed_up", "categories"}
    categories = {name: without_times(part) for name, part in figures.get("categories", {}).items()}
    return {name: value for name, value in figures.items() if name not in timed} | {"by category": categories}


def test_a_sharded_checkpoint_is_evaluated_and_exported_as_any_other(dflash, cached: Path) -> None:
    trained = dflash("train", cached, *SHARDED)
    assert trained.code == 0, trained.err
    folder = latest_path(cached.parent / "run")
    assert folder.is_dir()
    evaluated = dflash("eval", cached, "--checkpoint", folder, "--json")
    assert evaluated.code == 0, evaluated.err
    drafter = load_drafter(folder).state_dict()
    for form in ("zlab", "speculators"):
        out = cached.parent / form
        exported = dflash("export", cached, out, "--checkpoint", folder, "--dtype", "float32", "--format", form)
        assert exported.code == 0, exported.err
        tensors = load_file(out / "model.safetensors")
        assert all(torch.equal(tensors[name], drafter[name]) for name in tensors.keys() & drafter.keys())
        assert drafter.keys() <= tensors.keys() or form == "speculators"
    again = dflash("eval", cached, "--checkpoint", cached.parent / "zlab", "--json")
    one, other = (json.loads(shown.out.splitlines()[-1]) for shown in (evaluated, again))
    assert without_times(one) == without_times(other)


@pytest.mark.parametrize("num_records", [0, 3])  # before the ranks have met, and while they train
def test_a_rank_that_is_killed_ends_the_command_and_the_same_command_goes_on(dflash, cached, num_records) -> None:
    log = cached.parent / "run" / "log.jsonl"

    def kill_one() -> None:
        while len(ranks := multiprocessing.active_children()) < 2:
            time.sleep(0.001)
        while num_records and not (log.exists() and log.read_text().count("\n") >= num_records):
            time.sleep(0.001)
        os.kill(ranks[-1].pid, signal.SIGKILL)

    whole = cached.parent / "whole"
    assert dflash("train", cached, *SHARDED, "--set", f"run_dir={whole}").code == 0
    killer = threading.Thread(target=kill_one)
    killer.start()
    ended = dflash("train", cached, *SHARDED)
    killer.join()
    assert ended.code == 2
    assert ended.err.startswith("Error: Its process ended with code -9") or "has lost another rank" in ended.err
    assert ended.err.count("\n") == 1
    assert dflash("train", cached, *SHARDED).code == 0
    one, other = (load_checkpoint(latest_path(run)) for run in (whole, cached.parent / "run"))
    assert one.step == other.step
    assert all(torch.equal(tensor, other.drafter[name]) for name, tensor in one.drafter.items())


def test_a_run_that_another_process_trains_is_refused_and_left_alone(dflash, cached: Path, monkeypatch) -> None:
    monkeypatch.setattr(setup, "PATIENCE_SECONDS", 0.2)
    run_dir = cached.parent / "run"
    half = run_dir / "checkpoints" / ".step-000001.pt.00.partial"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"its writer is at it")
    with lock_folder(run_dir, "train.lock", "held", RunError):
        check(
            dflash("train", cached),
            f"The run in {run_dir} is being trained by another process (process {os.getpid()} on ",
            "): wait until it has ended, or stop it.",
        )
        assert half.exists()
    assert dflash("train", cached).code == 0
    assert not half.exists()
