"""The walk against a decoder that draws its blocks' streaks one at a time from a table, and figures counted by hand."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train.test_ranks import stop_at

from dflash_cache.config.loading import validate_config
from dflash_cache.config.settings import Config
from dflash_cache.train.checkpoint import (
    best_path,
    best_score,
    checkpoint_path,
    latest_path,
    load_checkpoint,
    load_drafter,
    mark_best,
    save_checkpoint,
)
from dflash_cache.train.loop import train, validate
from dflash_cache.train.metrics import PassSums, Record
from dflash_cache.train.setup import open_run
from dflash_cache.train.walk import AnswerWalks

CPU = torch.device("cpu")

Case = tuple[np.ndarray, np.ndarray]


def walk(mask_ST: np.ndarray, streak_ST: np.ndarray, count: int) -> list[list[int]]:
    """All walks, by asking for at most `count` anchors a sample at a time."""
    walks = AnswerWalks(mask_ST)
    asked: set[tuple[int, int]] = set()
    while (wanted := walks.next_anchors(count)) is not None:
        anchors_SA = np.full((len(wanted), count), -1)
        for s, row in enumerate(wanted):
            assert len(row) <= count
            assert not asked & {(s, a) for a in row.tolist()}, "no block is computed twice"
            asked |= {(s, a) for a in row.tolist()}
            anchors_SA[s, : len(row)] = row
        walks.learn(anchors_SA, np.concatenate([streak_ST[s, row] for s, row in enumerate(wanted)]))
    return walks.yields


def decode_slowly(mask_ST: np.ndarray, streak_ST: np.ndarray) -> list[list[int]]:
    """Token by token: an answer's first token is given; a pass yields the right drafts, and one token of the target."""
    answers = []
    for mask, streaks in zip(mask_ST, streak_ST, strict=True):
        position = 0
        while position < len(mask):
            if not mask[position] or position == 0:  # nothing stands before the first token to give it
                position += 1
                continue
            passes = []
            while position + 1 < len(mask) and mask[position + 1]:
                drafts, length = streaks[position], 0
                while length <= drafts and position + 1 < len(mask) and mask[position + 1]:
                    position, length = position + 1, length + 1
                passes.append(length)
            position += 1
            if passes:
                answers.append(passes)
    return answers


def lay_out(*answers: list[int]) -> Case:
    """One sample of answers with two unsupervised tokens before each; their tokens' streaks are given."""
    mask, streaks = [], []
    for answer in answers:
        mask += [False] * 2 + [True] * len(answer)
        streaks += [9] * 2 + answer
    return np.array([mask]), np.array([streaks])


def test_a_walk_goes_on_by_the_right_drafts_and_the_targets_own_token_and_stops_at_the_answers_end() -> None:
    # nine tokens: from 0 on by 3 to 3, by 1 to 4, and of the four right drafts there only 4 tokens are left
    assert walk(*lay_out([2, 9, 9, 0, 5, 9, 9, 9, 9]), count=3) == [[3, 1, 4]]
    # a last pass whose drafts are all right yields no token behind the end: 2 right, 2 left
    assert walk(*lay_out([2, 0, 0]), count=3) == [[2]]
    assert walk(*lay_out([1, 0, 0]), count=3) == [[2]]
    assert walk(*lay_out([0, 0, 0]), count=3) == [[1, 1]]


def test_every_turn_is_a_walk_of_its_own_and_an_answer_of_one_token_none() -> None:
    assert walk(*lay_out([1, 7, 0, 0], [3], [0, 2, 9, 9, 0]), count=2) == [[2, 1], [1, 3]]
    # what is right at the end of a turn never reaches into the next
    assert walk(*lay_out([5, 5], [0, 0, 0]), count=2) == [[1], [1, 1]]
    assert AnswerWalks(np.zeros((2, 5), bool)).next_anchors(4) is None


def test_plain_texts_first_token_is_what_decoding_is_prompted_with() -> None:
    mask_ST, streak_ST = np.ones((3, 5), bool), np.array([[9, 1, 0, 0, 9], [0, 9, 0, 0, 9], [2, 0, 2, 9, 9]])
    assert walk(mask_ST, streak_ST, count=2) == [[2, 1], [3], [1, 2]]
    assert walk(np.ones((1, 2), bool), np.array([[0, 9]]), count=2) == []


def test_a_mean_over_all_anchors_is_above_what_the_walk_yields_where_a_long_streak_leaps_over_others() -> None:
    mask_ST, streak_ST = lay_out([4, 3, 2, 1, 0, 0, 0, 0, 0, 0])
    (yields,) = walk(mask_ST, streak_ST, count=4)
    assert yields == [5, 1, 1, 1, 1]
    over_passes, over_anchors = sum(yields) / len(yields), 1 + (4 + 3 + 2 + 1) / 9
    assert (over_passes, over_anchors) == (pytest.approx(1.8), pytest.approx(2.111, abs=0.001))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    S, T = draw(st.integers(1, 3)), draw(st.integers(1, 24))
    bits = st.lists(st.booleans(), min_size=S * T, max_size=S * T)
    streaks = draw(st.lists(st.integers(0, 5), min_size=S * T, max_size=S * T))
    return np.array(draw(bits)).reshape(S, T), np.array(streaks).reshape(S, T)


@given(cases(), st.integers(1, 30))
def test_a_walk_is_that_of_a_decoder_however_many_anchors_are_computed_at_once(case: Case, count: int) -> None:
    assert walk(*case, count) == decode_slowly(*case)


