import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.drafter.anchors import draw_anchors, make_blocks, pad_anchors


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


def test_every_valid_position_is_drawn_equally_often() -> None:
    mask = np.array([False] * 5 + [True] * 21)
    drawn = np.concatenate([draw_anchors(mask, 5, (0, epoch, 0)) for epoch in range(4000)])
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
