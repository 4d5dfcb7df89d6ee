"""`ReadAhead` against its promises: the order, the bytes held, errors in their place, nothing left running."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cache.cache.reader import CacheReader
from dflash_cache.train.stream import AnchorDraw, ReadAhead, load_micro_batch

sizes_lists = st.lists(st.integers(0, 20), max_size=30)
thread_counts = st.integers(1, 5)
byte_limits = st.integers(1, 60)


@dataclass
class Ledger:
    """Which items are loaded and not yet given up by the consumer, seen at each load's begin."""

    sizes: list[int]
    held: set[int] = field(default_factory=set)
    seen: list[list[int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def load(self, item: int) -> int:
        with self.lock:
            self.held.add(item)
            self.seen.append([self.sizes[i] for i in self.held])
        return item

    def release(self, item: int) -> None:
        with self.lock:
            self.held.discard(item)


def sized(sizes: list[int]) -> list[tuple[int, int]]:
    return list(enumerate(sizes))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), max_size=25), thread_counts, byte_limits)
@settings(deadline=None, max_examples=60)
def test_everything_comes_once_and_in_order_for_any_number_of_threads_and_bytes(
    items: list[tuple[int, int]], threads: int, max_bytes: int
) -> None:
    def load(item: int) -> int:
        time.sleep(items[item][1] / 5000)  # loads end in another order than they begin
        return item * item

    sizes = [size for size, _ in items]
    assert list(ReadAhead(sized(sizes), load, threads, max_bytes)) == [i * i for i in range(len(sizes))]


@given(sizes_lists, thread_counts, byte_limits)
@settings(deadline=None, max_examples=100)
def test_no_more_than_max_bytes_are_held_unless_by_one_item_alone(
    sizes: list[int], threads: int, max_bytes: int
) -> None:
    ledger = Ledger(sizes)
    previous = None
    stream = ReadAhead(sized(sizes), ledger.load, threads, max_bytes)
    for item in stream:
        assert previous is None or item == previous + 1
        previous = item
        ledger.release(item)  # the consumer asks for the next only when done with this one
    assert len(ledger.seen) == len(sizes)
    for held in ledger.seen:
        assert sum(held) <= max_bytes or len(held) == 1


def test_all_that_fits_is_read_before_the_first_is_taken_and_nothing_beyond() -> None:
    started = [threading.Event() for _ in range(6)]

    def load(item: int) -> int:
        started[item].set()
        return item

    stream = ReadAhead(sized([10] * 6), load, 2, 30)
    assert next(stream) == 0
    assert started[2].wait(5)
    assert not started[3].wait(0.05)
    assert next(stream) == 1
    assert started[3].wait(5)
    assert not started[4].wait(0.05)
    assert list(stream) == [2, 3, 4, 5]


def test_threads_load_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=10)  # passes only if three loads are under way at once

    def load(item: int) -> int:
        meeting.wait()
        return item

    assert list(ReadAhead(sized([1] * 6), load, 3, 100)) == list(range(6))


def test_an_item_larger_than_the_limit_is_read_alone() -> None:
    ledger = Ledger([1, 1, 99, 1, 1])
    for item in ReadAhead(sized(ledger.sizes), ledger.load, 4, 2):
        ledger.release(item)
    assert [99] in ledger.seen
    assert all(held == [99] or 99 not in held for held in ledger.seen)


@given(st.integers(1, 12), st.data(), thread_counts, byte_limits)
@settings(deadline=None, max_examples=60)
def test_an_error_comes_in_its_items_place_and_after_it_nothing(
    count: int, data: st.DataObject, threads: int, max_bytes: int
) -> None:
    broken = data.draw(st.integers(0, count - 1))

    def load(item: int) -> int:
        if item == broken:
            raise LookupError(f"item {item}")
        return item

    taken = []
    stream = ReadAhead(sized([3] * count), load, threads, max_bytes)
    with pytest.raises(LookupError, match=f"item {broken}$"):
        for item in stream:
            taken.append(item)
    assert taken == list(range(broken))
    assert next(stream, None) is None


def test_a_stream_closed_early_loads_no_more_and_ends_its_threads() -> None:
    loaded = []
    before = threading.active_count()

    def load(item: int) -> int:
        time.sleep(0.05)
        loaded.append(item)
        return item

    stream = ReadAhead(sized([1] * 50), load, 1, 50)
    assert next(stream) == 0
    stream.close()
    assert threading.active_count() == before
    num_loaded = len(loaded)
    assert num_loaded < 50
    time.sleep(0.12)
    assert len(loaded) == num_loaded


def test_items_are_taken_from_an_endless_order_only_as_they_are_needed() -> None:
    taken = []

    def order() -> Iterator[tuple[int, int]]:
        item = 0
        while True:
            taken.append(item)
            yield item, 1
            item += 1

    stream = ReadAhead(order(), lambda item: item, 2, 5)
    assert [next(stream) for _ in range(10)] == list(range(10))
    stream.close()
    assert len(taken) == 10 + 5


def test_an_empty_order_gives_nothing() -> None:
    assert list(ReadAhead([], lambda item: item, 2, 10)) == []


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30), thread_counts, byte_limits, st.integers(1, 6))
@settings(deadline=None, max_examples=100)
def test_a_step_taken_at_once_is_held_with_what_is_read_ahead_within_the_bytes_unless_it_is_larger_alone(
    sizes: list[int], threads: int, max_bytes: int, count: int
) -> None:
    ledger = Ledger(sizes)
    stream = ReadAhead(sized(sizes), ledger.load, threads, max_bytes)
    steps = [list(range(begin, min(begin + count, len(sizes)))) for begin in range(0, len(sizes), count)]
    largest = max(sum(sizes[i] for i in step) for step in steps)
    for step in steps:
        assert stream.take(count) == step
        for item in step:
            ledger.release(item)
    assert stream.take(count) == []
    assert max(map(sum, ledger.seen)) <= max(max_bytes, largest)


def test_a_bound_micro_batch_pads_to_the_bound_at_most_and_its_samples_draw_as_they_do_beside_others(
    base_config,
) -> None:
    free = AnchorDraw(count=6, seed=3, epoch=1)
    with CacheReader(Path(base_config.cache_dir)) as reader:
        rows = np.arange(len(reader.index.sample))
        whole = load_micro_batch(reader.read_batch, rows, 0, free).anchors_SA
        bound = load_micro_batch(reader.read_batch, rows, 0, replace(free, max_anchors=4 * len(rows) + 1)).anchors_SA
        alone = load_micro_batch(reader.read_batch, rows[::2], 0, replace(free, max_anchors=4 * len(rows[::2])))
    assert whole.shape == (len(rows), 6)
    assert bound.shape == (len(rows), 4)
    for unbound, some in zip(whole.tolist(), bound.tolist(), strict=True):
        assert set(some) <= {*unbound, -1}
        assert sum(anchor >= 0 for anchor in some) == min(4, sum(anchor >= 0 for anchor in unbound))
    assert alone.anchors_SA.equal(bound[::2])
