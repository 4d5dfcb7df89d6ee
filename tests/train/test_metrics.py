import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.config.loading import validate_config
from dflash_cache.config.settings import Config
from dflash_cache.drafter.loss import BlockLoss
from dflash_cache.errors import RunError
from dflash_cache.train.metrics import JsonLines, StepSums, Wandb

CPU = torch.device("cpu")


def outcome(correct_NK: list[list[int]], mask_NK: list[list[int]], loss_sum: float, weight_sum: float) -> BlockLoss:
    correct, mask = torch.tensor(correct_NK).bool(), torch.tensor(mask_NK).bool()
    return BlockLoss(torch.tensor(loss_sum), torch.tensor(weight_sum), mask.float(), correct & mask, mask)


def gather_sums(*losses: BlockLoss, num_buckets: int = 2) -> StepSums:
    """The micro-batches are of the buckets in turn."""
    sums = StepSums(losses[0].mask_NK.shape[1] + 1, num_buckets, CPU)
    for i, loss in enumerate(losses):
        sums.add(loss, i % num_buckets)
    return sums


def figures(*losses: BlockLoss) -> dict[str, Any]:
    return gather_sums(*losses).figures()


FIRST = outcome([[1, 1, 0], [1, 0, 1]], [[1, 1, 1], [1, 1, 1]], loss_sum=6.0, weight_sum=4.0)
SECOND = outcome([[1, 1, 0], [0, 0, 0]], [[1, 1, 0], [1, 0, 0]], loss_sum=3.0, weight_sum=2.0)


def test_the_figures_of_a_step_are_those_counted_by_hand() -> None:
    found = figures(FIRST, SECOND)
    assert found["loss"] == pytest.approx(9.0 / 6.0)
    # four blocks: streaks of 2, 1, 2 and 0 right drafts
    assert found["anchor_acceptance"] == pytest.approx(1 + 5 / 4)
    assert found["position_anchor_acceptance"] == pytest.approx([3 / 4, 2 / 4, 0 / 4])
    # `outcome`'s cross-entropies are 1 where supervised
    assert found["position_loss"] == pytest.approx([1.0, 1.0, 1.0])
    # right of supervised: 3 of 4 in the first slot, 2 of 3 in the second, 1 of 2 in the third
    assert found["position_accuracy"] == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert found["accuracy"] == pytest.approx((3 / 4 + 2 / 3 + 1 / 2) / 3)


def test_a_micro_batch_counts_by_its_weights_and_slots_not_as_one_of_several() -> None:
    small = outcome([[0, 0, 0]], [[1, 0, 0]], loss_sum=100.0, weight_sum=1.0)
    large = outcome([[1, 1, 1]] * 9, [[1, 1, 1]] * 9, loss_sum=0.0, weight_sum=99.0)
    found = figures(small, large)
    assert found["loss"] == pytest.approx(1.0)
    assert found["position_accuracy"] == pytest.approx([0.9, 1.0, 1.0])
    assert found["anchor_acceptance"] == pytest.approx(1 + 27 / 10)


