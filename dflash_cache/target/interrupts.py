"""Interrupts of the first stage: SIGTERM ends it as Ctrl-C does, and Ctrl-C waits while a process starts."""

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
    """In the block Ctrl-C waits; for a process that is started in it, until `heed_interrupts`."""
    ensure_running()  # multiprocessing's helper: whoever starts it lets all signals through afterwards
    came: list[int] = []
    heard = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    if heard:  # the mask is this thread's alone: a signal that another one takes is kept for later
        handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if heard:
            signal.signal(signal.SIGINT, handler)
    if came:
        signal.raise_signal(signal.SIGINT)


def heed_interrupts() -> None:
    """Let a Ctrl-C that waits, and any later one, interrupt."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
