"""How well a sequence of buckets is mixed, cut into optimizer steps: the figures that tests, reports and logs share.

A step is well mixed if its bucket shares are those of the whole epoch. The distance is the Kullback-Leibler divergence
of the step's shares from the epoch's, in nats (a random permutation has about (buckets − 1) / (2 × step size)). Counts
say the same in micro-batches, runs say how it is inside a step and across its borders. Vectorised: a million
micro-batches take a fraction of a second.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class MixFigures:
    """Figures of M micro-batches in n steps over K buckets.

    counts_nK: micro-batches by step and bucket; share_K: the whole epoch's shares; kl_n: each step's distance, nats;
    deviation_nK: counts minus the step's size × share; longest_run_K: 0 for a bucket that does not occur;
    runs_R: runs_R[r] runs are of length r; missing_share: of the steps that could hold every bucket of a share of
    1 / step size or more, those that miss one; single_share: steps all of one bucket, of those of two places or more;
    efficiency: tokens / padded tokens (1 if unknown).
    """

    counts_nK: np.ndarray
    share_K: np.ndarray
    kl_n: np.ndarray
    deviation_nK: np.ndarray
    longest_run_K: np.ndarray
    runs_R: np.ndarray
    missing_share: float
    single_share: float
    efficiency: float

    @property
    def longest_run(self) -> int:
        """The longest run of any bucket."""
        return int(self.longest_run_K.max(initial=0))

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain numbers and lists, the per-step arrays as their means and maxima."""
        return {
            "num_steps": len(self.kl_n),
            "num_micro_batches": int(self.counts_nK.sum()),
            "shares": self.share_K.tolist(),
            "kl_mean": float(self.kl_n.mean()) if len(self.kl_n) else 0.0,
            "kl_max": float(self.kl_n.max(initial=0.0)),
            "max_deviation": float(np.abs(self.deviation_nK).max(initial=0.0)),
            "longest_run": self.longest_run,
            "longest_run_by_bucket": self.longest_run_K.tolist(),
            "runs": {length: count for length, count in enumerate(self.runs_R.tolist()) if count},
            "missing_share": self.missing_share,
            "single_share": self.single_share,
            "efficiency": self.efficiency,
        }


def measure_mix(bucket_M: np.ndarray, bounds: np.ndarray, num_buckets: int, efficiency: float = 1.0) -> MixFigures:
    """The figures of the buckets `bucket_M` in the order they come, step s being places bounds[s] … bounds[s+1] − 1."""
    counts_nK = count_buckets(bucket_M, bounds, num_buckets)
    size_n = counts_nK.sum(1)
    share_K = np.bincount(bucket_M, minlength=num_buckets) / max(1, len(bucket_M))
    expected_nK = size_n[:, None] * share_K
    missing_n = ((counts_nK == 0) & (expected_nK >= 1)).any(1)
    single_n = counts_nK.max(1, initial=0) == size_n
    bucket_R, length_R = find_runs(bucket_M)
    return MixFigures(
        counts_nK=counts_nK,
        share_K=share_K,
        kl_n=mix_distance(counts_nK, share_K),
        deviation_nK=counts_nK - expected_nK,
        longest_run_K=_longest(bucket_R, length_R, num_buckets),
        runs_R=np.bincount(length_R),
        missing_share=_mean(missing_n[(expected_nK >= 1).any(1)]),
        single_share=_mean(single_n[size_n > 1]),
        efficiency=efficiency,
    )


def mix_distance(counts_nK: np.ndarray, share_K: np.ndarray) -> np.ndarray:
    """Kullback-Leibler divergence (n,) of each step's shares from the epoch's, in nats; every bucket held has one."""
    size_n = counts_nK.sum(1)
    expected_nK = size_n[:, None] * share_K
    # 0 · log 0 = 0
    ratio_nK = np.divide(counts_nK, expected_nK, out=np.ones(counts_nK.shape), where=counts_nK > 0)
    distance_n: np.ndarray = (counts_nK * np.log(ratio_nK)).sum(1) / np.maximum(1, size_n)
    return distance_n


def count_buckets(bucket_M: np.ndarray, bounds: np.ndarray, num_buckets: int) -> np.ndarray:
    """Micro-batches (n, K) int64 of each step and bucket."""
    num_steps = len(bounds) - 1
    step_M = np.repeat(np.arange(num_steps), np.diff(bounds))
    cells = np.bincount(step_M * num_buckets + bucket_M, minlength=num_steps * num_buckets)
    return cells.reshape(num_steps, num_buckets)


def find_runs(bucket_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bucket (R,) and the length (R,) of every run of one bucket, in order."""
    begins = np.flatnonzero(np.diff(bucket_M, prepend=-1))
    return bucket_M[begins], np.diff(begins, append=len(bucket_M))


def longest_runs(bucket_M: np.ndarray, num_buckets: int) -> np.ndarray:
    """The longest run (K,) int64 of each bucket, 0 where there is none."""
    return _longest(*find_runs(bucket_M), num_buckets)


def _longest(bucket_R: np.ndarray, length_R: np.ndarray, num_buckets: int) -> np.ndarray:
    longest_K = np.zeros(num_buckets, np.int64)
    np.maximum.at(longest_K, bucket_R, length_R)
    return longest_K


def _mean(flags: np.ndarray) -> float:
    return float(flags.mean()) if len(flags) else 0.0
