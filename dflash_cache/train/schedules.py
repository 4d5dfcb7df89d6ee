"""The learning rate over the run, as a pure function of the step."""

import math

from dflash_cache.config.settings import TrainSettings


def learning_rate(step: int, num_steps: int, settings: TrainSettings) -> float:
    """Linear warm-up over `warmup_share` of the steps, then a cosine to `final_learning_rate_share`.

    Step 0 already moves: it has 1/warm-up of the peak; the last step ends at the floor.
    """
    warmup_steps = round(settings.warmup_share * num_steps)
    if step < warmup_steps:
        return settings.learning_rate * (step + 1) / warmup_steps
    progress = (step - warmup_steps + 1) / max(1, num_steps - warmup_steps)
    floor = settings.final_learning_rate_share
    return settings.learning_rate * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)
