import json
from pathlib import Path

import pytest
import torch
from drafter.tiny_drafter import TINY, make_drafter

from dflash_cache.drafter.export import export_zlab
from dflash_cache.errors import RunError
from dflash_cache.train.checkpoint import (
    ORDER,
    Checkpoint,
    best_mark,
    best_path,
    best_score,
    check_identity,
    checkpoints_dir,
    latest_path,
    load_checkpoint,
    load_drafter,
    mark_best,
    save_checkpoint,
)

IDENTITY = {"cache": "abc", "train.betas": [0.9, 0.95], "objective.gamma": None, "train.order": "interleaved"}


def checkpoint(step: int = 3) -> Checkpoint:
    """A trained step of a small drafter, its optimizer's moments included."""
    drafter = make_drafter(step)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=0.01)
    for parameter in drafter.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return Checkpoint(step, drafter.state_dict(), [optimizer.state_dict()], IDENTITY, TINY.to_dict())


def small(step: int) -> Checkpoint:
    return Checkpoint(step, {"w": torch.tensor([float(step)])}, [], {}, {})


def kept(run_dir: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in checkpoints_dir(run_dir).glob("*.pt"))


def refusal(path: Path) -> str:
    with pytest.raises(RunError) as caught:
        load_checkpoint(path)
    return str(caught.value)


def test_what_is_loaded_equals_what_was_saved_to_the_bit(tmp_path: Path) -> None:
    saved = checkpoint()
    found = load_checkpoint(save_checkpoint(tmp_path, saved, keep=2))
    assert (found.step, found.identity) == (3, IDENTITY)
    assert found.shape == saved.shape
    assert found.drafter.keys() == saved.drafter.keys()
    assert all(torch.equal(found.drafter[name], tensor) for name, tensor in saved.drafter.items())
    (one,), (other,) = found.optimizers, saved.optimizers
    assert one["param_groups"] == other["param_groups"]
    for number, state in other["state"].items():
        assert all(torch.equal(one["state"][number][name], value) for name, value in state.items())


def test_a_loaded_optimizer_and_drafter_take_the_next_step_like_the_saved_ones(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(), keep=1)
    after = []
    for state in (checkpoint(), load_checkpoint(path)):
        drafter = make_drafter()
        drafter.load_state_dict(state.drafter)
        optimizer = torch.optim.AdamW(drafter.parameters())
        optimizer.load_state_dict(state.optimizers[0])
        for parameter in drafter.parameters():
            parameter.grad = torch.full_like(parameter, -0.25)
        optimizer.step()
        after.append(drafter.state_dict())
    assert all(torch.equal(tensor, after[1][name]) for name, tensor in after[0].items())


def test_the_drafter_of_a_checkpoint_and_of_its_export_are_the_same(tmp_path: Path) -> None:
    saved = checkpoint()
    one = load_drafter(save_checkpoint(tmp_path, saved, keep=1))
    export_zlab(one, tmp_path / "export", "float32")
    other = load_drafter(tmp_path / "export")
    assert one.shape == TINY
    assert other.shape == TINY
    assert not one.training
    for name, tensor in saved.drafter.items():
        assert torch.equal(one.state_dict()[name], tensor)
        assert torch.equal(other.state_dict()[name], tensor)


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_last_few_are_kept(tmp_path: Path, keep: int) -> None:
    for step in range(10, 80, 10):
        save_checkpoint(tmp_path, small(step), keep)
    assert kept(tmp_path) == list(range(10, 80, 10))[-keep:]


def test_the_best_outlives_the_last_few_until_another_is_better(tmp_path: Path) -> None:
    for step in range(1, 8):
        save_checkpoint(tmp_path, small(step), keep=2)
        if step in (2, 6):
            mark_best(tmp_path, best_mark(tmp_path, step, step))
        if step == 5:
            assert kept(tmp_path) == [2, 4, 5]
            assert best_path(tmp_path) == checkpoints_dir(tmp_path) / "step-000002.pt"
    assert kept(tmp_path) == [6, 7]
    assert best_path(tmp_path) == checkpoints_dir(tmp_path) / "step-000006.pt"
    assert latest_path(tmp_path) == checkpoints_dir(tmp_path) / "step-000007.pt"


