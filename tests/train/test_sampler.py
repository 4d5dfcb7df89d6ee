from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cache.config.settings import TrainSettings
from dflash_cache.data.mixing import count_buckets, longest_runs, measure_mix
from dflash_cache.data.plan import BatchLimits, interleave_buckets, plan_epoch, plan_jobs, step_bounds
from dflash_cache.train.sampler import EpochOrder, buffer_fill, deal_step, order_fingerprint, pull_order

seeds = st.integers(0, 2**40)
buffers = st.integers(0, 24)
step_sizes = st.integers(1, 16)
limits_of_batches = st.builds(BatchLimits, st.integers(1, 300), st.integers(1, 12))


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
@settings(max_examples=30)
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


def test_the_fingerprint_is_the_orders_on_any_number_of_ranks_and_changes_with_list_pull_and_steps():
    def fingerprint(seed=0, world_size=1, **changes):
        plan = design_case(seed)
        return order_fingerprint(plan, EpochOrder.from_plan(plan, TrainSettings(**changes), 0, world_size))

    same = {
        fingerprint(accumulation=8),
        fingerprint(accumulation=4, world_size=2),
        fingerprint(accumulation=8, epochs=9),
    }
    assert len(same) == 1
    others = {
        fingerprint(seed=1, accumulation=8),
        fingerprint(accumulation=8, seed=0, min_buffer=11),
        fingerprint(accumulation=9),
    }
    assert len(others | same) == 4


@given(lists_of_buckets(), step_sizes, buffers, seeds)
def test_the_buffer_holds_what_it_must_and_never_more_than_its_size_or_the_rest_of_the_step(
    buckets, step_size, min_buffer, seed
):
    bounds = step_bounds(len(buckets), step_size)
    order = pull_order(buckets, bounds, min_buffer, seed)
    fill = buffer_fill(order, min_buffer)
    for pull, (held, rank) in enumerate(zip(fill.tolist(), ranks_pulled(order), strict=True)):
        left_in_epoch = len(buckets) - pull
        left_in_step = bounds[np.searchsorted(bounds, pull, "right")] - pull
        assert rank < held <= left_in_epoch
        assert min(max(1, min_buffer), left_in_epoch) <= held <= max(1, min_buffer, left_in_step)


