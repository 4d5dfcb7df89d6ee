"""The learning rate over the run, as a pure function of the step."""

import math

from dflash_cache.config.settings import TrainSettings


def learning_rate(step: int, num_steps: int, settings: TrainSettings) -> float:
    """Linear warm-up over `warmup_share` of the steps, then what `schedule` says.

    cosine: half a cosine down to `final_learning_rate_share`. wsd: the peak, and over the last `decay_share` of the
    steps a line down to it. constant: the peak. Step 0 already moves: it has 1/warm-up of the peak; the last step of a
    decay is at the floor.
    """
    warmup_steps = round(settings.warmup_share * num_steps)
    if step < warmup_steps:
        return settings.learning_rate * (step + 1) / warmup_steps
    floor = settings.final_learning_rate_share
    height = _height(step, warmup_steps, num_steps, settings)
    return settings.learning_rate * (floor + (1 - floor) * height)


def _height(step: int, warmup_steps: int, num_steps: int, settings: TrainSettings) -> float:
    """How far above the floor a step after the warm-up is: 1 at the peak, 0 at the floor."""
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "cosine":
        return (1 + math.cos(math.pi * (step - warmup_steps + 1) / (num_steps - warmup_steps))) / 2
    decay_steps = round(settings.decay_share * num_steps)
    return min(1.0, (num_steps - step - 1) / decay_steps) if decay_steps else 1.0