def test_the_latest_is_the_one_of_the_highest_step_past_a_million_too(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, small(999_999), keep=2)
    path = save_checkpoint(tmp_path, small(1_000_000), keep=2)
    assert latest_path(tmp_path) == path


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, small(1), keep=2)
    again = Checkpoint(1, {"w": torch.tensor([9.0])}, [], {}, {})
    assert load_checkpoint(save_checkpoint(tmp_path, again, keep=2)).drafter["w"].tolist() == [9.0]
    assert kept(tmp_path) == [1]


def test_a_folder_that_never_saw_a_run_has_neither_a_latest_nor_a_best(tmp_path: Path) -> None:
    assert latest_path(tmp_path) is None
    assert best_path(tmp_path) is None
    assert best_score(tmp_path, 100) == float("-inf")


def test_a_best_mark_whose_file_was_removed_names_nothing(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, small(1), keep=2)
    mark_best(tmp_path, best_mark(tmp_path, 1, 2.5))
    path.unlink()
    assert best_path(tmp_path) is None


def test_a_best_score_of_a_later_step_does_not_count(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, small(20), keep=2)
    mark_best(tmp_path, best_mark(tmp_path, 20, 2.5))
    assert best_score(tmp_path, 20) == 2.5
    assert best_score(tmp_path, 19) == float("-inf")


def test_a_leftover_of_a_killed_save_is_no_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, small(1), keep=2)
    (checkpoints_dir(tmp_path) / ".step-000002.pt.0011223344556677.partial").write_bytes(b"half")
    assert latest_path(tmp_path) == checkpoints_dir(tmp_path) / "step-000001.pt"


@pytest.mark.parametrize("damage", ["empty", "half", "garbage", "foreign"])
def test_a_damaged_file_is_told_with_what_to_do(tmp_path: Path, damage: str) -> None:
    path = save_checkpoint(tmp_path, checkpoint(), keep=2)
    data = path.read_bytes()
    if damage == "foreign":
        torch.save({"step": 3}, path)
    else:
        path.write_bytes({"empty": b"", "half": data[: len(data) // 2], "garbage": b"no zip" * 100}[damage])
    told = refusal(path)
    assert told.startswith(f"The checkpoint {path} is damaged (")
    assert told.endswith("): remove it to go on from the one before, or name another if it was never one.")
    assert "weights_only" not in told  # which torch advises to switch off
    assert "\n" not in told


def test_after_removing_the_damaged_one_the_one_before_is_the_latest(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, small(1), keep=2)
    save_checkpoint(tmp_path, small(2), keep=2).unlink()
    latest = latest_path(tmp_path)
    assert latest is not None
    assert load_checkpoint(latest).step == 1


def test_a_missing_checkpoint_is_told(tmp_path: Path) -> None:
    path = tmp_path / "none.pt"
    assert refusal(path) == f"There is no checkpoint {path}: run `dflash train` first."
    with pytest.raises(RunError, match=r"There is no checkpoint in .*: run `dflash train` first\."):
        load_drafter(tmp_path)


def test_a_run_of_the_same_identity_goes_on(tmp_path: Path) -> None:
    found = load_checkpoint(save_checkpoint(tmp_path, checkpoint(), keep=1))
    check_identity(found, json.loads(json.dumps(IDENTITY)), tmp_path)


def test_a_run_of_another_identity_is_refused_with_every_difference(tmp_path: Path) -> None:
    now = {**IDENTITY, "cache": "def", "train.betas": [0.9, 0.99], "new": 1}
    del now["train.order"]
    with pytest.raises(RunError) as caught:
        check_identity(checkpoint(), now, tmp_path)
    assert str(caught.value) == (
        f"The run in {tmp_path} was made with other settings (cache: was abc, is def; new: was None, is 1; "
        "train.betas: was [0.9, 0.95], is [0.9, 0.99]; train.order: was interleaved, is None): set run_dir to another "
        "folder, or take the settings back."
    )


def test_the_same_settings_with_another_order_are_told_apart_from_other_settings(tmp_path: Path) -> None:
    saved = Checkpoint(1, {}, [], {**IDENTITY, ORDER: "abc"}, {})
    with pytest.raises(RunError) as caught:
        check_identity(saved, {**IDENTITY, ORDER: "def"}, tmp_path)
    assert str(caught.value) == (
        f"The run in {tmp_path} has another order of its samples, though its settings are the same (order of the first "
        "epoch: was abc, is def): go on with the versions of numpy and dflash-cache that it was begun with, or in "
        "another run_dir."
    )
    with pytest.raises(RunError, match="was made with other settings"):  # another setting gives another order, too
        check_identity(saved, {**IDENTITY, ORDER: "def", "cache": "def"}, tmp_path)
