"""Sharded ranks (FSDP2 over gloo): the curve of one process, and checkpoints that any number of ranks goes on with."""

import signal
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from train.rank_runs import COMPLETE, KILLED, REFUSED, STOPPED, Fate, final_state, read_log, run_ranks

from dflash_cache.config.settings import TrainSettings
from dflash_cache.errors import RunError
from dflash_cache.train.checkpoint import best_path, checkpoints_dir, latest_path, load_checkpoint, load_drafter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def train_whole(config, world_size: int) -> None:
    assert run_ranks([config] * world_size) == [(COMPLETE, "")] * world_size


def assert_alike(one, other) -> None:
    """The same records but for rounding, and weights and moments close to each other's."""
    for record, twin in zip(read_log(one), read_log(other), strict=True):
        assert (record["kind"], record["step"], record["blocks"]) == (twin["kind"], twin["step"], twin["blocks"])
        assert record["loss"] == pytest.approx(twin["loss"], abs=1e-4)
        if record["kind"] == "train":
            assert record["gradient_norm"] == pytest.approx(twin["gradient_norm"], rel=1e-3)
        else:
            assert (record["passes"], record["acceptance_estimate"]) == (twin["passes"], twin["acceptance_estimate"])
    (step, tensors), (other_step, others) = final_state(one), final_state(other)
    assert step == other_step
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-3, atol=1e-4)


def test_two_and_four_sharded_ranks_have_the_loss_curve_of_one_process_with_the_average_validated(configure) -> None:
    runs = {
        n: configure(f"run-{n}", accumulation=4 // n, ema_decay=0.9, parallel="sharded", gradient_checkpointing=n == 2)
        for n in (1, 2, 4)
    }
    for world_size, config in runs.items():
        train_whole(config, world_size)
    assert len({round(record["loss"], 3) for record in read_log(runs[1])}) > 4  # a curve, not a constant
    for world_size in (2, 4):
        assert_alike(runs[1], runs[world_size])
    one, four = (load_drafter(latest_path(Path(runs[n].run_dir))).state_dict() for n in (1, 4))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, four[name], rtol=1e-3, atol=1e-4)


def test_a_sharded_run_goes_on_with_two_then_one_then_four_then_replicated_ranks(configure) -> None:
    whole = configure("whole")
    train_whole(whole, 1)
    for step, world_size, parallel in (
        (2, 2, "sharded"),
        (4, 1, "replicated"),
        (6, 4, "sharded"),
        (7, 2, "replicated"),
    ):
        config = configure("run", accumulation=4 // world_size, parallel=parallel)
        fate = Fate(rank=world_size - 1, step=step, number=signal.SIGTERM)
        assert run_ranks([config] * world_size, fate) == [(STOPPED, "")] * world_size
        latest = latest_path(Path(config.run_dir))
        assert latest.is_dir() == (parallel == "sharded")
        assert load_checkpoint(latest).step == step
    last = configure("run", accumulation=2, parallel="sharded")
    train_whole(last, 2)
    assert_alike(whole, last)


def test_a_sharded_run_killed_and_resumed_ends_with_the_same_bits_and_keeps_the_last_and_the_best(configure) -> None:
    whole, parts = (configure(n, accumulation=2, ema_decay=0.9, parallel="sharded") for n in ("whole", "parts"))
    train_whole(whole, 2)
    for step in (3, 6):
        results = run_ranks([parts] * 2, Fate(rank=step % 2, step=step))
        (other,) = [result for result in results if result[0] != KILLED]
        assert other[0] == REFUSED
        assert "has lost another rank (" in other[1]
    (checkpoints_dir(Path(parts.run_dir)) / ".step-000001.partial").mkdir()  # what a kill while saving leaves
    train_whole(parts, 2)
    (step, tensors), (other_step, others) = final_state(whole), final_state(parts)
    assert step == other_step
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    assert read_log(whole) == read_log(parts)
    kept = {path for path in checkpoints_dir(Path(parts.run_dir)).iterdir() if path.is_dir()}
    assert latest_path(Path(parts.run_dir)) in kept
    assert best_path(Path(parts.run_dir)) in kept
    assert 2 <= len(kept) <= 3
    assert not list(checkpoints_dir(Path(parts.run_dir)).glob(".*"))


def test_a_damaged_folder_is_told_with_what_to_do(configure) -> None:
    config = configure("run", accumulation=2, max_steps=2, parallel="sharded")
    train_whole(config, 2)
    path = latest_path(Path(config.run_dir))
    part = max(path.glob("*.distcp"), key=lambda each: each.stat().st_size)
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(RunError) as caught:
        load_checkpoint(path)
    assert str(caught.value).startswith(f"The checkpoint {path} is damaged (")
    assert str(caught.value).endswith("): remove it to go on from the one before, or name another if it was never one.")


def test_muon_is_refused_where_weights_are_sharded() -> None:
    with pytest.raises(ValidationError, match=r"optimizer muon needs whole matrices, parallel sharded splits them"):
        TrainSettings.model_validate({"optimizer": "muon", "parallel": "sharded"})
