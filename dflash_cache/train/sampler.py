"""The buffered random sampler: which micro-batch of the list is pulled when, and which rank takes it.

The list (`data.plan`) mixes the buckets; the sampler pulls from it at random through a buffer of its first unpulled
entries, without undoing the mix. The whole epoch's order is computed before anything is read, so it depends on the
list, the step bounds, `min_buffer` and the seed alone: not on threads, speeds, or where a run was resumed.

The scheme: step s shall have exactly the bucket counts of the list's places bounds[s] … bounds[s+1] − 1. At every pull
an entry is drawn uniformly from the buffered ones whose bucket is still wanted in this step. So the step's mix is the
list's, with all that is proved of it (less than 2 from every bucket's share), while which micro-batch of a bucket
comes, and in which order the buckets do, is random over the buffer.

The buffer never lacks a wanted entry: up to the step's end e, buckets are wanted as often as list places [0, e) hold
them. While the buffer ends before e, everything in it lies in [0, e), so all of it is wanted; when it ends at e or
later, all that is still wanted is in it.

Runs: no run of bucket A gets longer than R_A, three or the longest of A in the list, whichever is more. Let the step
still want a of A and o of the others, let A's run so far be r, and let q be the longest run of A that may go over into
the next step. This can be arranged if and only if r + a ≤ R_A·o + q: the others part A into o + 1 runs, the first of
which has R_A − r places left and the last q. From the last step back, q(s) = min(R_A, R_A·o(s) − a(s) + q(s + 1)) with
the step's counts. A is pressing, and alone may come, if a > R_A·(o − 1) + q: anything else would leave too few others.
Two buckets never press at once (with a ≥ c and R ≥ 3 that leaves a = c = 1 and both q = 0, so that in the next step
each would outnumber the other), so every pull keeps all buckets arrangeable; and the list is a witness that the epoch
begins so. Where the buffer holds nothing that may come, it grows, never past the step's end: it holds `min_buffer`
entries or at most the places left in the step. With a list of long runs (`shuffled`, `sequential`) nothing is mended.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from xxhash import xxh3_64

from dflash_cache.config.settings import TrainSettings
from dflash_cache.data.mixing import count_buckets, longest_runs
from dflash_cache.data.plan import EpochPlan, Purpose, plan_fingerprint, step_bounds

MAX_RUN = 3  # micro-batches of one bucket one after the other, where the list allows it


@dataclass(frozen=True)
class EpochOrder:
    """An epoch's steps: which places of the list each rank takes, known in advance for every step.

    order (M,) int64: list positions in pull order; bounds (n+1,): step s pulls order[bounds[s]:bounds[s + 1]];
    weight (M,) int64: the work of each list position (padded tokens), by which a step is dealt out.
    """

    order: np.ndarray
    bounds: np.ndarray
    weight: np.ndarray
    accumulation: int
    world_size: int

    @classmethod
    def from_plan(cls, plan: EpochPlan, settings: TrainSettings, epoch: int, world_size: int = 1) -> Self:
        """The order of `epoch`, in steps of accumulation × world_size places.

        The steps' contents depend on that product alone, so ranks may change while it is kept.
        """
        bounds = step_bounds(plan.num_micro_batches, settings.accumulation * world_size)
        order = pull_order(plan.bucket, bounds, settings.min_buffer, (settings.seed, epoch))
        return cls(order, bounds, plan.padded_tokens, settings.accumulation, world_size)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the epoch."""
        return len(self.bounds) - 1

    def step(self, step: int) -> np.ndarray:
        """List positions of all micro-batches of the step, in pull order."""
        return self.order[self.bounds[step] : self.bounds[step + 1]]

    def slots(self, step: int, rank: int) -> np.ndarray:
        """Which of the step's micro-batches the rank takes (accumulation,) int64, −1 for an empty one."""
        return deal_step(self.weight[self.step(step)], self.world_size, self.accumulation)[rank]

    def places(self, step: int, rank: int) -> np.ndarray:
        """List positions (accumulation,) int64 of the rank's micro-batches of the step, −1 for an empty one."""
        slots = self.slots(step, rank)
        return np.where(slots < 0, -1, self.step(step)[slots])

    def steps(self, first: int, rank: int) -> Iterator[np.ndarray]:
        """`places` of every step from `first` on: the same as the rest of the whole epoch's."""
        for step in range(first, self.num_steps):
            yield self.places(step, rank)


def order_fingerprint(plan: EpochPlan, order: EpochOrder) -> str:
    """Hash (xxh3, 16 hexadecimal digits) of an epoch's list, its pull order and its steps, on any number of ranks."""
    digest = xxh3_64(plan_fingerprint(plan).encode())
    for array in (order.order, order.bounds):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def pull_order(bucket_M: np.ndarray, bounds: np.ndarray, min_buffer: int, seed: int | Sequence[int]) -> np.ndarray:
    """The epoch's pull order (M,) int64: list positions, each once; `min_buffer` 0 or 1 is the list's own order.

    bucket_M: the list's buckets; bounds (n+1,): step s has places bounds[s] … bounds[s+1] − 1. A few µs a pull.
    """
    if min_buffer <= 1:
        return np.arange(len(bucket_M))
    num_buckets = int(bucket_M.max(initial=-1)) + 1
    counts_nK = count_buckets(bucket_M, bounds, num_buckets)
    limits_K = np.maximum(MAX_RUN, longest_runs(bucket_M, num_buckets))
    tails_nK = _tail_limits(counts_nK, limits_K)
    generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(Purpose.PULL,)))
    sampler = _Sampler(bucket_M.tolist(), limits_K.tolist(), min_buffer, generator.random(len(bucket_M)).tolist())
    for wanted_K, tails_K in zip(counts_nK.tolist(), tails_nK[1:].tolist(), strict=True):
        sampler.pull_step(wanted_K, tails_K)
    return np.array(sampler.pulled, np.int64)


