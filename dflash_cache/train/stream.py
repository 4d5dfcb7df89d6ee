"""From the order to ready micro-batches: read, checked, blocks drawn, ahead of the training loop.

The order is fixed before anything is read; threads only make what comes next ready sooner, so their number and
the bytes they read ahead never change what is trained on. Threads, not processes: reads and checksums release
the GIL, and nothing has to be shared, locked or replayed.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from dflash_cache.cache.reader import Batch, CacheReader
from dflash_cache.drafter.anchors import Blocks, draw_anchors, make_blocks

Item = TypeVar("Item")
Ready = TypeVar("Ready")


@dataclass(frozen=True)
class MicroBatch:
    """One forward's input: padded samples of one bucket and the blocks drafted in them."""

    batch: Batch
    blocks: Blocks
    bucket: int

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on another device; the cached states go as they are stored."""
        batch = Batch(**{name: tensor.to(device, non_blocking=True) for name, tensor in vars(self.batch).items()})
        return MicroBatch(batch, self.blocks.to(device), self.bucket)


@dataclass(frozen=True)
class BlockDraw:
    """How blocks are drawn: `count` anchors a sample at most, seeded by (seed, epoch, sample)."""

    block_size: int
    count: int
    seed: int
    epoch: int


def load_micro_batch(reader: CacheReader, rows: np.ndarray, bucket: int, draw: BlockDraw) -> MicroBatch:
    """Read the samples at `rows` of the index and draw their blocks."""
    batch = reader.read_batch(rows)
    mask_ST = batch.loss_mask.numpy()
    anchors = [
        draw_anchors(mask_ST[s, :length], draw.count, (draw.seed, draw.epoch, sample))
        for s, (sample, length) in enumerate(zip(batch.sample.tolist(), batch.length.tolist(), strict=True))
    ]
    blocks = make_blocks(batch.input_ids, batch.loss_mask, anchors, draw.block_size)
    return MicroBatch(batch, blocks, bucket)


class ReadAhead(Iterator[Ready], Generic[Item, Ready]):
    """`load` of every item, in order, made ready by `threads`; `items` come with their size in bytes.

    At most `max_bytes` are loading, waiting, or with the consumer, who has what it took last until it asks again. The
    rule's one exception: what is asked for at once (a step) is always loaded, however large, and then nothing else is.
    An exception of `load` is raised in its place in the order, and ends the stream.
    """

    def __init__(
        self, items: Iterable[tuple[Item, int]], load: Callable[[Item], Ready], threads: int, max_bytes: int
    ) -> None:
        self._items = iter(items)
        self._following = next(self._items, None)
        self._load = load
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[Future[Ready], int]] = deque()
        self._waiting_bytes = 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read-ahead")

    def __next__(self) -> Ready:
        taken = self.take(1)
        if not taken:
            raise StopIteration
        return taken[0]

    def take(self, count: int) -> list[Ready]:
        """The next `count` items, fewer at the end; the consumer must have dropped those it took before."""
        try:
            self._read_ahead(count)
            taken: list[Ready] = []
            while self._waiting and len(taken) < count:
                future, num_bytes = self._waiting.popleft()
                taken.append(future.result())
                self._waiting_bytes -= num_bytes
        except BaseException:
            self.close()
            raise
        if not self._waiting and self._following is None:
            self.close()
        return taken

    def close(self) -> None:
        """Load no more, and end the threads."""
        self._following = None
        for future, _ in self._waiting:
            future.cancel()
        self._waiting.clear()
        self._pool.shutdown()

    @property
    def num_ready(self) -> int:
        """How many items are loaded and wait to be taken."""
        return sum(future.done() for future, _ in self._waiting)

    def _read_ahead(self, count: int) -> None:
        """Begin to load the `count` items about to be taken, and what fits beside them until the next call."""
        while self._following is not None:
            item, num_bytes = self._following
            if len(self._waiting) >= count and self._waiting_bytes + num_bytes > self._max_bytes:
                return
            self._waiting.append((self._pool.submit(self._load, item), num_bytes))
            self._waiting_bytes += num_bytes
            self._following = next(self._items, None)
