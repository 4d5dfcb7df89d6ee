"""What the steps really held: measured from the micro-batches that were trained, not from the plan.

Every rank writes a row for each of its micro-batches at its place among the step's; the sum over the ranks is the
whole step in pull order. Shares so far and runs go across steps; a resumed run takes them up from the epoch's order,
so that its records are those of a run that never stopped. The figures are those that `dflash inspect-buckets` shows
beforehand (`data.mixing`).
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from dflash_cache.data.mixing import find_runs, mix_distance
from dflash_cache.train.stream import MicroBatch

NO_BUCKET = -1
_COLUMNS = 6
_DONE, _BUCKET, _SAMPLES, _TOKENS, _PADDED, _LONGEST = range(_COLUMNS)


def tabulate_step(size: int, parts: Iterable[tuple[int, MicroBatch]]) -> np.ndarray:
    """The step's table (size, columns) float64 with a row for each (place in the step, micro-batch), else zeros."""
    table_G = np.zeros((size, _COLUMNS))
    for place, micro_batch in parts:
        length_S = micro_batch.batch.length
        padded = micro_batch.batch.input_ids.numel()
        table_G[place] = (1, micro_batch.bucket, len(length_S), int(length_S.sum()), padded, int(length_S.max()))
    return table_G


class EpochMix:
    """The epoch so far: micro-batches by bucket, and the run of one bucket that it ends with.

    bucket_M: the buckets of the epoch's micro-batches in pull order; the first `begin` of them are done; `before`: the
    run (bucket, length) that the epoch before ended with. The optimizer knows no epochs, so a run goes on across their
    border; shares begin anew with each.
    """

    def __init__(
        self, bucket_M: np.ndarray, begin: int, num_buckets: int, before: tuple[int, int] = (NO_BUCKET, 0)
    ) -> None:
        self._share_K = np.bincount(bucket_M, minlength=num_buckets) / max(1, len(bucket_M))
        self._counts_K = np.bincount(bucket_M[:begin], minlength=num_buckets)
        self._last, self._run = before
        if begin:
            self._follow_runs(bucket_M[:begin])

    @property
    def last_run(self) -> tuple[int, int]:
        """Bucket and length of the run that what was done ends with."""
        return self._last, self._run

    def add(self, table_G: np.ndarray) -> dict[str, Any]:
        """Take in a whole step's table; its figures.

        `bucket_<b>_pct` and `bucket_<b>_running_pct` are percentages of the step and of the epoch so far; `kl` is the
        step's distance from the epoch's mix; `longest_run` counts what a run had before the step.
        """
        assert (table_G[:, _DONE] == 1).all(), "a place of the step was trained by no rank, or by several"
        bucket_G = table_G[:, _BUCKET].astype(np.int64)
        counts_K = np.bincount(bucket_G, minlength=len(self._share_K))
        self._counts_K = self._counts_K + counts_K
        samples, tokens, padded = table_G[:, [_SAMPLES, _TOKENS, _PADDED]].sum(0)
        step, running = (100 * counts / counts.sum() for counts in (counts_K, self._counts_K))
        return {
            "micro_batches": len(table_G),
            "samples": int(samples),
            "tokens": int(tokens),
            "padding_efficiency": float(tokens / padded),
            "mean_length": float(tokens / samples),
            "max_length": int(table_G[:, _LONGEST].max()),
            "kl": float(mix_distance(counts_K[None], self._share_K)[0]),
            "longest_run": self._follow_runs(bucket_G),
            **{f"bucket_{bucket}_pct": pct for bucket, pct in enumerate(step.tolist())},
            **{f"bucket_{bucket}_running_pct": pct for bucket, pct in enumerate(running.tolist())},
        }

    def _follow_runs(self, bucket_G: np.ndarray) -> int:
        """The longest run that reaches into these micro-batches."""
        buckets, lengths = find_runs(bucket_G)
        if buckets[0] == self._last:
            lengths[0] += self._run
        self._last, self._run = int(buckets[-1]), int(lengths[-1])
        return int(lengths.max())
