import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.drafter.anchors import draw_anchors, make_blocks, pad_anchors, share_anchors


@given(mask=st.lists(st.booleans(), min_size=1, max_size=60), count=st.integers(1, 20), seed=st.integers(0, 99))
def test_anchors_are_distinct_ascending_and_have_a_supervised_label(mask, count, seed) -> None:
    anchors = draw_anchors(np.array(mask), count, (seed, 0, 0)).tolist()
    possible = [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]
    assert anchors == sorted(set(anchors))
    assert set(anchors) <= set(possible)
    assert len(anchors) == min(count, len(possible))


def test_draws_depend_on_seed_epoch_and_sample_and_nothing_else() -> None:
    mask = np.ones(200, dtype=bool)
    draws = {key: tuple(draw_anchors(mask, 9, key)) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]}
    assert len(set(draws.values())) == 4
    assert tuple(draw_anchors(mask, 9, (0, 1, 0))) == draws[0, 1, 0]


@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=60),
    count=st.integers(1, 20),
    bounds=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    seed=st.integers(0, 99),
)
def test_a_bound_takes_a_part_of_the_samples_own_draw_and_a_larger_one_more_of_it(mask, count, bounds, seed) -> None:
    array = np.array(mask)
    whole = draw_anchors(array, count, (seed, 0, 0)).tolist()
    fewer, more = (draw_anchors(array, count, (seed, 0, 0), bound).tolist() for bound in sorted(bounds))
    assert set(fewer) <= set(more) <= set(whole)
    assert [len(fewer), len(more)] == [min(len(whole), bound) for bound in sorted(bounds)]
    assert fewer == sorted(fewer)


@given(num_samples=st.integers(1, 200), per_sample=st.integers(1, 300))
def test_equal_shares_padding_counted_fit_the_bound_and_no_larger_ones_would(num_samples, per_sample) -> None:
    for max_anchors in (num_samples * per_sample, num_samples * per_sample + num_samples - 1):
        assert share_anchors(max_anchors, num_samples) == per_sample


@pytest.mark.parametrize("at_most", [None, 5])
def test_every_valid_position_is_drawn_equally_often(at_most) -> None:
    mask = np.array([False] * 5 + [True] * 21)
    count = 5 if at_most is None else 40
    drawn = np.concatenate([draw_anchors(mask, count, (0, epoch, 0), at_most) for epoch in range(4000)])
    counts = np.bincount(drawn, minlength=26)[5:25]
    assert counts.sum() == 20_000
    assert abs(counts - 1000).max() < 5 * 1000**0.5


def test_labels_stop_at_the_first_unsupervised_slot_and_at_the_samples_end() -> None:
    ids = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 0, 0, 0]])
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()
    blocks = make_blocks(ids, mask, pad_anchors([np.array([1, 4]), np.array([0])]), block_size=4)
    assert blocks.tokens_SA.tolist() == [[11, 14], [20, 20]]
    assert blocks.mask_SAK.tolist() == [
        [[True, False, False], [True, False, False]],
        [[True, True, False], [False, False, False]],  # the second is padding: no such block
    ]
    assert blocks.labels_SAK.tolist() == [[[12, 0, 0], [15, 0, 0]], [[21, 22, 0], [0, 0, 0]]]
