"""Anchors: the positions from which blocks are drafted in training, drawn anew for every sample and epoch.

An anchor is a supervised position whose successor is supervised too: at inference the anchor is always one of
the target's own tokens, and a block without a single label teaches nothing. Blocks may run past the end of
the answer; their supervision stops at the first unsupervised slot. Draws depend on (seed, epoch, sample)
alone, so that resuming, other batches and other ranks draw the same (paper, section 4.2: random anchors give
5.64 against 4.94 for fixed blocks). A micro-batch may be bound in its anchors: each sample then takes the first few of
its own draw, so that what it gives up depends on no other sample's.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """The blocks of one micro-batch; a sample with fewer anchors than others is padded with unsupervised blocks.

    anchors_SA: int64 positions; tokens_SA: the anchors' tokens; labels_SAK: tokens at anchor + k, k = 1…B−1
    (0 where unsupervised); mask_SAK: True where slot k is supervised.
    """

    anchors_SA: Tensor
    tokens_SA: Tensor
    labels_SAK: Tensor
    mask_SAK: Tensor


def draw_anchors(
    loss_mask_T: np.ndarray, count: int, seed: tuple[int, int, int], at_most: int | None = None
) -> np.ndarray:
    """At most `count` distinct anchors of one sample, ascending; `seed` is (seed, epoch, sample).

    Under a bound `at_most` they are a part of the same draw: the larger bound's anchors hold the smaller one's.
    """
    supervised = np.asarray(loss_mask_T, dtype=bool)
    valid = np.flatnonzero(supervised[:-1] & supervised[1:])
    at_most = count if at_most is None else min(count, at_most)
    if len(valid) <= at_most:
        return valid
    drawn = np.random.default_rng(seed).choice(valid, size=min(count, len(valid)), replace=False)  # in random order
    return np.sort(drawn[:at_most])


def share_anchors(max_anchors: int | None, num_samples: int) -> int | None:
    """Anchors a sample of a micro-batch with at most `max_anchors`, those that only pad it counted: equal shares.

    Memory and work grow with samples × the most anchors of one of them, so what a short sample leaves over would cost
    the others' padding, not fill it.
    """
    return None if max_anchors is None else max_anchors // num_samples


def pad_anchors(anchors: list[np.ndarray]) -> Tensor:
    """One array of anchors a sample as (S, A) int64, padded with -1; A is 1 at least."""
    padded_SA = np.full((len(anchors), max(1, *(len(row) for row in anchors))), -1, dtype=np.int64)
    for s, row in enumerate(anchors):
        padded_SA[s, : len(row)] = row
    return torch.from_numpy(padded_SA)


def make_blocks(input_ids_ST: Tensor, loss_mask_ST: Tensor, padded_SA: Tensor, block_size: int) -> Blocks:
    """Labels and supervision of the blocks at `pad_anchors`' anchors of a padded micro-batch, on its device."""
    T = input_ids_ST.shape[1]
    anchors_SA, real_SA = padded_SA.clamp(min=0), padded_SA >= 0
    positions_SAK = anchors_SA[..., None] + torch.arange(1, block_size, device=padded_SA.device)
    inside_SAK = positions_SAK < T
    flat = positions_SAK.clamp(max=T - 1).flatten(1)
    supervised_SAK = loss_mask_ST.gather(1, flat).view_as(inside_SAK) & inside_SAK & real_SA[..., None]
    mask_SAK = supervised_SAK.long().cumprod(-1).bool()
    labels_SAK = input_ids_ST.gather(1, flat).view_as(inside_SAK) * mask_SAK
    return Blocks(anchors_SA, input_ids_ST.gather(1, anchors_SA), labels_SAK, mask_SAK)
