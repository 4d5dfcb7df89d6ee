"""The order, up front: an epoch's micro-batches and the target's jobs, each one linear list that mixes the buckets.

Within a bucket the epoch's samples are a seeded uniform permutation, cut into micro-batches by a token budget, and
these shuffled once more (or the short remainder would always come last). `interleave_buckets` then gives every bucket
its places. Let N_k be the micro-batches of bucket k, M all of them, p_k = N_k / M. The largest bucket is laid down
evenly: its item i (from 0) at place floor(i·M/N_k). Item i of any other bucket must come at or after floor(i·M/N_k)
and before ceil((i+1)·M/N_k), the windows of Pfair scheduling (Baruah et al., "Proportionate progress", Algorithmica
1996; Tijdeman's chairman assignment, 1980); the free places go to the released item of the earliest deadline, ties at
random. Last, the list is rotated by a random number of places.

It is always feasible: an interval of w places wholly contains at most p_k·w windows of bucket k, so at most
floor(w·(1 − p)) of all others together, p the largest share; the evenly laid bucket takes at most ceil(w·p) of the w
places and leaves as many free. By Hall's theorem for intervals every item finds a place, and then earliest deadline
first finds one too. What follows, for any counts and any rotation, is exact:

- any window of w consecutive places (so every step) holds of each bucket less than 2 more and less than 2 fewer than
  w·p_k, and of the largest less than 1: the running count stays within 1 of the share before the rotation;
- so a run of L places of the largest has L < 1 / (1 − p), of another (p_k ≤ 1/2) has L < 2 / (1 − p_k) ≤ 4: no run
  is longer than three unless one bucket holds more than three quarters of the list, and then it must be;
- a window of five places or more (four, if no share is above 3/4) is never of one bucket while another holds a fifth;
- by the rotation every micro-batch is at every place with the same probability.

Ten million samples are planned in seconds: about 0.3 µs a sample and 1 µs a micro-batch. Permutations are numpy's and
may change between its versions, so a run remembers its plan's fingerprint.
"""

import heapq
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from xxhash import xxh3_64

from dflash_cache.errors import RunError

