"""From the order to ready micro-batches: read, checked, anchors drawn, ahead of the training loop.

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

from dflash_cache.cache.reader import Batch
from dflash_cache.drafter.anchors import draw_anchors, pad_anchors, share_anchors

Item = TypeVar("Item")
Ready = TypeVar("Ready")


@dataclass(frozen=True)
class MicroBatch:
    """One forward's input as it was read: padded samples of one bucket and the anchors drawn in them.

    anchors_SA: int64 positions, padded with -1. The blocks are made of them where they are computed with: their labels
    are a block's size times as many bytes, which a reading thread would write and a device's bus would carry.
    last_STH: the target's last hidden states, once they are taken apart from the others (`loop.place_states`).
    """

    batch: Batch
    anchors_SA: torch.Tensor
    bucket: int
    last_STH: torch.Tensor | None = None

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on another device; the cached states go as they are stored."""
        batch = Batch(**{name: tensor.to(device, non_blocking=True) for name, tensor in vars(self.batch).items()})
        return MicroBatch(batch, self.anchors_SA.to(device, non_blocking=True), self.bucket)


@dataclass(frozen=True)
class AnchorDraw:
    """How anchors are drawn: `count` a sample and `max_anchors` a micro-batch at most, by (seed, epoch, sample)."""

    count: int
    seed: int
    epoch: int
    max_anchors: int | None = None

    def count_of(self, num_samples: int) -> int:
        """Anchors of each of so many samples in one micro-batch, at most."""
        share = share_anchors(self.max_anchors, num_samples)
        return self.count if share is None else min(self.count, share)


def load_micro_batch(
    read_batch: Callable[[np.ndarray], Batch], rows: np.ndarray, bucket: int, draw: AnchorDraw
) -> MicroBatch:
    """Read the samples at `rows` of the index and draw their anchors."""
    batch = read_batch(rows)
    mask_ST = batch.loss_mask.numpy()
    share = share_anchors(draw.max_anchors, len(rows))
    anchors = [
        draw_anchors(mask_ST[s, :length], draw.count, (draw.seed, draw.epoch, sample), share)
        for s, (sample, length) in enumerate(zip(batch.sample.tolist(), batch.length.tolist(), strict=True))
    ]
    return MicroBatch(batch, pad_anchors(anchors), bucket)


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
