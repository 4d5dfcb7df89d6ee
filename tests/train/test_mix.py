from itertools import pairwise
from math import log

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.cache.reader import Batch
from dflash_cache.data.mixing import find_runs, measure_mix
from dflash_cache.data.plan import step_bounds
from dflash_cache.drafter.anchors import pad_anchors
from dflash_cache.train.mix import EpochMix, tabulate_step
from dflash_cache.train.stream import MicroBatch

NUM_BUCKETS = 4


def micro_batch(bucket: int, lengths: list[int]) -> MicroBatch:
    S, T = len(lengths), max(lengths)
    ids, mask = torch.zeros(S, T, dtype=torch.int64), torch.zeros(S, T, dtype=torch.bool)
    batch = Batch(torch.arange(S), torch.tensor(lengths), ids, mask, torch.zeros(S, T, 1, 1))
    return MicroBatch(batch, pad_anchors([np.zeros(0, np.int64)] * S), bucket)


def tables(buckets: list[int], bounds: np.ndarray) -> list[np.ndarray]:
    return [
        tabulate_step(end - begin, enumerate(micro_batch(bucket, [3]) for bucket in buckets[begin:end]))
        for begin, end in pairwise(bounds.tolist())
    ]


lists = st.lists(st.integers(0, NUM_BUCKETS - 1), min_size=1, max_size=60)


def test_the_figures_of_a_step_are_those_counted_by_hand() -> None:
    step = [micro_batch(1, [4, 3]), micro_batch(0, [2]), micro_batch(1, [5, 5, 1]), micro_batch(1, [4])]
    mix = EpochMix(np.array([1, 0, 1, 1, 0, 0, 0, 0]), 0, 3)
    assert mix.add(tabulate_step(4, enumerate(step))) == {
        "micro_batches": 4,
        "samples": 7,
        "tokens": 7 + 2 + 11 + 4,
        "padding_efficiency": 24 / (8 + 2 + 15 + 4),
        "mean_length": 24 / 7,
        "max_length": 5,
        "kl": pytest.approx(1 / 4 * log(1 / 4 / (5 / 8)) + 3 / 4 * log(3 / 4 / (3 / 8))),
        "longest_run": 2,
        "bucket_0_pct": 25.0,
        "bucket_1_pct": 75.0,
        "bucket_2_pct": 0.0,
        "bucket_0_running_pct": 25.0,
        "bucket_1_running_pct": 75.0,
        "bucket_2_running_pct": 0.0,
    }
    four_more = [micro_batch(0, [1])] * 4
    figures = mix.add(tabulate_step(4, enumerate(four_more)))
    assert (figures["bucket_0_running_pct"], figures["bucket_1_running_pct"]) == (62.5, 37.5)


@given(lists, st.integers(1, 9))
def test_what_is_measured_step_by_step_is_what_is_measured_of_the_whole_epoch(buckets: list[int], size: int) -> None:
    bounds = step_bounds(len(buckets), size)
    whole = measure_mix(np.array(buckets), bounds, NUM_BUCKETS)
    mix = EpochMix(np.array(buckets), 0, NUM_BUCKETS)
    found = [mix.add(table) for table in tables(buckets, bounds)]
    assert [figures["kl"] for figures in found] == pytest.approx(whole.kl_n.tolist())
    shares = np.array([[figures[f"bucket_{k}_pct"] for k in range(NUM_BUCKETS)] for figures in found])
    assert shares * np.diff(bounds)[:, None] == pytest.approx(100 * whole.counts_nK)
    assert [found[-1][f"bucket_{k}_running_pct"] for k in range(NUM_BUCKETS)] == pytest.approx(100 * whole.share_K)
    assert max(figures["longest_run"] for figures in found) == whole.longest_run


@given(lists, st.integers(1, 9), st.data())
def test_a_run_counts_in_every_step_that_it_reaches_into_with_what_it_had_before(
    buckets: list[int], size: int, data: st.DataObject
) -> None:
    bounds = step_bounds(len(buckets), size)
    begin = data.draw(st.integers(0, len(bounds) - 2))
    mix = EpochMix(np.array(buckets), int(bounds[begin]), NUM_BUCKETS)  # as a resumed run begins
    begins = np.concatenate([[0], np.cumsum(find_runs(np.array(buckets))[1])]).tolist()
    for step in range(begin, len(bounds) - 1):
        first, end = bounds[step], bounds[step + 1]
        reaching = [min(b, end) - a for a, b in pairwise(begins) if b > first and a < end]
        table = tables(buckets, bounds)[step]
        assert mix.add(table)["longest_run"] == max(reaching)


@given(lists, st.integers(1, 4), st.randoms())
def test_the_tables_of_all_ranks_add_up_to_the_step(buckets: list[int], num_ranks: int, random) -> None:
    parts = list(enumerate(micro_batch(bucket, [i % 5 + 1]) for i, bucket in enumerate(buckets)))
    owner = [random.randrange(num_ranks) for _ in parts]
    shares = [[part for part, rank in zip(parts, owner, strict=True) if rank == mine] for mine in range(num_ranks)]
    summed = sum(tabulate_step(len(parts), share) for share in shares)
    assert np.array_equal(summed, tabulate_step(len(parts), parts))


@pytest.mark.parametrize("times", [0, 2])
def test_a_place_that_no_rank_or_two_ranks_trained_is_our_mistake(times: int) -> None:
    table = tabulate_step(2, [(0, micro_batch(0, [3]))])
    table[1] = times * table[0]
    with pytest.raises(AssertionError, match="a place of the step was trained by no rank, or by several"):
        EpochMix(np.array([0, 0]), 0, 1).add(table)


@given(lists, lists, st.integers(1, 9))
def test_a_run_goes_on_from_one_epoch_into_the_next_and_shares_begin_anew(
    first: list[int], second: list[int], size: int
) -> None:
    before = EpochMix(np.array(first), len(first), NUM_BUCKETS).last_run
    mix = EpochMix(np.array(second), 0, NUM_BUCKETS, before)
    found = [mix.add(table) for table in tables(second, step_bounds(len(second), size))]
    bucket_R, length_R = find_runs(np.array(first + second))
    ends = np.cumsum(length_R)
    assert max(figures["longest_run"] for figures in found) == length_R[ends > len(first)].max()
    assert mix.last_run == (bucket_R[-1], length_R[-1])
    shares = 100 * np.bincount(second, minlength=NUM_BUCKETS) / len(second)
    assert [found[-1][f"bucket_{k}_running_pct"] for k in range(NUM_BUCKETS)] == pytest.approx(shares)
