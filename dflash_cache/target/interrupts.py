"""SIGTERM ends the first stage as Ctrl-C does: what is whole is committed, then the process ends.

Ctrl-C in a terminal reaches every process of a command; one that is still importing gets it when it is ready.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.resource_tracker import ensure_running
from types import FrameType


@contextmanager
def terminate_like_interrupt() -> Iterator[None]:
    """In the block, the first SIGTERM raises KeyboardInterrupt; a second one ends the process at once."""
    if threading.current_thread() is not threading.main_thread():  # Python takes signals there alone
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """In the block Ctrl-C waits; a process started there inherits that, and calls `take_interrupts` when ready."""
    ensure_running()  # of multiprocessing: starting it would let them through
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        take_interrupts()


def take_interrupts() -> None:
    """Take what waited, and all that comes: as KeyboardInterrupt."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
