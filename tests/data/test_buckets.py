from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.data.buckets import assign_buckets, best_bounds, quantile_bounds, wasted_tokens
from dflash_cache.errors import DataError

MAX_LENGTH = 40
lengths_of_samples = st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=60).map(np.array)


@given(lengths_of_samples, st.integers(1, 8), st.sampled_from([quantile_bounds, best_bounds]))
def test_bounds_ascend_to_the_maximum_and_no_bucket_is_empty(lengths, num_buckets, make_bounds):
    bounds = make_bounds(lengths, num_buckets, MAX_LENGTH)
    assert list(bounds) == sorted(set(bounds))
    assert bounds[-1] == MAX_LENGTH
    assert len(bounds) <= num_buckets
    assert (np.bincount(assign_buckets(lengths, bounds), minlength=len(bounds)) > 0).all()


@given(lengths_of_samples, st.integers(1, 8))
def test_a_sample_is_in_the_first_bucket_that_its_length_fits(lengths, num_buckets):
    bounds = quantile_bounds(lengths, num_buckets, MAX_LENGTH)
    buckets = assign_buckets(lengths, bounds)
    assert buckets.dtype == np.int16
    for length, bucket in zip(lengths, buckets, strict=True):
        assert length <= bounds[bucket]
        assert bucket == 0 or length > bounds[bucket - 1]


def test_quantile_buckets_hold_equally_many_of_distinct_lengths():
    lengths = np.random.default_rng(0).permutation(np.arange(1, 6001))
    bounds = quantile_bounds(lengths, 6, 8192)
    assert bounds == (1000, 2000, 3000, 4000, 5000, 8192)
    assert np.bincount(assign_buckets(lengths, bounds)).tolist() == [1000] * 6


def test_equal_lengths_make_one_bucket():
    assert quantile_bounds(np.full(9, 5), 6, 100) == (100,)
    assert best_bounds(np.full(9, 5), 6, 100) == (100,)


@given(
    st.lists(st.sampled_from([1, 2, 3, 5, 8, 9, 20, 21, 40]), min_size=1, max_size=30).map(np.array), st.integers(1, 5)
)
def test_best_bounds_waste_what_the_best_of_all_bounds_wastes(lengths, num_buckets):
    distinct = np.unique(lengths)[:-1].tolist()
    least = min(
        wasted_tokens(lengths, (*inner, MAX_LENGTH))
        for size in range(min(num_buckets, len(distinct) + 1))
        for inner in combinations(distinct, size)
    )
    assert wasted_tokens(lengths, best_bounds(lengths, num_buckets, MAX_LENGTH)) == least


def waste_least_slowly(lengths, num_buckets):
    """The least waste of at most `num_buckets`, every begin of every bucket tried."""
    distinct, counts = np.unique(lengths, return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)])
    padded = np.concatenate([[0], distinct * before[1:]])
    for _ in range(num_buckets - 1):
        further = [
            min(padded[:end] + distinct[end - 1] * (before[end] - before[:end])) for end in range(1, len(padded))
        ]
        padded = np.array([0, *further])
    return padded[-1] - lengths.sum()


@given(st.integers(0, 2**32), st.integers(1, 8), st.sampled_from([0.2, 1.0, 4.0]))
def test_best_bounds_of_many_lengths_waste_what_the_slow_program_finds(seed, num_buckets, spread):
    generator = np.random.default_rng(seed)
    distinct = generator.choice(np.arange(1, 500), generator.integers(2, 80), replace=False)
    lengths = np.repeat(distinct, np.exp(generator.normal(2, spread, len(distinct))).astype(int).clip(1, 10_000))
    found = wasted_tokens(lengths, best_bounds(lengths, num_buckets, 500))
    assert found == waste_least_slowly(lengths, num_buckets)


def test_wasted_tokens_pad_to_the_longest_member_not_to_the_bound():
    assert wasted_tokens(np.array([2, 3, 7, 9]), (5, 100)) == (3 - 2) + (9 - 7)


def test_no_samples_make_one_bucket():
    nothing = np.zeros(0, np.int32)
    assert quantile_bounds(nothing, 6, 100) == best_bounds(nothing, 6, 100) == (100,)
    assert assign_buckets(nothing, (100,)).shape == (0,)


def test_a_sample_longer_than_the_last_bound_is_refused():
    message = (
        r"A sample of 12 tokens is longer than the last bucket's bound \(10\): raise data.max_length "
        r"\(and the last of data.bucket_bounds\), or drop or truncate it as data.overlong says."
    )
    with pytest.raises(DataError, match=message):
        assign_buckets(np.array([3, 12]), (5, 10))
