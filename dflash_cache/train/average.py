"""A moving average of the weights, which is smoother than any one step's: what is validated, exported and measured.

average ← d · average + (1 − d) · weights after every step that moved them, with d = min(decay, (1 + t) / (10 + t)) at
step t (from 0), as in tf.train.ExponentialMovingAverage: with the full decay from the start, a short run's average
would be mostly its starting point. It costs the weights once more in memory; training itself never reads it.
"""

import copy

import torch

from dflash_cache.drafter.model import Drafter
from dflash_cache.train.sharding import own_part


def start_average(drafter: Drafter) -> Drafter:
    """A copy of the drafter as it is, without gradients."""
    return copy.deepcopy(drafter).requires_grad_(False)


@torch.no_grad()
def update_average(average: Drafter, drafter: Drafter, decay: float, step: int) -> None:
    """Move the average towards the weights that step `step` ended with; elementwise, so the same bits on all ranks."""
    share = 1 - min(decay, (1 + step) / (10 + step))
    moved, towards = ([own_part(each) for each in model.parameters()] for model in (average, drafter))
    torch._foreach_lerp_(moved, towards, share)
