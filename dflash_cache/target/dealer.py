"""One deal of jobs to any number of workers: the next job, the next shard's number, and what all have done so far.

All of it is a few counters in a torch.distributed store: in this process for one worker, over TCP for several, the
launcher's under torchrun. Jobs are dealt one by one to whoever is free, so that none starves while another has a
queue; one request each, 0.1 ms. A store that is gone (its process was killed) ends the dealing like a stop.
"""

import time
from contextlib import suppress

import numpy as np
from torch.distributed import DistError, Store  # type: ignore[attr-defined]  # torch re-exports without saying so

_POLL_SECONDS = 0.1
_STOPPED = 1 << 60  # far behind any list


class StoppedError(Exception):
    """The process that deals is gone; whoever works commits what is whole and ends."""


class Dealer:
    """The counters; the process that prepares calls `begin`, after which any worker may ask.

    `place` is that of workers who are paused together, for they share a disk.
    """

    def __init__(self, store: Store, place: str = "") -> None:
        self._store = store
        self._paused = f"paused/{place}"
        self._jobs: np.ndarray | None = None

    def begin(self, jobs: np.ndarray, shard_numbers: list[int], num_tokens: int, num_bad: int) -> None:
        """Lay out the jobs to be done, in their order, and where each count begins."""
        for bucket, number in enumerate(shard_numbers):
            self._store.add(f"shard/{bucket}", number)
        self.pause(False)
        self._store.add("tokens", num_tokens)
        self._store.add("bad", num_bad)
        self._store.set("jobs", jobs.astype("<i8").tobytes())  # type: ignore[arg-type]  # bytes are taken too

    def next_job(self) -> int | None:
        """A job that nobody else has, or None if none is left or the run is stopped; waits while it is paused."""
        if self._jobs is None:
            self._jobs = np.frombuffer(self._store.get("jobs"), "<i8")
        while self._is_paused():
            time.sleep(_POLL_SECONDS)
        place = self._add("next", 1) - 1
        return int(self._jobs[place]) if place < len(self._jobs) else None

    def pause(self, is_paused: bool) -> None:
        """Deal no jobs until it is over: the storage is behind."""
        with suppress(DistError):  # without the store nothing is dealt anyway
            self._store.set(self._paused, "1" if is_paused else "0")

    def stop(self) -> None:
        """Deal no more jobs to anyone."""
        with suppress(StoppedError):
            self._add("next", _STOPPED)

    def next_shard(self, bucket: int) -> int:
        """A shard number of the bucket that nobody else has."""
        return self._add(f"shard/{bucket}", 1) - 1

    def add_tokens(self, num_tokens: int) -> int:
        """Count tokens as handed to a writer; returns those of all workers, and of earlier runs."""
        return self._add("tokens", num_tokens)

    def add_bad(self, num_samples: int) -> int:
        """Count bad samples; returns those of all workers, and of earlier runs."""
        return self._add("bad", num_samples)

    def add_answers(self, num_prompts: int) -> int:
        """Count prompts as answered; returns those of all workers."""
        return self._add("answers", num_prompts)

    def _is_paused(self) -> bool:
        try:
            return self._store.get(self._paused) == b"1"
        except DistError as error:
            raise StoppedError from error

    def _add(self, name: str, number: int) -> int:
        try:
            return self._store.add(name, number)
        except DistError as error:
            raise StoppedError from error