@st.composite
def outcomes(draw: st.DrawFn) -> list[BlockLoss]:
    """A few micro-batches whose masks are prefixes, as the labels' rule makes them."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        N = draw(st.integers(0, 5))
        lengths = torch.tensor(draw(st.lists(st.integers(1, 3), min_size=N, max_size=N)), dtype=torch.int64)
        mask = torch.arange(3) < lengths[:, None]
        bits = draw(st.lists(st.booleans(), min_size=3 * N, max_size=3 * N))
        correct = torch.tensor(bits, dtype=torch.bool).view(N, 3) & mask
        sums = torch.tensor(draw(st.lists(st.integers(0, 1000), min_size=2, max_size=2))) / 8
        found.append(BlockLoss(sums[0], sums[1], mask.float(), correct, mask))
    return found


@given(outcomes())
def test_micro_batches_one_after_another_give_the_figures_of_all_their_blocks_at_once(losses: list[BlockLoss]) -> None:
    whole = BlockLoss(
        loss_sum=torch.stack([loss.loss_sum for loss in losses]).sum(),
        weight_sum=torch.stack([loss.weight_sum for loss in losses]).sum(),
        ce_NK=torch.cat([loss.ce_NK for loss in losses]),
        correct_NK=torch.cat([loss.correct_NK for loss in losses]),
        mask_NK=torch.cat([loss.mask_NK for loss in losses]),
    )
    assert figures(*losses) == figures(whole)
    assert figures(*reversed(losses)) == figures(whole)


@given(outcomes())
def test_the_anchor_acceptance_is_the_mean_streak_of_right_drafts_and_the_targets_token(
    losses: list[BlockLoss],
) -> None:
    streaks = []
    for loss in losses:
        for row in loss.correct_NK.tolist():
            streaks.append(row.index(False) if False in row else len(row))
    expected = 1 + sum(streaks) / len(streaks) if streaks else 1.0
    assert figures(*losses)["anchor_acceptance"] == pytest.approx(expected)


def test_a_step_without_supervision_has_finite_figures() -> None:
    nothing = BlockLoss(torch.zeros(()), torch.zeros(()), *(torch.zeros(0, 3) for _ in range(3)))
    empty = replace(nothing, correct_NK=nothing.correct_NK.bool(), mask_NK=nothing.mask_NK.bool())
    assert figures(empty) == {
        "loss": 0.0,
        "anchor_acceptance": 1.0,
        "accuracy": 0.0,
        "position_accuracy": [0.0, 0.0, 0.0],
        "position_loss": [0.0, 0.0, 0.0],
        "position_anchor_acceptance": [0.0, 0.0, 0.0],
        "blocks": 0,
    }


def test_each_bucket_has_its_own_loss_accuracy_and_anchor_acceptance_and_none_without_supervision() -> None:
    found = gather_sums(FIRST, SECOND, FIRST, num_buckets=3).bucket_figures()
    assert found == {
        "bucket_0_loss": 6.0 / 4.0,
        "bucket_0_accuracy": 4 / 6,
        "bucket_0_anchor_acceptance": 1 + 3 / 2,
        "bucket_1_loss": 3.0 / 2.0,
        "bucket_1_accuracy": 2 / 3,
        "bucket_1_anchor_acceptance": 1 + 2 / 2,
        "bucket_2_loss": 6.0 / 4.0,
        "bucket_2_accuracy": 4 / 6,
        "bucket_2_anchor_acceptance": 1 + 3 / 2,
    }
    assert gather_sums(FIRST).bucket_figures()["bucket_1_loss"] is None
    assert gather_sums(FIRST).bucket_figures()["bucket_1_accuracy"] is None


@given(outcomes(), st.integers(1, 4))
def test_the_sums_of_several_ranks_add_up_to_those_of_one(losses: list[BlockLoss], num_ranks: int) -> None:
    whole = gather_sums(*losses, num_buckets=1)
    parts = StepSums(4, 1, CPU)
    for rank in range(num_ranks):
        mine = losses[rank::num_ranks]
        if mine:
            parts.by_bucket += gather_sums(*mine, num_buckets=1).by_bucket
    assert parts.figures() == whole.figures()
    assert parts.bucket_figures() == whole.bucket_figures()
    assert parts.weight_sum == whole.weight_sum


def test_sums_hold_no_gradient() -> None:
    sums = gather_sums(replace(FIRST, loss_sum=torch.ones((), requires_grad=True) * 2))
    assert not sums.by_bucket.requires_grad
    assert sums.by_bucket[0, :3].tolist() == [2.0, 4.0, 2.0]
    assert (sums.weight_sum.dtype, float(sums.weight_sum)) == (torch.float32, 4.0)


def log(path: Path, steps: range, **more: object) -> None:
    with JsonLines(path) as sink:
        for step in steps:
            sink({"kind": "train", "step": step, **more})


def logged(path: Path) -> list[tuple[int, object]]:
    return [(line["step"], line.get("run")) for line in map(json.loads, path.read_text().splitlines())]


def test_every_record_is_one_line_that_reads_back_equal(tmp_path: Path) -> None:
    records = [{"kind": "train", "step": 1, "accuracy": [0.5, 1 / 3]}, {"kind": "validation", "step": 1, "loss": 1e-9}]
    path = tmp_path / "new" / "log.jsonl"
    with JsonLines(path) as sink:
        for number, record in enumerate(records, start=1):
            sink(record)
            assert len(path.read_text().splitlines()) == number  # flushed: a killed run has logged it
    assert [json.loads(line) for line in path.read_text().splitlines()] == records


@pytest.mark.parametrize("first", [1, 3, 6, 9])
def test_a_resumed_log_has_the_old_lines_before_its_first_step_and_its_own_from_there(
    tmp_path: Path, first: int
) -> None:
    path = tmp_path / "log.jsonl"
    log(path, range(1, 6), run="old")
    log(path, range(first, 8), run="new")
    kept = [(step, "old") for step in range(1, min(first, 6))]
    assert logged(path) == kept + [(step, "new") for step in range(first, 8)]


def test_lines_of_the_same_step_from_one_run_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with JsonLines(path) as sink:
        sink({"kind": "train", "step": 4})
        sink({"kind": "validation", "step": 4})
    log(path, range(5, 6))
    assert [step for step, _ in logged(path)] == [4, 4, 5]


@pytest.mark.parametrize("left", [1, 9, 17])
def test_a_half_written_last_line_is_cut_off_when_the_run_goes_on(tmp_path: Path, left: int) -> None:
    path = tmp_path / "log.jsonl"
    log(path, range(1, 4))
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:left])
    log(path, range(4, 5))
    assert [step for step, _ in logged(path)] == [1, 2, 3, 4]


def test_a_log_that_gets_no_record_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log(path, range(1, 4))
    before = path.read_bytes()
    log(path, range(0))
    assert path.read_bytes() == before
    log(tmp_path / "none.jsonl", range(0))
    assert not (tmp_path / "none.jsonl").exists()


def test_a_loss_that_is_not_a_number_does_not_stop_a_later_resumption(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log(path, range(1, 3), loss=math.nan)
    log(path, range(3, 4))
    assert [step for step, _ in logged(path)] == [1, 2, 3]


@pytest.fixture
def wandb_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Config]:
    """The configuration of a run that is not there yet, logged to wandb in a mode; wandb keeps to `tmp_path`."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))

    def make(name: str, mode: str = "offline") -> Config:
        tree = {
            "cache_dir": "cache",
            "run_dir": str(tmp_path / name),
            "target": {"model": "some-target"},
            "data": {"paths": ["a.jsonl"]},
            "wandb": {"mode": mode, "project": "some-project"},
        }
        return validate_config(tree, "test")

    return make


