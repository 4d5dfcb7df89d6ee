"""Streaks against all logits of all slots at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.drafter.anchors import make_blocks
from dflash_cache.drafter.head import Head
from dflash_cache.drafter.streak import count_streaks

S, T, A, K, H, V = 2, 20, 6, 3, 8, 5  # so few tokens that many drafts are right


def slow_streaks(states_SABH: torch.Tensor, labels_SAK: torch.Tensor, mask_SAK: torch.Tensor, head: Head) -> list[int]:
    product = states_SABH[:, :, 1:] @ head.weight_VH.T
    logits = (product if head.bias_V is None else product + head.bias_V) * head.scale
    logits = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
    right = (logits.argmax(-1) == labels_SAK) & mask_SAK
    return [[*row, False].index(False) for row in right.flatten(0, 1).tolist()]


@given(st.integers(0, 200), st.sampled_from(["plain", "bias and scale", "cap"]))
def test_a_streak_is_the_number_of_right_drafts_before_the_first_wrong_or_unsupervised_one(
    seed: int, kind: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight_VH = torch.randn(V, H, generator=generator)
    head = {
        "plain": Head(weight_VH),
        "bias and scale": Head(weight_VH, torch.randn(V, generator=generator), scale=0.25),
        "cap": Head(weight_VH, softcap=30.0),
    }[kind]
    ids_ST = torch.randint(0, V, (S, T), generator=generator)
    mask_ST = torch.rand(S, T, generator=generator) < 0.9
    anchors_SA = torch.randint(-1, T, (S, A), generator=generator)
    blocks = make_blocks(ids_ST, mask_ST, anchors_SA, K + 1)
    states_SABH = torch.randn(S, A, K + 1, H, generator=generator)
    right_SAK = torch.rand(S, A, K, generator=generator) < 0.6
    states_SABH[:, :, 1:][right_SAK] = (
        10 * weight_VH[blocks.labels_SAK[right_SAK]]
    )  # mostly their label's own direction
    found = count_streaks(states_SABH, blocks, head)
    assert found.shape == (S, A)
    assert found.flatten().tolist() == slow_streaks(states_SABH, blocks.labels_SAK, blocks.mask_SAK, head)


@pytest.mark.parametrize("num_anchors", [1, 700])
def test_blocks_that_are_all_right_have_a_streak_of_all_their_slots_however_many_they_are(num_anchors: int) -> None:
    """More rows than the head is read for at once."""
    weight_VH = torch.eye(V, H)
    ids_ST = torch.randint(0, V, (1, num_anchors + K), generator=torch.Generator().manual_seed(0))
    blocks = make_blocks(ids_ST, torch.ones_like(ids_ST, dtype=torch.bool), torch.arange(num_anchors)[None], K + 1)
    states_SABH = torch.cat([torch.zeros(1, num_anchors, 1, H), weight_VH[blocks.labels_SAK]], dim=2)
    assert count_streaks(states_SABH, blocks, Head(weight_VH)).tolist() == [[K] * num_anchors]
