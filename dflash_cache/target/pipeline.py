"""The next forward runs while a thread of its own checks, sums and writes the states of the jobs before it.

The states go into a fixed number of reused host buffers, each of the largest job's size: that is the bound on memory,
and a forward waits when none is free. On the CPU the forward writes into the buffer itself; on a GPU the states
are copied on a stream of their own into pinned memory, and only the writing thread waits for the copy. Buffers are
taken last in, first out, so that no more are ever touched than the disk is behind. What is written does not depend on
any of it: the thread writes the jobs in the order of their forwards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from queue import LifoQueue, SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from dflash_cache.target.capture import capture_states
from dflash_cache.target.faults import find_faults
from dflash_cache.target.load import Target


@dataclass(frozen=True)
class Job:
    """One forward pass: its number, bucket, samples (S) int64, and the ids of each, int32."""

    number: int
    bucket: int
    samples: np.ndarray
    ids: list[np.ndarray]


@dataclass(frozen=True)
class JobStates:
    """A job's states (S, T, L, H) in a host buffer and the faults (S) found in them, once `ready` has come."""

    job: Job
    states_STLH: Tensor
    faults_S: Tensor
    ready: torch.cuda.Event | None

    def sample_states(self, place: int) -> Tensor:
        """States (length, L, H) of the job's sample at `place`; a view."""
        return self.states_STLH[place, : len(self.job.ids[place])]


class JobPipeline:
    """Forwards jobs here and calls `write` for each in one other thread; leaving the block waits for all writes.

    An exception of `write` ends the writing; it is raised by the next `forward`, or at the end of the block.
    `buffer_size` is in numbers of the target's dtype.
    """

    def __init__(self, target: Target, write: Callable[[JobStates], None], num_buffers: int, buffer_size: int) -> None:
        self._target = target
        self._write = write
        self._buffer_size = buffer_size
        self._free: LifoQueue[Tensor | None] = LifoQueue()
        for _ in range(num_buffers):
            self._free.put(None)  # allocated when first needed
        self._handed: SimpleQueue[tuple[JobStates, Tensor] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        on_gpu = target.device.type == "cuda"
        self._copies = torch.cuda.Stream(target.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._thread = Thread(target=self._write_all, name="writer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handed.put(None)
        try:
            self._thread.join()
        except BaseException as hurry:  # a second interruption: only the write under way is waited for
            self._failure = self._failure or hurry
            self._thread.join()
            raise
        if error is None:
            self._raise_failure()

    def forward(self, job: Job) -> None:
        """Run the job's forward and hand its states on; waits while no buffer is free."""
        buffer = self._free.get()
        self._raise_failure()
        if buffer is None:
            buffer = torch.empty(self._buffer_size, dtype=self._target.dtype, pin_memory=self._copies is not None)
        input_ids_ST, lengths_S = pad_ids(job.ids)
        shape = (*input_ids_ST.shape, len(self._target.layer_ids), self._target.config.hidden_size)
        room_STLH = buffer[: np.prod(shape)].view(shape)
        if self._copies is None:
            states_STLH = capture_states(self._target, input_ids_ST, lengths_S, room_STLH)
            handed = JobStates(job, states_STLH, find_faults(states_STLH, lengths_S), None)
        else:
            handed = self._fetch(job, input_ids_ST, lengths_S, room_STLH)
        self._handed.put((handed, buffer))

    def _fetch(self, job: Job, input_ids_ST: Tensor, lengths_S: Tensor, room_STLH: Tensor) -> JobStates:
        """Forward on a GPU and start the copy to the host. Not yet seen on a GPU."""
        assert self._copies is not None
        states_STLH = capture_states(self._target, input_ids_ST, lengths_S)
        faults_S = find_faults(states_STLH, lengths_S)
        host_faults_S = torch.empty(faults_S.shape, dtype=faults_S.dtype, pin_memory=True)
        self._copies.wait_stream(torch.cuda.current_stream(self._target.device))
        with torch.cuda.stream(self._copies):
            room_STLH.copy_(states_STLH, non_blocking=True)
            host_faults_S.copy_(faults_S, non_blocking=True)
        for tensor in (states_STLH, faults_S):  # their memory must not be given away before the copy is done
            tensor.record_stream(self._copies)
        return JobStates(job, room_STLH, host_faults_S, self._copies.record_event())

    def _write_all(self) -> None:
        """The thread's work; after a failure it only gives buffers back, so that no forward waits for ever."""
        while (entry := self._handed.get()) is not None:
            handed, buffer = entry
            try:
                if self._failure is None:
                    if handed.ready is not None:
                        handed.ready.synchronize()
                    self._write(handed)
            except BaseException as failure:  # raised again where the forwards are
                self._failure = failure
            self._free.put(buffer)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def pad_ids(ids: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Ids (S, T) int64, padded with 0 on the right, and lengths (S)."""
    lengths_S = torch.tensor([len(row) for row in ids])
    input_ids_ST = torch.zeros(len(ids), int(lengths_S.max()), dtype=torch.int64)
    for s, row in enumerate(ids):
        input_ids_ST[s, : len(row)] = torch.from_numpy(row.astype(np.int64))
    return input_ids_ST, lengths_S