def stored_by_wandb(config: Config, name: str) -> bytes:
    """What it wrote for a finished run, with what is logged as `name`: its own process may still be writing."""
    (path,) = (Path(config.run_dir) / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 60
    while name.encode() not in path.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.read_bytes()


def test_runs_logged_to_wandb_at_once_are_runs_of_their_own_whatever_their_folders_are_called(wandb_config) -> None:
    configs = [wandb_config(f"seed={seed},init=a:b;c?d#e'") for seed in (1, 2)]
    with Wandb(configs[0]) as one, Wandb(configs[1]) as other:
        one({"kind": "train", "step": 1, "only_one": 0.5})
        other({"kind": "train", "step": 1, "only_other": 0.5})
    for config, name, others in zip(configs, ("only_one", "only_other"), (b"only_other", b"only_one"), strict=True):
        stored = stored_by_wandb(config, name)
        assert name.encode() in stored
        assert others not in stored


def test_a_run_that_wandb_refuses_ends_in_one_sentence(wandb_config, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "too short")
    with pytest.raises(RunError, match=r"does not take the run \S+ \(.*\): mend that, or set wandb\.mode to offline"):
        Wandb(wandb_config("refused", "online"))


def test_wandb_offline_leaves_a_run_folder_with_the_records_names(wandb_config) -> None:
    config = wandb_config("some-run")
    with Wandb(config) as sink:
        batch = {"bucket_0_pct": 75.0, "bucket_1_loss": None, "longest_run": 2}
        sink({"kind": "train", "step": 3, "loss": 0.5, "accuracies": [4, 0], "text": "left out", "batch": batch})
        sink({"kind": "validation", "step": 3, "loss": 0.25})
    stored = stored_by_wandb(config, "validation/loss")
    names = ("train/loss", "train/accuracies_1", "train/accuracies_2", "validation/loss", "some-target")
    for name in (*names, "batch/bucket_0_pct", "batch/longest_run"):
        assert name.encode() in stored
    for name in ("train/text", "train/batch", "bucket_1_loss"):
        assert name.encode() not in stored


def test_numbers_that_are_not_finite_are_null_for_any_reader_of_json(tmp_path: Path) -> None:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    path = tmp_path / "log.jsonl"
    with JsonLines(path) as sink:
        sink({"step": 1, "loss": math.nan, "list": [math.inf, 2.0], "batch": {"bucket_0_loss": -math.inf, "kl": 0.5}})
    assert json.loads(path.read_text(), parse_constant=refuse) == {
        "step": 1,
        "loss": None,
        "list": [None, 2.0],
        "batch": {"bucket_0_loss": None, "kl": 0.5},
    }