Order = Literal["interleaved", "shuffled", "sequential"]
SCHEMA = pa.schema(
    [
        pa.field("position", pa.int64(), nullable=False),
        pa.field("bucket", pa.int16(), nullable=False),
        pa.field("num_samples", pa.int64(), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("padded_tokens", pa.int64(), nullable=False),
        pa.field("rows", pa.list_(pa.int64()), nullable=False),
    ]
)


@unique
class Purpose(IntEnum):
    """What a random stream is for: streams of one seed and different purposes are independent."""

    CUT = 0
    ORDER = 1
    JOBS = 2
    PULL = 3


@dataclass(frozen=True)
class BatchLimits:
    """What a micro-batch may hold (padded tokens, samples), and how the list mixes the buckets."""

    token_budget: int
    max_samples: int
    order: Order = "interleaved"


@dataclass(frozen=True)
class EpochPlan:
    """The list: micro-batch i holds rows[begin[i]:begin[i + 1]].

    rows (N,) int64: positions in the index, each once; begin (M+1,) int64; bucket (M,) int16; tokens and
    padded_tokens (M,) int64: without and with the padding to the longest sample.
    """

    rows: np.ndarray
    begin: np.ndarray
    bucket: np.ndarray
    tokens: np.ndarray
    padded_tokens: np.ndarray

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches the epoch has."""
        return len(self.bucket)

    def rows_of(self, i: int) -> np.ndarray:
        """Positions in the index of micro-batch i's samples."""
        return self.rows[self.begin[i] : self.begin[i + 1]]


@dataclass(frozen=True)
class JobList:
    """The target's forwards: job j holds samples[begin[j]:begin[j + 1]] (ascending by length), all of bucket[j]."""

    samples: np.ndarray
    begin: np.ndarray
    bucket: np.ndarray

    @property
    def num_jobs(self) -> int:
        """How many jobs there are."""
        return len(self.bucket)

    def samples_of(self, j: int) -> np.ndarray:
        """Numbers of job j's samples."""
        return self.samples[self.begin[j] : self.begin[j + 1]]


def plan_epoch(lengths_N: np.ndarray, buckets_N: np.ndarray, limits: BatchLimits, seed: int, epoch: int) -> EpochPlan:
    """The epoch's list over positions 0 … N−1, the same for the same arguments.

    Each micro-batch is cut greedily: longest × samples ≤ token_budget and samples ≤ max_samples, but a sample longer
    than the budget is a micro-batch alone. `shuffled` permutes all micro-batches, `sequential` takes bucket after
    bucket; both are there for comparison.
    """
    rows, begin, counts_K = _cut_epoch(lengths_N, buckets_N, limits, seed, epoch)
    order, bucket_M = _order_list(counts_K, limits.order, _generator(seed, epoch, Purpose.ORDER))
    rows_N, begin = _take_lists(rows, begin, order)
    lengths = lengths_N[rows_N].astype(np.int64)
    longest_M = np.maximum.reduceat(lengths, begin[:-1]) if len(order) else lengths
    tokens_M = np.add.reduceat(lengths, begin[:-1]) if len(order) else lengths
    return EpochPlan(rows_N, begin, bucket_M, tokens_M, longest_M * np.diff(begin))


def count_micro_batches(
    lengths_N: np.ndarray, buckets_N: np.ndarray, limits: BatchLimits, seed: int, epoch: int
) -> int:
    """How many micro-batches `plan_epoch` makes of the same arguments, without ordering them."""
    return int(_cut_epoch(lengths_N, buckets_N, limits, seed, epoch)[2].sum())


def plan_jobs(lengths_N: np.ndarray, buckets_N: np.ndarray, token_budget: int, seed: int) -> JobList:
    """The target's jobs over samples 0 … N−1, interleaved over the buckets, the same for the same arguments.

    Within a bucket samples are sorted by length, for the least padding, and cut by padded tokens as in `plan_epoch`.
    """
    members = [positions[np.argsort(lengths_N[positions], kind="stable")] for positions in _split_by_bucket(buckets_N)]
    samples, begin, counts_K = _cut_buckets(members, lengths_N, token_budget, len(lengths_N))
    order, bucket_J = _order_list(counts_K, "interleaved", _generator(seed, 0, Purpose.JOBS))
    samples_N, begin = _take_lists(samples, begin, order)
    return JobList(samples_N, begin, bucket_J)


def interleave_buckets(counts_K: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """A sequence (M,) int16 with counts_K[k] places of bucket k, as the module's paragraph promises."""
    num_places = int(counts_K.sum())
    largest = int(np.argmax(counts_K)) if len(counts_K) else 0
    bucket_M = np.full(num_places, largest, np.int16)
    bucket_J = np.repeat(np.arange(len(counts_K)), counts_K)
    item_J = np.arange(num_places) - np.repeat(np.cumsum(counts_K) - counts_K, counts_K)
    count_J = counts_K[bucket_J]
    release_J = item_J * num_places // count_J
    deadline_J = -(-(item_J + 1) * num_places // count_J)

    others = bucket_J != largest
    free = np.ones(num_places, np.bool_)
    free[release_J[~others]] = False
    by_release = np.flatnonzero(others)[np.argsort(release_J[others], kind="stable")]
    urgency_J = np.empty(num_places, np.int64)
    by_urgency = np.lexsort((generator.random(num_places), deadline_J))
    urgency_J[by_urgency] = np.arange(num_places)
    places = np.flatnonzero(free)
    chosen = _earliest_first(places.tolist(), release_J[by_release].tolist(), urgency_J[by_release].tolist())
    bucket_M[places] = bucket_J[by_urgency[chosen]]
    return np.roll(bucket_M, generator.integers(max(1, num_places)))


def step_bounds(num_micro_batches: int, step_size: int) -> np.ndarray:
    """Where the ceil(M / step_size) steps begin, and the end (n+1,) int64: sizes differ by at most one.

    So the remainder is spread over the epoch, and no step is tiny unless the whole epoch is.
    """
    num_steps = -(-num_micro_batches // step_size)
    return np.arange(num_steps + 1, dtype=np.int64) * num_micro_batches // max(1, num_steps)


def encode_plan(plan: EpochPlan) -> bytes:
    """The list as a parquet file (SCHEMA), one row a micro-batch."""
    columns = [
        pa.array(np.arange(plan.num_micro_batches)),
        pa.array(plan.bucket),
        pa.array(np.diff(plan.begin)),
        pa.array(plan.tokens),
        pa.array(plan.padded_tokens),
        pa.ListArray.from_arrays(pa.array(plan.begin, pa.int32()), pa.array(plan.rows)),
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, SCHEMA), sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def decode_plan(data: bytes) -> EpochPlan:
    """The plan that `encode_plan` made `data` of. Raises RunError if it is anything else."""
    try:
        table = pq.read_table(pa.BufferReader(data))
        if not table.schema.equals(SCHEMA):
            raise pa.ArrowInvalid(f"its columns are {', '.join(table.column_names)}")
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(
            f"The epoch's list is damaged ({reason}): remove the file, `dflash train` writes it again."
        ) from None
    sizes = table["num_samples"].to_numpy()
    return EpochPlan(
        rows=pc.list_flatten(table["rows"]).to_numpy(),
        begin=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        bucket=table["bucket"].to_numpy(),
        tokens=table["tokens"].to_numpy(),
        padded_tokens=table["padded_tokens"].to_numpy(),
    )


def plan_fingerprint(plan: EpochPlan) -> str:
    """Hash (xxh3, 16 hexadecimal digits) of which samples are in which micro-batch in which order."""
    digest = xxh3_64()
    for array in (plan.begin, plan.rows, plan.bucket):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _generator(seed: int, epoch: int, *purpose: int) -> np.random.Generator:
    """An independent stream of random numbers for each purpose."""
    return np.random.default_rng(np.random.SeedSequence((seed, epoch), spawn_key=purpose))


def _split_by_bucket(buckets_N: np.ndarray) -> list[np.ndarray]:
    """Positions of each bucket's samples, ascending, for buckets 0 … max."""
    positions = np.argsort(buckets_N, kind="stable")
    return np.split(positions, np.cumsum(np.bincount(buckets_N))[:-1]) if len(buckets_N) else []


def _cut_epoch(
    lengths_N: np.ndarray, buckets_N: np.ndarray, limits: BatchLimits, seed: int, epoch: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`_cut_buckets` of the epoch's permutations."""
    members = [
        _generator(seed, epoch, Purpose.CUT, bucket).permutation(positions)
        for bucket, positions in enumerate(_split_by_bucket(buckets_N))
    ]
    return _cut_buckets(members, lengths_N, limits.token_budget, limits.max_samples)


def _cut_buckets(
    members: list[np.ndarray], lengths_N: np.ndarray, token_budget: int, max_samples: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All buckets' samples back to back (N,), where their micro-batches begin (M+1,), and how many each has (K,)."""
    samples, ends, counts = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)], []
    num_samples = 0
    for positions in members:
        cut = _cut(lengths_N[positions], token_budget, max_samples)
        samples.append(positions)
        ends.append(num_samples + cut)
        counts.append(len(cut))
        num_samples += len(positions)
    return np.concatenate(samples), np.concatenate(ends), np.array(counts, np.int64)


def _cut(lengths_n: np.ndarray, token_budget: int, max_samples: int) -> np.ndarray:
    """Ends (m,) int64 of the greedy micro-batches over samples in this order.

    A plain loop, 0.1 µs a sample: numpy calls for each micro-batch (running maximum, search) took five times as long.
    """
    ends: list[int] = []
    count = longest = 0
    for position, length in enumerate(lengths_n.tolist()):
        grown = longest if longest > length else length
        if count and (count == max_samples or grown * (count + 1) > token_budget):
            ends.append(position)
            count, longest = 1, length
        else:
            count += 1
            longest = grown
    if count:
        ends.append(len(lengths_n))
    return np.array(ends, np.int64)


def _order_list(counts_K: np.ndarray, order: Order, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The micro-batch at each place (M,), numbered bucket after bucket, and its bucket (M,) int16."""
    bucket_M = np.repeat(np.arange(len(counts_K), dtype=np.int16), counts_K)
    if order == "sequential":
        return np.arange(len(bucket_M)), bucket_M
    shuffled = generator.permutation(len(bucket_M))
    if order == "shuffled":
        return shuffled, bucket_M[shuffled]
    sequence_M = interleave_buckets(counts_K, generator)
    order_M = np.empty(len(bucket_M), np.int64)
    # both sorts are stable: the places of a bucket, ascending, get its micro-batches as they were shuffled
    order_M[np.argsort(sequence_M, kind="stable")] = shuffled[np.argsort(bucket_M[shuffled], kind="stable")]
    return order_M, sequence_M


def _take_lists(values: np.ndarray, begin: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lists values[begin[i]:begin[i + 1]] for i in `order`, back to back, and where each begins (and the end)."""
    sizes = np.diff(begin)[order]
    ends = np.cumsum(sizes)
    shifts = np.repeat(begin[order] - (ends - sizes), sizes)
    return values[shifts + np.arange(len(values))], np.concatenate([np.zeros(1, np.int64), ends])


def _earliest_first(places: list[int], releases: list[int], urgencies: list[int]) -> list[int]:
    """For every place the urgency (a rank) of the item put there: the most urgent one released by then.

    `releases` ascend; there are as many items as places.
    """
    waiting: list[int] = []
    chosen: list[int] = []
    num_released = 0
    for place in places:
        while num_released < len(releases) and releases[num_released] <= place:
            heapq.heappush(waiting, urgencies[num_released])
            num_released += 1
        chosen.append(heapq.heappop(waiting))
    return chosen
