from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.data.mixing import count_buckets, find_runs, measure_mix
from dflash_cache.data.plan import interleave_buckets, step_bounds


def test_figures_of_two_steps_are_those_calculated_by_hand():
    figures = measure_mix(np.array([0, 0, 0, 1, 0, 1, 1, 1]), np.array([0, 4, 8]), 2, efficiency=0.75)
    distance = 0.75 * log(0.75 / 0.5) + 0.25 * log(0.25 / 0.5)
    assert figures.counts_nK.tolist() == [[3, 1], [1, 3]]
    assert figures.kl_n == pytest.approx([distance, distance])
    assert figures.to_dict() == {
        "num_steps": 2,
        "num_micro_batches": 8,
        "shares": [0.5, 0.5],
        "kl_mean": pytest.approx(distance),
        "kl_max": pytest.approx(distance),
        "max_deviation": 1.0,
        "longest_run": 3,
        "longest_run_by_bucket": [3, 3],
        "runs": {1: 2, 3: 2},
        "missing_share": 0.0,
        "single_share": 0.0,
        "efficiency": 0.75,
    }


def test_steps_of_one_bucket_are_far_from_the_whole_and_miss_the_other():
    figures = measure_mix(np.array([0, 0, 1, 1]), np.array([0, 2, 4]), 3)
    assert figures.kl_n == pytest.approx([log(2), log(2)])
    assert figures.missing_share == 1.0
    assert figures.single_share == 1.0
    assert figures.longest_run_K.tolist() == [2, 2, 0]


def test_a_bucket_too_rare_for_every_step_is_not_missed():
    figures = measure_mix(np.array([0, 0, 0, 1]), np.array([0, 2, 4]), 2)
    assert figures.missing_share == 0.0


def test_no_micro_batches_have_figures():
    figures = measure_mix(np.zeros(0, np.int16), np.array([0]), 3).to_dict()
    assert figures["kl_mean"] == figures["longest_run"] == figures["num_steps"] == 0


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.integers(1, 12))
def test_counts_and_runs_are_those_of_a_slow_count(buckets, step_size):
    bounds = step_bounds(len(buckets), step_size)
    counts = count_buckets(np.array(buckets), bounds, 5)
    for s, row in enumerate(counts.tolist()):
        assert row == [buckets[bounds[s] : bounds[s + 1]].count(bucket) for bucket in range(5)]
    bucket_R, length_R = find_runs(np.array(buckets))
    assert np.repeat(bucket_R, length_R).tolist() == buckets
    assert (np.diff(bucket_R) != 0).all()


def test_the_interleaved_list_is_nearer_to_its_mix_than_a_permutation():
    generator = np.random.default_rng(0)
    counts = np.array([300, 220, 160, 120, 80, 60, 40, 20]) * 16
    bounds = step_bounds(counts.sum(), 64)
    sequence = interleave_buckets(counts, generator)
    assert measure_mix(sequence, bounds, 8).kl_n.mean() < 0.006
    assert measure_mix(generator.permutation(sequence), bounds, 8).kl_n.mean() > 0.05
