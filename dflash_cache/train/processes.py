"""Training in processes of their own: the runs of a sweep, or the ranks of one run, a device each.

A signal to the process that started them reaches each exactly once, so that they end in order, with a checkpoint; and
when that process is gone, however it ended, they end in the same way. On the CPU they share its cores.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import parent_process
from multiprocessing.resource_tracker import ensure_running
from threading import Thread
from typing import Any

import torch

from dflash_cache.errors import DFlashError
from dflash_cache.train.signals import StopRequest

_FAILED, _STOPPED = 2, 3
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 30.0  # for a rank to see that another is gone, as torchrun grants it


@dataclass(frozen=True)
class Outcome:
    """How training ended: `complete`, `stopped` (the same command goes on with it), or `failed` with a sentence."""

    status: str
    error: str = ""


class TrainingProcess:
    """`train(*arguments)` in a new process, where `environment` is set; it returns whether the run is complete."""

    def __init__(
        self, train: Callable[..., bool], arguments: Sequence[Any], num_threads: int, environment: dict[str, str]
    ) -> None:
        context = get_context("spawn")  # a fork would not survive an initialised GPU
        self._told, tell = context.Pipe(duplex=False)
        self._process = context.Process(target=_train, args=(train, arguments, num_threads, environment, tell))
        self._stopping = False
        ensure_running()  # starting it would unblock the signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # inherited: Ctrl-C may come while it imports
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        tell.close()

    @property
    def sentinel(self) -> int:
        """What `multiprocessing.connection.wait` takes."""
        return self._process.sentinel

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.is_alive()

    def stop(self) -> None:
        """Ask it to end with a checkpoint; asked again it goes on ending."""
        if not self._stopping:
            self._stopping = True
            self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def end(self) -> Outcome:
        """Wait until it has ended."""
        self._process.join()
        code = self._process.exitcode
        error = self._told.recv() if code == _FAILED and self._told.poll() else ""
        self._told.close()
        if self._stopping and code == -signal.SIGTERM:  # asked before its first step
            return Outcome("stopped")
        if code in (0, _STOPPED):
            return Outcome("complete" if code == 0 else "stopped")
        return Outcome(
            "failed", error or f"Its process ended with code {code}: run the same command again, it goes on."
        )


def wait_for_any(processes: Sequence[TrainingProcess], stop: StopRequest) -> list[TrainingProcess]:
    """Those that have ended, after a moment at most; a stop request is passed on to the others."""
    if stop.requested:
        for process in processes:
            process.stop()
    wait([process.sentinel for process in processes], _POLL_SECONDS)
    return [process for process in processes if not process.is_alive]


def threads_for(device: str, num_devices: int) -> int:
    """Threads of one of `num_devices` processes."""
    return max(1, torch.get_num_threads() // num_devices) if device == "cpu" else torch.get_num_threads()


def train_on_ranks(devices: Sequence[str], train: Callable[[str], bool]) -> Outcome:
    """`train(device)` on a rank a device, as torchrun would start them on one machine.

    When a rank dies, the others end by themselves (see `ranks`), or, if they have not met yet or their network does
    not tell them, are ended; the error is that of the one that ended first.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = {"WORLD_SIZE": str(len(devices)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with StopRequest() as stop:
        left = [
            TrainingProcess(
                train,
                [device],
                threads_for(device, len(devices)),
                {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank, device in enumerate(devices)
        ]
        outcomes: list[Outcome] = []
        deadline = float("inf")
        while left:
            for process in wait_for_any(left, stop):
                left.remove(process)
                outcomes.append(process.end())
            if deadline == float("inf") and any(outcome.status == "failed" for outcome in outcomes):
                deadline = time.monotonic() + _GRACE_SECONDS
                for process in left:
                    process.stop()
            if time.monotonic() > deadline:
                for process in left:
                    process.kill()
    by_status = {outcome.status: outcome for outcome in reversed(outcomes)}
    return by_status.get("failed") or by_status.get("stopped") or outcomes[0]


def _train(
    train: Callable[..., bool],
    arguments: Sequence[Any],
    num_threads: int,
    environment: dict[str, str],
    tell: Connection,
) -> None:
    os.setpgrp()  # Ctrl-C in the terminal reaches it through its parent alone, so that it counts once
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # and what came before this line is forgotten
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    os.environ |= environment
    Thread(target=_stop_with_parent, daemon=True).start()
    torch.set_num_threads(num_threads)
    try:
        complete = train(*arguments)
    except DFlashError as error:
        tell.send(str(error))
        sys.exit(_FAILED)
    sys.exit(0 if complete else _STOPPED)


def _stop_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
