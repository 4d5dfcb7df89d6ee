"""SIGTERM ends the first stage as Ctrl-C does: what is whole is committed, then the process ends."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
