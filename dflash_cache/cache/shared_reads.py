"""One read for several takers: drafters that train in step on one cache read each batch once.

Each taker has a view of the reader and asks for the same batches in the same order, each from its own threads. The
first to ask reads; the others get the same tensors, which nobody may change. A batch is forgotten when all have
it, so what is held is what the takers' own read-ahead holds anyway.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from dflash_cache.cache.reader import Batch, CacheReader


@dataclass
class _Read:
    waiting: set[int]
    batch: Future[Batch] = field(default_factory=Future)


class SharedReads:
    """The batches of `reader` that some of `num_takers` have and others do not have yet."""

    def __init__(self, reader: CacheReader, num_takers: int) -> None:
        self.reader = reader
        self._takers = set(range(num_takers))
        self._reads: dict[bytes, _Read] = {}
        self._lock = Lock()

    def take(self, taker: int, rows: np.ndarray) -> Batch:
        """The samples at `rows`, as CacheReader.read_batch gives them (and with its errors, to every taker)."""
        key = np.asarray(rows, np.int64).tobytes()
        with self._lock:
            read = self._reads.get(key)
            if is_first := read is None or taker not in read.waiting:  # or it asks again, for another epoch
                read = self._reads[key] = _Read(set(self._takers))
            assert read is not None
            self._strike(key, read, taker)
        if is_first:
            try:
                read.batch.set_result(self.reader.read_batch(rows))
            except BaseException as error:
                read.batch.set_exception(error)
        return read.batch.result()

    def leave(self, taker: int) -> None:
        """This one takes no more."""
        with self._lock:
            self._takers.discard(taker)
            for key, read in list(self._reads.items()):
                self._strike(key, read, taker)

    @property
    def num_held(self) -> int:
        """Batches that some takers do not have yet."""
        return len(self._reads)

    def _strike(self, key: bytes, read: _Read, taker: int) -> None:
        read.waiting.discard(taker)
        if not read.waiting:
            del self._reads[key]