@given(cases(), st.integers(1, 30), st.integers(0, 9))
def test_blocks_that_are_known_before_are_not_asked_for_and_change_nothing(case: Case, count: int, seed: int) -> None:
    mask_ST, streak_ST = case
    walks = AnswerWalks(mask_ST)
    known_ST = np.random.default_rng(seed).random(mask_ST.shape) < 0.5
    known_ST[:, :-1] &= mask_ST[:, :-1] & mask_ST[:, 1:]
    known_ST[:, -1] = False
    anchors_SA = np.where(known_ST, np.arange(mask_ST.shape[1]), -1)  # in any places of their row
    walks.learn(anchors_SA, streak_ST[known_ST])
    while (wanted := walks.next_anchors(count)) is not None:
        for s, row in enumerate(wanted):
            assert not known_ST[s, row].any()
            anchors_SA = np.full((len(wanted), count), -1)
            anchors_SA[s, : len(row)] = row
            walks.learn(anchors_SA, streak_ST[s, row])
    assert walks.yields == decode_slowly(*case)


def sum_passes(*parts: tuple[list[list[int]], int]) -> PassSums:
    passes = PassSums(block_size=4, num_buckets=3, device=CPU)
    for yields, bucket in parts:
        passes.add(yields, bucket)
    return passes


def test_the_figures_of_passes_are_those_counted_by_hand() -> None:
    passes = sum_passes(([[4, 1, 1], [2]], 0), ([[1, 1, 1, 1]], 2))
    assert passes.figures() == {
        "acceptance_estimate": pytest.approx(12 / 8),
        "answer_acceptance_estimate": pytest.approx((2 + 2 + 1) / 3),
        "position_acceptance": pytest.approx([2 / 8, 1 / 8, 1 / 8]),
        "passes": 8,
    }
    assert passes.bucket_figures() == {
        "bucket_0_acceptance": pytest.approx(8 / 4),
        "bucket_1_acceptance": None,
        "bucket_2_acceptance": 1.0,
    }
    assert sum_passes(([], 0)).figures() == {
        "acceptance_estimate": 1.0,
        "answer_acceptance_estimate": 1.0,
        "position_acceptance": [0.0, 0.0, 0.0],
        "passes": 0,
    }


@given(st.lists(st.lists(st.lists(st.integers(1, 4), min_size=1), max_size=3), max_size=6), st.integers(1, 4))
def test_ranks_that_walk_some_of_the_micro_batches_each_have_the_same_sums(
    micro_batches: list[list[list[int]]], num_ranks: int
) -> None:
    parts = [(yields, place % 3) for place, yields in enumerate(micro_batches)]
    whole, summed = sum_passes(*parts), sum_passes()
    for rank in range(num_ranks):
        summed.by_bucket += sum_passes(*parts[rank::num_ranks]).by_bucket
    assert torch.equal(summed.by_bucket[:, :-1], whole.by_bucket[:, :-1])  # whole numbers
    close = "answer_acceptance_estimate"  # a mean of fractions, summed in another order
    found, expected = summed.figures(), whole.figures()
    assert found.pop(close) == pytest.approx(expected.pop(close))
    assert found == expected


def with_objective(config: Config, **objective: object) -> Config:
    tree = config.model_dump(mode="json")
    tree["objective"] |= objective
    return validate_config(tree, "test")


def test_the_estimate_is_the_same_whatever_anchors_the_loss_draws_and_however_few_slots_are_trained(configure) -> None:
    """Whose weights are those of one trained run; and the loss's own figures differ, so they are over other anchors."""
    config = configure("trained", epochs=6)
    assert train(config, [])
    trained = load_drafter(Path(config.run_dir)).state_dict()
    found = []
    for name, slots, settings in (
        ("few", None, {"anchors_per_sample": 1}),
        ("some", 1, {"anchors_per_sample": 6}),
        ("all", None, {"anchors_per_sample": 512}),
        ("bounded", None, {"anchors_per_sample": 512, "max_anchors": 64, "max_samples": 64}),
    ):
        with open_run(with_objective(configure(name, **settings), max_slots=slots)) as run:
            run.drafter.load_state_dict(trained)
            found.append(validate(run))
    walked = ("acceptance_estimate", "answer_acceptance_estimate", "position_acceptance", "passes")
    assert [{name: one[name] for name in walked} for one in found] == [{name: found[0][name] for name in walked}] * 4
    assert found[0]["acceptance_estimate"] > 1
    assert found[0]["passes"] > 20
    assert len({one["blocks"] for one in found}) == 3
    buckets = [found[0][f"bucket_{bucket}_acceptance"] for bucket in range(3)]
    known = [acceptance for acceptance in buckets if acceptance is not None]
    assert min(known) <= found[0]["acceptance_estimate"] <= max(known)


def test_a_run_whose_best_was_found_over_random_anchors_goes_on_with_the_first_walk_as_its_best(configure) -> None:
    config = configure("run", max_steps=6, validate_every=2)
    run_dir = Path(config.run_dir)
    assert not train(config, [stop_at(3)])
    path = latest_path(run_dir)
    assert path == checkpoint_path(run_dir, 3)
    old = {"checkpoint": "step-000002.pt", "step": 2, "acceptance_estimate": 99.0}  # as marks were before
    save_checkpoint(run_dir, replace(load_checkpoint(path), best=old), config.train.keep_checkpoints)
    mark_best(run_dir, old)
    assert best_path(run_dir) == checkpoint_path(run_dir, 2)
    assert best_score(run_dir) == -math.inf

    records: list[Record] = []
    assert train(config, [records.append])
    walks = {record["step"]: record["acceptance_estimate"] for record in records if record["kind"] == "validation"}
    assert [*walks] == [4, 6]
    best = max(walks, key=walks.__getitem__)
    assert best_path(run_dir) == checkpoint_path(run_dir, best)
    assert best_score(run_dir) == walks[best] < 99
