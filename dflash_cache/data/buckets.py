"""Buckets: ranges of sample lengths, by equal counts or by the least padding.

A batch is padded to its longest sample, so samples of like length go together. `quantile_bounds` gives every bucket
about as many samples; `best_bounds` gives the bounds that waste the fewest tokens when every sample is padded to the
longest member of its bucket, exactly, by dynamic programming over the length histogram. The last bucket that ends at
length x costs x · (samples in it) − (tokens in it), so the best place where it begins is the lowest of a set of lines
at x, kept as a lower hull (the "convex hull trick"): O(buckets × distinct lengths), in exact integers.
"""

import numpy as np

from dflash_cache.errors import DataError


def quantile_bounds(lengths_N: np.ndarray, num_buckets: int, max_length: int) -> tuple[int, ...]:
    """Inclusive upper bounds, strictly ascending, the last is `max_length`; no bucket is empty.

    Bound i is the smallest length that i/num_buckets of the samples do not exceed; where many samples share a length,
    bounds coincide and there are fewer buckets. Raises DataError if a sample is longer than `max_length`.
    """
    _check_lengths(lengths_N, max_length)
    if len(lengths_N) == 0:
        return (max_length,)
    cumulated = np.cumsum(np.bincount(lengths_N))
    ranks = -(-np.arange(1, num_buckets) * len(lengths_N) // num_buckets)
    inner = np.unique(np.searchsorted(cumulated, ranks))
    return (*inner[inner < lengths_N.max()].tolist(), max_length)


def best_bounds(lengths_N: np.ndarray, num_buckets: int, max_length: int) -> tuple[int, ...]:
    """The at most `num_buckets` bounds (as in `quantile_bounds`) with the least `wasted_tokens`; no bucket is empty.

    Raises DataError if a sample is longer than `max_length`.
    """
    _check_lengths(lengths_N, max_length)
    if len(lengths_N) == 0:
        return (max_length,)
    histogram = np.bincount(lengths_N)
    distinct_D = np.flatnonzero(histogram)
    lengths = distinct_D.tolist()
    before = [0, *np.cumsum(histogram[distinct_D]).tolist()]  # samples among the first d distinct lengths
    # padded[d]: least padded tokens of the first d distinct lengths in the buckets so far
    padded = [0] + [length * count for length, count in zip(lengths, before[1:], strict=True)]
    begins: list[list[int]] = []  # of each further bucket: where it begins, by where it ends
    for _ in range(min(num_buckets, len(lengths)) - 1):
        padded, begin = _add_bucket(padded, lengths, before)
        begins.append(begin)
    ends = [len(lengths)]
    while begins:
        ends.append(begins.pop()[ends[-1]])
    inner = [lengths[end - 1] for end in ends[:0:-1]]
    return (*inner, max_length)


def assign_buckets(lengths_N: np.ndarray, bounds: tuple[int, ...]) -> np.ndarray:
    """Each sample's bucket (N,) int16: the first one whose bound its length does not exceed.

    Raises DataError if a sample is longer than the last bound.
    """
    _check_lengths(lengths_N, bounds[-1])
    return np.searchsorted(np.asarray(bounds), lengths_N).astype(np.int16)


def wasted_tokens(lengths_N: np.ndarray, bounds: tuple[int, ...]) -> int:
    """Padding tokens if every sample is padded to the longest member of its bucket."""
    buckets_N = assign_buckets(lengths_N, bounds)
    longest_K = np.zeros(len(bounds), np.int64)
    np.maximum.at(longest_K, buckets_N, lengths_N)
    return int((longest_K * np.bincount(buckets_N, minlength=len(bounds))).sum() - lengths_N.sum(dtype=np.int64))


def _add_bucket(padded: list[int], lengths: list[int], before: list[int]) -> tuple[list[int], list[int]]:
    """With one bucket more: the least padded tokens of the first d distinct lengths, and where the last one begins.

    padded'[d] = min over b < d of padded[b] + lengths[d−1] · (before[d] − before[b]): lines in x = lengths[d−1] of
    intercept padded[b] and slope −before[b]. Slopes fall and x grows, so the best line moves on.
    """
    hull = [0]
    front = 0
    best, begin = [0], [0]
    for d, x in enumerate(lengths, start=1):
        while front + 1 < len(hull) and (
            padded[hull[front + 1]] - padded[hull[front]] <= x * (before[hull[front + 1]] - before[hull[front]])
        ):
            front += 1
        b = hull[front]
        best.append(padded[b] + x * (before[d] - before[b]))
        begin.append(b)
        while len(hull) - front > 1 and _is_above(hull[-2], hull[-1], d, padded, before):
            hull.pop()
        hull.append(d)
    return best, begin


def _is_above(i: int, j: int, k: int, padded: list[int], before: list[int]) -> bool:
    """Whether line j is nowhere below both line i and line k, slopes falling from i to k."""
    return (padded[j] - padded[i]) * (before[k] - before[j]) >= (padded[k] - padded[j]) * (before[j] - before[i])


def _check_lengths(lengths_N: np.ndarray, max_length: int) -> None:
    if len(lengths_N) and lengths_N.max() > max_length:
        raise DataError(
            f"A sample of {lengths_N.max()} tokens is longer than the last bucket's bound ({max_length}): raise "
            "data.max_length (and the last of data.bucket_bounds), or drop or truncate it as data.overlong says."
        )