@st.composite
def corpora(draw):
    """Lengths up to 60 in buckets that end at 10, 20, … 60."""
    lengths = np.array(draw(st.lists(st.integers(1, 60), min_size=1, max_size=150)), np.int32)
    return lengths, ((lengths - 1) // 10).astype(np.int16)


@given(corpora(), limits_of_batches, st.integers(1, 5), st.integers(1, 4), buffers, st.integers(0, 99))
@settings(max_examples=200)
def test_from_lengths_to_ranks_all_the_properties_of_the_design_hold(
    corpus, limits, accumulation, world_size, min_buffer, seed
):
    lengths, buckets = corpus
    options = TrainSettings(accumulation=accumulation, min_buffer=min_buffer, seed=seed)
    plan = plan_epoch(lengths, buckets, limits, seed, 2)
    order = EpochOrder.from_plan(plan, options, 2, world_size)
    share = np.bincount(plan.bucket, minlength=6) / plan.num_micro_batches
    seen, pulled = [], []
    for step in range(order.num_steps):
        dealt = [order.places(step, rank) for rank in range(world_size)]
        assert {len(places) for places in dealt} == {accumulation}
        places = np.concatenate(dealt)
        places = places[places >= 0]
        assert len(places) <= accumulation * world_size
        seen += [sample for place in places for sample in plan.rows_of(place).tolist()]
        in_step = plan.bucket[order.step(step)]
        pulled += in_step.tolist()
        held = np.bincount(in_step, minlength=6)
        assert np.array_equal(held, np.bincount(plan.bucket[places], minlength=6))
        assert np.abs(held - len(places) * share).max() < 2
        if len(places) >= (4 if share.max() <= 0.75 else 5) and np.sort(share)[-2] >= 0.2:
            assert np.count_nonzero(held) > 1
    assert sorted(seen) == list(range(len(lengths)))
    if share.max() <= 0.75:
        assert longest_runs(np.array(pulled), 6).max() <= 3


@given(st.integers(0, 2**40), st.integers(0, 2**40), buffers)
@settings(max_examples=30)
def test_same_seed_same_epoch_and_other_seed_other_epoch(one, other, min_buffer):
    def samples(seed):
        plan = design_case(seed)
        order = pull_order(plan.bucket, step_bounds(plan.num_micro_batches, 8), min_buffer, seed)
        return np.concatenate([plan.rows_of(place) for place in order[:40]]).tolist()

    assert samples(one) == samples(one)
    assert (samples(one) == samples(other)) == (one == other)


def pulled_places(plan, seed, step_size=8, min_buffer=10):
    """For each sample, at which place of the epoch its micro-batch is pulled."""
    order = pull_order(plan.bucket, step_bounds(plan.num_micro_batches, step_size), min_buffer, seed)
    place_of = np.empty(len(order), np.int64)
    place_of[order] = np.arange(len(order))
    places = np.empty(len(plan.rows), np.int64)
    places[plan.rows] = np.repeat(place_of, np.diff(plan.begin))
    return places


def test_the_step_of_a_batch_is_uniform_over_seeds():
    # one sample a micro-batch, so that a batch is the same one for every seed; buckets of 1, 12, 40 and 67 of 120.
    # Inside its step, where order does not change the gradient, a batch of a rare bucket comes last more often.
    lengths = np.repeat([10, 20, 30, 40], [1, 12, 40, 67])
    followed = [0, 1, 12, 13, 52, 53, 119]
    times = np.zeros((len(followed), 15))
    for seed in range(2400):
        places = pulled_places(plan_epoch(lengths, lengths // 10 - 1, BatchLimits(40, 1), seed, 0), seed)
        times[np.arange(len(followed)), places[followed] // 8] += 1
    # each is about 160 times in each of 15 steps; 41: chi-square's 99.98 % of 14, so 0.14 % for all seven together
    assert ((times - 160) ** 2 / 160).sum(1).max() < 41


def test_two_epochs_share_no_more_pairs_of_neighbours_than_chance():
    lengths = np.repeat([10, 20, 30, 40], [30, 60, 90, 120])
    buckets = lengths // 10 - 1
    size = np.bincount(buckets)

    def neighbours(epoch):
        plan = plan_epoch(lengths, buckets, BatchLimits(40, 1), 0, epoch)
        sequence = np.argsort(pulled_places(plan, (0, epoch)))
        return np.sort(np.stack([sequence[:-1], sequence[1:]], 1), 1)

    shared = expected = 0.0
    before = neighbours(0)
    for epoch in range(1, 60):
        after = neighbours(epoch)
        shared += len(set(map(tuple, before.tolist())) & set(map(tuple, after.tolist())))
        # given which buckets are side by side how often, chance pairs each of their members with equal probability
        for a in range(4):
            for b in range(a, 4):
                possible = size[a] * (size[a] - 1) / 2 if a == b else size[a] * size[b]
                counts = [np.all(buckets[pairs] == (a, b), axis=1).sum() for pairs in (before, after)]
                expected += counts[0] * counts[1] / possible
        before = after
    # a sum of rare events, nearly Poisson: within four deviations of chance
    assert abs(shared - expected) < 4 * expected**0.5


def test_no_two_random_streams_of_a_seed_are_the_same(monkeypatch):
    made = []
    seed_sequence = np.random.SeedSequence

    def record(entropy, spawn_key=()):
        made.append((entropy, tuple(int(key) for key in spawn_key)))
        return seed_sequence(entropy, spawn_key=spawn_key)

    monkeypatch.setattr(np.random, "SeedSequence", record)
    lengths = np.repeat([10, 20, 30], 20)
    plan = plan_epoch(lengths, lengths // 10 - 1, BatchLimits(60, 2), 7, 0)
    plan_jobs(lengths, lengths // 10 - 1, 60, 7)
    EpochOrder.from_plan(plan, TrainSettings(seed=7), 0)
    assert len(made) == 3 + 1 + 1 + 1  # each bucket's cut, the list, the jobs, the pull
    assert {entropy for entropy, _ in made} == {(7, 0)}
    assert len({key for _, key in made}) == len(made)


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=40), st.integers(1, 8), st.integers(0, 5))
def test_no_rank_makes_more_passes_than_it_must_and_each_gets_the_longest_left_when_it_has_least(
    tokens, world_size, spare
):
    most = -(-len(tokens) // world_size)
    dealt = deal_step(np.array(tokens), world_size, most + spare)
    counts = [int((places >= 0).sum()) for places in dealt]
    assert max(counts) == most
    if len(tokens) == most * world_size:
        assert counts == [most] * world_size
    slow = [[] for _ in range(world_size)]
    for place in sorted(range(len(tokens)), key=lambda place: (-tokens[place], place)):
        room = [mine for mine in slow if len(mine) < most]
        min(room, key=lambda mine: sum(tokens[i] for i in mine)).append(place)
    assert [places[places >= 0].tolist() for places in dealt] == [sorted(mine) for mine in slow]
