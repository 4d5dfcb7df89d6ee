"""The learning rate over the run, as a pure function of the step: above zero at every one.

A step with a rate of 0 is paid for and moves nothing. So both ends of a run lie beyond its steps: a warm-up would be at
0 one step before the first, a decay at its floor one step after the last.
"""

import math

from dflash_cache.config.settings import TrainSettings


def learning_rate(step: int, num_steps: int, settings: TrainSettings) -> float:
    """Linear warm-up over W = `warmup_share` of the n steps, then what `schedule` says; > 0 for each step 0 … n − 1.

    Step s < W has (s + 1) / W of the peak. Behind q, the last step at the peak, a decay goes by the share that is left
    of it, r = (n − s) / (n − q). cosine: sin²(πr / 2), half a cosine, from q = W − 1 on (0 without a warm-up). wsd: r,
    with `decay_share` of the steps behind q. constant: 1. Each is a height over `final_learning_rate_share`, the floor,
    at which 1 is the peak.
    """
    warmup_steps = round(settings.warmup_share * num_steps)
    if step < warmup_steps:
        return settings.learning_rate * (step + 1) / warmup_steps
    floor = settings.final_learning_rate_share
    height = _height(step, max(0, warmup_steps - 1), num_steps, settings)
    return settings.learning_rate * (floor + (1 - floor) * height)


def _height(step: int, peak_step: int, num_steps: int, settings: TrainSettings) -> float:
    """How far above the floor a step from the first one at the peak on is: 1 at the peak, 0 at the floor."""
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "cosine":
        return math.sin(math.pi / 2 * (num_steps - step) / (num_steps - peak_step)) ** 2
    decay_steps = round(settings.decay_share * num_steps)
    last_at_peak = max(peak_step, num_steps - 1 - decay_steps)
    return min(1.0, (num_steps - step) / (num_steps - last_at_peak))
