"""Which samples are held out for validation: the same wherever it is asked, from seed and count alone."""

import numpy as np

from dflash_cache.errors import ConfigError


def split_rows(sample_N: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions of training and of held-out samples, both ascending; the split depends on seed and samples alone."""
    num_held_out = round(share * len(sample_N))
    if share > 0:
        num_held_out = max(1, num_held_out)
    if num_held_out >= len(sample_N):
        raise ConfigError(
            f"train.validation_share {share} leaves no sample of {len(sample_N)} to train on; lower it, or cache more."
        )
    permutation = np.random.default_rng((seed, len(sample_N))).permutation(len(sample_N))
    return np.sort(permutation[num_held_out:]), np.sort(permutation[:num_held_out])
