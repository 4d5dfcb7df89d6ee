"""Position weights: how much each slot of a block counts in the loss (DESIGN.md, "The drafter and its objective").

With m_k = 1 where slot k is supervised (and all before it), CE_k its cross-entropy, p_k = exp(−CE_k) detached:

    uniform   m_k
    decay     exp(−(k−1)/gamma) · m_k                                              paper, appendix A.1
    streak    exp(−(k−1)/gamma) · Π_{i<k} [(1−alpha)·p_i + alpha] · m_k            this project's own definition
    dpace     Σ_{m≥k} Π_{i≤m} [(1−alpha)·p_i + alpha] over supervised slots        D-PACE, arXiv 2605.18810

The last two look at the whole block, so weights are computed for whole blocks at a time. No gradient flows
through a weight.
"""

from bisect import bisect_left

import torch
from torch import Tensor

from dflash_cache.config.settings import ObjectiveSettings

# gamma by block size (paper, appendix A.1); too small a gamma caps the acceptance length (FIELD.md).
DECAY_GAMMAS = {8: 4.0, 10: 5.0, 16: 7.0}
STREAK_GAMMA = 10.0


def gamma_of(settings: ObjectiveSettings, block_size: int) -> float:
    """The gamma that holds: the setting's, or the default for this kind of weights and this block size."""
    if settings.gamma is not None:
        return settings.gamma
    return STREAK_GAMMA if settings.weights == "streak" else decay_gamma(block_size)


def decay_gamma(block_size: int) -> float:
    """The paper's gamma, linear between its block sizes and constant outside them."""
    sizes = sorted(DECAY_GAMMAS)
    right = min(max(bisect_left(sizes, block_size), 1), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    share = min(max((block_size - low) / (high - low), 0.0), 1.0)
    return DECAY_GAMMAS[low] + share * (DECAY_GAMMAS[high] - DECAY_GAMMAS[low])


def weigh_slots(ce_NK: Tensor, mask_NK: Tensor, settings: ObjectiveSettings) -> Tensor:
    """Weights (N, K) float32 of slots k = 1…K of N blocks; 0 where unsupervised.

    `ce_NK` are detached cross-entropies in nats (any value where unsupervised), `mask_NK` is bool and, in each
    row, True up to the first unsupervised slot.
    """
    supervised_NK = mask_NK.float()
    if settings.weights == "uniform":
        return supervised_NK
    K = mask_NK.shape[1]
    if settings.weights == "decay":
        return supervised_NK * _decay(K, gamma_of(settings, K + 1), mask_NK.device)
    probability_NK = torch.exp(-ce_NK.float()).masked_fill(~mask_NK, 0.0)
    if settings.weights == "streak":
        factor_NK = (1 - settings.streak_alpha) * probability_NK + settings.streak_alpha
        before_NK = torch.cat([torch.ones_like(factor_NK[:, :1]), factor_NK[:, :-1]], dim=1).cumprod(1)
        return supervised_NK * before_NK * _decay(K, gamma_of(settings, K + 1), mask_NK.device)
    factor_NK = (1 - settings.dpace_alpha) * probability_NK + settings.dpace_alpha
    streak_NK = factor_NK.cumprod(1) * supervised_NK
    return streak_NK.flip(1).cumsum(1).flip(1) * supervised_NK


def _decay(num_slots: int, gamma: float, device: torch.device) -> Tensor:
    return torch.exp(-torch.arange(num_slots, device=device, dtype=torch.float32) / gamma)
