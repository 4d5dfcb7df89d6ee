from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cache.config.settings import TrainSettings
from dflash_cache.data.mixing import count_buckets, longest_runs, measure_mix
from dflash_cache.data.plan import BatchLimits, interleave_buckets, plan_epoch, step_bounds
from dflash_cache.errors import RunError
from dflash_cache.train.sampler import EpochOrder, SamplerState, deal_step, pull_order, sampler_state

seeds = st.integers(0, 2**40)
buffers = st.integers(0, 24)
step_sizes = st.integers(1, 16)


@st.composite
def lists_of_buckets(draw, orders=("interleaved", "shuffled", "sequential")):
    """The buckets of a list, in one of the orders."""
    counts = np.array(draw(st.lists(st.integers(0, 50), min_size=1, max_size=7).filter(any)))
    generator = np.random.default_rng(draw(seeds))
    order = draw(st.sampled_from(orders))
    if order == "interleaved":
        return interleave_buckets(counts, generator)
    sequence = np.repeat(np.arange(len(counts), dtype=np.int16), counts)
    return generator.permutation(sequence) if order == "shuffled" else sequence


def ranks_pulled(order):
    """For each pull, how many unpulled entries of the list stood before the pulled one."""
    waiting = list(range(len(order)))
    ranks = []
    for entry in order.tolist():
        ranks.append(waiting.index(entry))
        del waiting[ranks[-1]]
    return ranks


def design_case(seed):
    """Six buckets; 63 samples a batch in the shortest, 6 in the longest, which has 20.2 % of the samples."""
    shares = [0.19, 0.165, 0.16, 0.145, 0.138, 0.202]
    buckets = np.repeat(np.arange(6), np.round(20_000 * np.array(shares)).astype(int))
    lengths = np.array([130, 200, 290, 400, 600, 1365])[buckets]
    return plan_epoch(lengths, buckets, BatchLimits(8192, 64), seed, 0)


@given(lists_of_buckets(), step_sizes, buffers, seeds)
@settings(max_examples=300)
def test_every_entry_is_pulled_once_and_every_step_has_the_counts_of_the_list(buckets, step_size, min_buffer, seed):
    bounds = step_bounds(len(buckets), step_size)
    order = pull_order(buckets, bounds, min_buffer, seed)
    assert np.sort(order).tolist() == list(range(len(buckets)))
    assert np.array_equal(count_buckets(buckets[order], bounds, 7), count_buckets(buckets, bounds, 7))


@given(lists_of_buckets(), step_sizes, buffers, seeds)
@settings(max_examples=300)
def test_no_run_gets_longer_than_three_or_the_longest_of_the_list(buckets, step_size, min_buffer, seed):
    order = pull_order(buckets, step_bounds(len(buckets), step_size), min_buffer, seed)
    assert (longest_runs(buckets[order], 7) <= np.maximum(3, longest_runs(buckets, 7))).all()


@given(lists_of_buckets(["interleaved"]), step_sizes, buffers, seeds)
@settings(max_examples=300)
def test_every_step_is_within_two_of_every_share(buckets, step_size, min_buffer, seed):
    bounds = step_bounds(len(buckets), step_size)
    order = pull_order(buckets, bounds, min_buffer, seed)
    figures = measure_mix(buckets[order], bounds, 7)
    assert np.abs(figures.deviation_nK).max() < 2 - 1e-9
    if 4 * figures.share_K.max() <= 3:
        assert figures.longest_run <= 3
        if np.sort(figures.share_K)[-2] >= 0.2:
            assert (np.count_nonzero(figures.counts_nK, 1)[np.diff(bounds) >= 4] > 1).all()


@given(lists_of_buckets(), step_sizes, buffers, seeds)
def test_an_entry_is_pulled_from_the_buffer_or_from_what_is_left_of_its_step(buckets, step_size, min_buffer, seed):
    bounds = step_bounds(len(buckets), step_size)
    ranks = ranks_pulled(pull_order(buckets, bounds, min_buffer, seed))
    for begin, end in pairwise(bounds):
        for pull in range(begin, end):
            assert ranks[pull] < max(min_buffer, end - pull)


@given(lists_of_buckets(), step_sizes, seeds)
def test_without_a_buffer_the_order_is_the_list(buckets, step_size, seed):
    bounds = step_bounds(len(buckets), step_size)
    assert pull_order(buckets, bounds, 0, seed).tolist() == list(range(len(buckets)))


