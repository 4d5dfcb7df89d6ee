from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cache.data.mixing import longest_runs
from dflash_cache.data.plan import (
    BatchLimits,
    count_micro_batches,
    decode_plan,
    encode_plan,
    interleave_buckets,
    plan_epoch,
    plan_fingerprint,
    plan_jobs,
    step_bounds,
)
from dflash_cache.errors import RunError

seeds = st.integers(0, 2**40)
bucket_counts = st.lists(st.integers(0, 60), min_size=1, max_size=7).filter(any).map(np.array)
orders = st.sampled_from(["interleaved", "shuffled", "sequential"])
limits_of_batches = st.builds(BatchLimits, st.integers(1, 300), st.integers(1, 12), orders)


@st.composite
def corpora(draw):
    """Lengths up to 60 in buckets that end at 10, 20, … 60."""
    lengths = np.array(draw(st.lists(st.integers(1, 60), max_size=150)), np.int32)
    return lengths, ((lengths - 1) // 10).astype(np.int16)


def cut_slowly(lengths, limits):
    """Sizes of the greedy micro-batches, sample after sample."""
    sizes, batch = [], []
    for length in lengths:
        grown = [*batch, length]
        if batch and (max(grown) * len(grown) > limits.token_budget or len(grown) > limits.max_samples):
            sizes.append(len(batch))
            grown = [length]
        batch = grown
    return [*sizes, len(batch)] if batch else sizes


@given(corpora(), limits_of_batches, seeds, st.integers(0, 50))
def test_every_sample_is_once_in_a_micro_batch_of_its_bucket_within_the_limits(corpus, limits, seed, epoch):
    lengths, buckets = corpus
    plan = plan_epoch(lengths, buckets, limits, seed, epoch)
    assert np.sort(plan.rows).tolist() == list(range(len(lengths)))
    for i in range(plan.num_micro_batches):
        rows = plan.rows_of(i)
        padded = lengths[rows].max() * len(rows)
        assert set(buckets[rows]) == {plan.bucket[i]}
        assert plan.tokens[i] == lengths[rows].sum()
        assert plan.padded_tokens[i] == padded
        assert padded <= limits.token_budget or len(rows) == 1
        assert len(rows) <= limits.max_samples


@given(corpora(), limits_of_batches, seeds)
def test_micro_batches_are_as_large_as_a_greedy_cut_makes_them(corpus, limits, seed):
    lengths, _ = corpus
    one_bucket = np.zeros(len(lengths), np.int16)
    plan = plan_epoch(lengths, one_bucket, BatchLimits(limits.token_budget, limits.max_samples, "sequential"), seed, 0)
    assert np.diff(plan.begin).tolist() == cut_slowly(lengths[plan.rows].tolist(), limits)


@given(corpora(), st.integers(1, 300), seeds)
def test_every_sample_is_once_in_a_job_of_its_bucket_sorted_by_length(corpus, token_budget, seed):
    lengths, buckets = corpus
    jobs = plan_jobs(lengths, buckets, token_budget, seed)
    assert np.sort(jobs.samples).tolist() == list(range(len(lengths)))
    for j in range(jobs.num_jobs):
        members = jobs.samples_of(j)
        assert set(buckets[members]) == {jobs.bucket[j]}
        assert (np.diff(lengths[members]) >= 0).all()
        assert len(members) == 1 or lengths[members].max() * len(members) <= token_budget


@given(bucket_counts, seeds)
@settings(max_examples=300)
def test_any_window_is_within_two_of_every_share_and_within_one_of_the_largest(counts, seed):
    sequence = interleave_buckets(counts, np.random.default_rng(seed))
    num_places, num_buckets = counts.sum(), len(counts)
    assert np.bincount(sequence, minlength=num_buckets).tolist() == counts.tolist()
    held = np.cumsum(np.eye(num_buckets, dtype=int)[np.concatenate([sequence, sequence])], 0)  # also around the end
    # in units of 1 / num_places, to stay with integers; over windows, the largest difference of prefixes
    ahead = held * num_places - np.arange(1, len(held) + 1)[:, None] * counts
    spread = ahead.max(0) - ahead.min(0)
    assert (spread < 2 * num_places).all()
    assert spread[counts.argmax()] < num_places


@given(bucket_counts, seeds)
@settings(max_examples=300)
def test_no_run_is_over_three_unless_one_bucket_has_more_than_three_quarters(counts, seed):
    sequence = interleave_buckets(counts, np.random.default_rng(seed))
    runs = longest_runs(sequence, len(counts))
    if 4 * counts.max() <= 3 * counts.sum():
        assert runs.max() <= 3
    else:  # the largest's places in as many equal parts as there are others (no order needs fewer than others + 1)
        others = counts.sum() - counts.max()
        assert runs.max() <= -(-counts.max() // max(1, others))


@given(bucket_counts, st.integers(2, 20), seeds)
@settings(max_examples=300)
def test_no_step_is_of_one_bucket_while_another_has_a_fifth_of_the_list(counts, step_size, seed):
    sequence = interleave_buckets(counts, np.random.default_rng(seed))
    enough = 4 if 4 * counts.max() <= 3 * counts.sum() else 5
    second = np.sort(counts)[-2] if len(counts) > 1 else 0
    bounds = step_bounds(len(sequence), step_size)
    for begin, end in pairwise(bounds):
        if end - begin >= enough and 5 * second >= len(sequence):
            assert len(set(sequence[begin:end])) > 1


@given(st.integers(0, 500), st.integers(1, 40))
def test_steps_are_as_few_as_fit_and_their_sizes_differ_by_at_most_one(num_micro_batches, step_size):
    bounds = step_bounds(num_micro_batches, step_size)
    assert bounds[0] == 0
    assert bounds[-1] == num_micro_batches
    assert len(bounds) - 1 == -(-num_micro_batches // step_size)
    sizes = np.diff(bounds)
    if len(sizes):
        assert 0 < sizes.min() <= sizes.max() <= min(step_size, sizes.min() + 1)


@pytest.mark.parametrize("order", ["interleaved", "shuffled"])
def test_same_seed_same_order_and_other_seed_or_epoch_other_order(order):
    lengths = np.random.default_rng(0).integers(1, 60, 300)
    buckets = (lengths - 1) // 10

    def fingerprint(seed, epoch):
        return plan_fingerprint(plan_epoch(lengths, buckets, BatchLimits(200, 8, order), seed, epoch))

    assert fingerprint(1, 2) == fingerprint(1, 2)
    assert len({fingerprint(1, 2), fingerprint(1, 3), fingerprint(2, 2), fingerprint(2, 1)}) == 4


def test_sequential_takes_bucket_after_bucket():
    lengths = np.random.default_rng(0).integers(1, 60, 300)
    plan = plan_epoch(lengths, (lengths - 1) // 10, BatchLimits(200, 8, "sequential"), 0, 0)
    assert (np.diff(plan.bucket) >= 0).all()


def test_a_sample_is_anywhere_in_the_epoch_with_the_same_probability():
    lengths = np.array([50] + [5] * 40 + [15] * 70)  # the first is alone in its bucket: its place is the rotation
    buckets = (lengths - 1) // 10
    places = {0: [], 7: [], 60: []}
    for seed in range(1000):
        plan = plan_epoch(lengths, buckets, BatchLimits(60, 4), seed, 0)
        for sample, found in places.items():
            place = np.searchsorted(plan.begin, np.flatnonzero(plan.rows == sample)[0], "right") - 1
            found.append(10 * place // plan.num_micro_batches)
    for found in places.values():
        tenths = np.bincount(found, minlength=10)
        # 1 + 10 + 18 micro-batches: a tenth of the epoch is 2 or 3 of 29 places; 27.9: chi-square's 99.9 % of 9
        expected = 1000 * np.bincount(10 * np.arange(29) // 29) / 29
        assert ((tenths - expected) ** 2 / expected).sum() < 27.9


def test_two_epochs_share_no_more_pairs_of_samples_than_chance():
    lengths = np.full(4000, 10)

    def pairs(epoch):
        plan = plan_epoch(lengths, np.zeros(4000, int), BatchLimits(100, 10), 0, epoch)
        groups = np.sort(plan.rows.reshape(400, 10), 1)
        first, second = np.triu_indices(10, 1)
        return set((groups[:, first] * 4000 + groups[:, second]).ravel().tolist())

    expected = 400 * 45 * 9 / 3999  # a sample has 9 partners of 3999 in each epoch
    assert len(pairs(0) & pairs(1)) < expected + 5 * expected**0.5


@given(corpora(), limits_of_batches, seeds)
@settings(max_examples=30)
def test_a_decoded_plan_is_the_encoded_one(corpus, limits, seed):
    plan = plan_epoch(*corpus, limits, seed, 0)
    decoded = decode_plan(encode_plan(plan))
    for field in fields(plan):
        expected, found = getattr(plan, field.name), getattr(decoded, field.name)
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist()
    assert plan_fingerprint(decoded) == plan_fingerprint(plan)


def test_a_damaged_list_is_refused():
    data = encode_plan(plan_epoch(np.array([3, 4]), np.array([0, 0]), BatchLimits(8, 8), 0, 0))
    with pytest.raises(RunError, match=r"The epoch's list is damaged \(.*\): remove the file, `dflash train` writes"):
        decode_plan(data[: len(data) // 2])


@given(corpora(), limits_of_batches, seeds, st.integers(0, 50))
def test_micro_batches_are_counted_without_being_ordered(corpus, limits, seed, epoch):
    count = count_micro_batches(*corpus, limits, seed, epoch)
    assert count == plan_epoch(*corpus, limits, seed, epoch).num_micro_batches