def buffer_fill(order: np.ndarray, min_buffer: int) -> np.ndarray:
    """How many list entries the buffer held at each pull (M,) int64, given the `pull_order`.

    What is pulled was in the buffer, and the buffer grows past `min_buffer` only up to an entry that is pulled next.
    """
    pulled = np.arange(len(order))
    refilled = np.minimum(pulled + max(1, min_buffer), len(order))
    return np.maximum.accumulate(np.maximum(refilled, order + 1)) - pulled


def deal_step(tokens_G: np.ndarray, world_size: int, accumulation: int) -> list[np.ndarray]:
    """For each rank which of the step's G ≤ world_size × accumulation micro-batches it takes: (accumulation,) int64.

    Longest first, to the rank with the fewest tokens (the first of equals) of those with fewer than
    ceil(G / world_size) micro-batches: no rank makes more passes than it must, and in a full step, G = world_size ×
    accumulation, all make the same number. A rank's places ascend, −1 fills them up: nothing is computed for it.
    """
    assert len(tokens_G) <= world_size * accumulation
    most = -(-len(tokens_G) // world_size)
    dealt: list[list[int]] = [[] for _ in range(world_size)]
    free = [(0, rank) for rank in range(world_size)]  # a heap of (tokens, rank)
    for place in np.argsort(-tokens_G, kind="stable").tolist():
        load, rank = heapq.heappop(free)
        dealt[rank].append(place)
        if len(dealt[rank]) < most:
            heapq.heappush(free, (load + int(tokens_G[place]), rank))
    return [np.array(sorted(places) + [-1] * (accumulation - len(places)), np.int64) for places in dealt]


def _tail_limits(counts_nK: np.ndarray, limits_K: np.ndarray) -> np.ndarray:
    """(n+1, K): the longest run of each bucket with which a step may begin; the last row is after the last step."""
    tails_nK = np.tile(limits_K, (len(counts_nK) + 1, 1))
    others_nK = counts_nK.sum(1, keepdims=True) - counts_nK
    room_nK = limits_K * others_nK - counts_nK
    tight = (room_nK < 0).any(1).tolist()  # only then is a run limited by the step itself, if not by the next one
    limited = False
    for s in range(len(counts_nK) - 1, -1, -1):
        if limited or tight[s]:
            tails_nK[s] = np.minimum(limits_K, room_nK[s] + tails_nK[s + 1])
            limited = bool((tails_nK[s] < limits_K).any())
    return tails_nK


class _Sampler:
    """The buffer and the runs, pull after pull; `pulled` is the order so far."""

    def __init__(self, bucket_M: list[int], limits_K: list[int], min_buffer: int, random_M: list[float]) -> None:
        self.pulled: list[int] = []
        self._bucket_M = bucket_M
        self._limits_K = limits_K
        self._min_buffer = min_buffer
        self._random_M = random_M
        self._buffer: list[list[int]] = [[] for _ in limits_K]  # list positions, by bucket
        self._head = 0  # the first list position that is not in the buffer yet
        self._last = -1  # bucket of the run
        self._run = 0

    def pull_step(self, wanted_K: list[int], tails_K: list[int]) -> None:
        """Pull sum(wanted_K) entries, so many of each bucket, ending with runs of tails_K at most."""
        for left in range(sum(wanted_K), 0, -1):
            while self._head - len(self.pulled) < self._min_buffer and self._head < len(self._bucket_M):
                self._grow()
            allowed = self._allowed(wanted_K, tails_K, left)
            while not (size := sum(len(self._buffer[bucket]) for bucket in allowed)):
                self._grow()
            drawn = int(self._random_M[len(self.pulled)] * size)
            for bucket in allowed:
                entries = self._buffer[bucket]
                if drawn < len(entries):
                    break
                drawn -= len(entries)
            entries[drawn], entries[-1] = entries[-1], entries[drawn]
            self.pulled.append(entries.pop())
            wanted_K[bucket] -= 1
            self._run = self._run + 1 if bucket == self._last else 1
            self._last = bucket

    def _grow(self) -> None:
        self._buffer[self._bucket_M[self._head]].append(self._head)
        self._head += 1

    def _allowed(self, wanted_K: list[int], tails_K: list[int], left: int) -> list[int]:
        """Buckets that may come now: the pressing one, or all wanted ones whose run is not at its limit."""
        allowed = []
        for bucket, wanted in enumerate(wanted_K):
            if not wanted:
                continue
            if wanted > self._limits_K[bucket] * (left - wanted - 1) + tails_K[bucket]:
                return [bucket]
            if bucket != self._last or self._run < self._limits_K[bucket]:
                allowed.append(bucket)
        return allowed
