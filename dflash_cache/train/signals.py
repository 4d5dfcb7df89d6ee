"""Stopping in order: SIGINT and SIGTERM end the run after the step under way, with a checkpoint.

A second signal is not caught and ends the process at once; what was saved before is whole in any case.
"""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Inside its block, `requested` tells whether a signal asked to stop."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
