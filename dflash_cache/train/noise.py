"""Noise on the cached states, so that the drafter does not lean on their last bits: off by default (FIELD.md).

The noise of a micro-batch depends on the run's seed, the step and the micro-batch's slot in the step alone: a resumed
run, another number of ranks and a second look at the same step all get the same bits. It is drawn where the states
are, for a host draws too slowly: 41 kB a token are 20,480 numbers.
"""

import numpy as np
import torch
from torch import Tensor

from dflash_cache.config.settings import NoiseSettings

_STREAM = 0x6E6F697365  # keeps these draws apart from all others that are made with the run's seed


def noise_level(step: int, num_steps: int, settings: NoiseSettings) -> float:
    """The noise's standard deviation at a step (from 0), in the states' own units.

    Exactly 0 at step 0 and up a line over the warm-up, whose first step after it has the full `strength`; then it
    holds, or falls along a line to exactly 0 at the last step. Without a warm-up step 0 has the full strength.
    """
    if settings.kind == "off":
        return 0.0
    warmup_steps = max(1, round(settings.warmup_share * num_steps)) if settings.warmup_share > 0 else 0
    if step < warmup_steps:
        return settings.strength * (step / warmup_steps)
    if settings.after_warmup == "hold":
        return settings.strength
    last = num_steps - 1
    return settings.strength * ((last - step) / max(1, last - warmup_steps))


def add_noise(states_STLH: Tensor, level: float, settings: NoiseSettings, seed: tuple[int, int, int]) -> Tensor:
    """The states with independent noise of mean 0 and standard deviation `level`; `seed` is (seed, step, slot).

    At level 0 they are the very same tensor. The sum is rounded once, to the states' dtype: in bfloat16 a level far
    below 1/256 of a state leaves most of them as they are.
    """
    if level == 0:
        return states_STLH
    generator = torch.Generator(states_STLH.device)
    generator.manual_seed(int(np.random.SeedSequence((_STREAM, *seed)).generate_state(1, np.uint64)[0]))
    noise_STLH = torch.empty_like(states_STLH)
    if settings.kind == "gaussian":
        noise_STLH.normal_(std=level, generator=generator)
    else:
        noise_STLH.uniform_(-(3**0.5) * level, 3**0.5 * level, generator=generator)
    return noise_STLH.add_(states_STLH)