def test_same_seed_same_order_and_other_seed_other_order():
    buckets = design_case(0).bucket
    bounds = step_bounds(len(buckets), 8)
    orders = [pull_order(buckets, bounds, 10, seed).tolist() for seed in (3, 3, 4, (3, 1))]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2] != orders[3] != orders[0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("min_buffer", [0, 10, 40])
def test_the_case_of_the_design_mixes_at_least_three_buckets_in_every_step(seed, min_buffer):
    plan = design_case(seed)
    bounds = step_bounds(plan.num_micro_batches, 8)
    order = pull_order(plan.bucket, bounds, min_buffer, seed)
    figures = measure_mix(plan.bucket[order], bounds, 6)
    assert np.diff(plan.begin)[plan.bucket == 0].max() == 63
    assert np.diff(plan.begin)[plan.bucket == 5].max() == 6
    assert figures.share_K[5] == pytest.approx(0.523, abs=0.002)
    assert figures.longest_run <= 3
    assert np.count_nonzero(figures.counts_nK, 1).min() >= 3
    assert figures.deviation_nK.max() < 2
    assert figures.single_share == 0


def test_the_first_pull_is_any_of_the_first_ten_with_the_same_probability():
    buckets = np.zeros(200, np.int16)
    bounds = step_bounds(200, 20)
    ranks = np.array([ranks_pulled(pull_order(buckets, bounds, 10, seed))[:50] for seed in range(200)])
    counts = np.bincount(ranks.ravel(), minlength=10)
    assert len(counts) == 10
    assert ((counts - 1000) ** 2 / 1000).sum() < 27.9  # chi-square's 99.9 % of 9 degrees of freedom


def test_pulls_of_mixed_buckets_are_spread_over_the_buffer():
    plan = design_case(0)
    bounds = step_bounds(plan.num_micro_batches, 8)
    ranks = np.concatenate([ranks_pulled(pull_order(plan.bucket, bounds, 10, seed))[:400] for seed in range(10)])
    shares = np.bincount(ranks, minlength=10)[:10] / len(ranks)
    assert shares.min() > 0.05
    assert shares.max() < 0.2


@given(st.lists(st.integers(1, 10_000), max_size=40), st.integers(1, 8), st.integers(0, 5))
def test_a_step_is_dealt_whole_and_every_rank_has_the_same_number_of_slots(tokens, world_size, spare):
    accumulation = max(1, -(-len(tokens) // world_size) + spare)
    dealt = deal_step(np.array(tokens, np.int64), world_size, accumulation)
    assert [len(places) for places in dealt] == [accumulation] * world_size
    taken = np.concatenate(dealt)
    assert np.sort(taken[taken >= 0]).tolist() == list(range(len(tokens)))
    for places in dealt:
        filled = places[places >= 0]
        assert (np.diff(filled) > 0).all()
        assert (places[len(filled) :] == -1).all()


def test_the_longest_go_to_the_rank_with_the_least_work():
    dealt = deal_step(np.array([10, 80, 30, 40, 20]), 2, 3)
    assert [places.tolist() for places in dealt] == [[0, 1, -1], [2, 3, 4]]


@given(st.integers(1, 4), st.integers(1, 6), buffers, st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_all_ranks_together_take_every_micro_batch_once(world_size, accumulation, min_buffer, seed):
    plan = design_case(0)
    options = TrainSettings(accumulation=accumulation, min_buffer=min_buffer, seed=seed)
    order = EpochOrder.from_plan(plan, options, 0, world_size)
    steps = [list(order.steps(0, rank)) for rank in range(world_size)]
    assert {len(slots) for rank in steps for slots in rank} == {accumulation}
    taken = np.concatenate([slots for rank in steps for slots in rank])
    assert np.sort(taken[taken >= 0]).tolist() == list(range(plan.num_micro_batches))
    for step in range(0, order.num_steps, 7):
        places = np.concatenate([rank[step] for rank in steps])
        assert sorted(places[places >= 0]) == sorted(order.step(step))


def test_an_order_begun_at_any_step_is_the_rest_of_the_whole():
    order = EpochOrder.from_plan(design_case(0), TrainSettings(accumulation=4), 0, 2)
    whole = [places.tolist() for places in order.steps(0, 1)]
    for first in (0, 1, 57, order.num_steps):
        assert [places.tolist() for places in order.steps(first, 1)] == whole[first:]


def test_steps_are_the_same_for_another_number_of_ranks_with_the_same_product():
    plan = design_case(0)
    one = EpochOrder.from_plan(plan, TrainSettings(accumulation=8), 3, 1)
    two = EpochOrder.from_plan(plan, TrainSettings(accumulation=4), 3, 2)
    assert one.num_steps == two.num_steps
    for step in range(one.num_steps):
        places = one.places(step, 0)
        assert np.array_equal(places[places >= 0], one.step(step))  # one rank takes the places in pull order
        assert np.array_equal(one.step(step), two.step(step))


def test_an_epoch_of_fewer_micro_batches_than_ranks_gives_some_ranks_empty_ones():
    plan = plan_epoch(np.array([5, 6, 7]), np.array([0, 0, 1]), BatchLimits(7, 8), 0, 0)
    order = EpochOrder.from_plan(plan, TrainSettings(accumulation=1), 0, 4)
    assert order.num_steps == 1
    assert sorted(int(order.places(0, rank)[0]) for rank in range(4)) == [-1, 0, 1, 2]


def test_a_state_of_another_order_is_refused_and_any_step_of_the_same_is_not():
    state = sampler_state(design_case(0), 0, 1, 7, "index")
    assert state == SamplerState(0, 1, 7, "index", state.plan_fingerprint)
    state.check_order(replace(state, step=0))
    with pytest.raises(
        RunError,
        match=r"The checkpoint was made in another order of the data \(index_fingerprint is index, expected other\): "
        r"go on with the cache, settings and numpy version it was made with, or start in a new run_dir\.",
    ):
        state.check_order(replace(state, index_fingerprint="other"))
