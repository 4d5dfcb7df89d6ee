"""What all commands show alike: one console, progress with rate and time left, byte and count formats.

On a terminal progress is one live line; in a log file it is a plain line now and then.
"""

import time
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

SECONDS_BETWEEN_LINES = 10.0

# No markup: paths and data may hold brackets.
console = Console(highlight=False, markup=False)
errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


class WorkProgress:
    """Progress of one long piece of work, counted in `unit`; a context manager."""

    def __init__(self, title: str, total: int, unit: str) -> None:
        self.title, self._total, self._unit = title, total, unit
        self._started = self._last_line = time.monotonic()
        self._first: int | None = None
        self._is_ended = False
        self._live: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Self:
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._live = Progress(*columns, TimeRemainingColumn(), console=console)
            self._task = self._live.add_task(self.title, total=self._total, note="")
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, done: int, note: str = "") -> float:
        """`done` of the total is done; what was done before the first update does not count for the rate.

        Returns the seconds since the work began.
        """
        if self._first is None:
            self._first = done
        now = time.monotonic()
        seconds = max(1e-6, now - self._started)
        rate = (done - self._first) / seconds
        text = f"{rate:,.0f}" if rate >= 1 or not rate else f"{rate:.2g}"
        text = f"{text} {self._unit}/s {note}".rstrip()
        if self._live is not None:
            self._live.update(self._task, completed=done, note=text)
        elif not self._is_ended and (now - self._last_line >= SECONDS_BETWEEN_LINES or done >= self._total):
            left = (self._total - done) / rate if rate else 0.0
            ending = f", {show_seconds(left)} left" if rate or done >= self._total else ""
            console.print(f"{self.title}: {done:,} of {self._total:,} {self._unit}, {text}{ending}")
            self._last_line, self._is_ended = now, done >= self._total
        return seconds


class LiveLine:
    """One line at the foot of a terminal, from its first text until `stop`; `has_place`: whether it is a terminal."""

    def __init__(self, shown_on: Console) -> None:
        self.has_place = shown_on.is_terminal
        self._live = Live(console=shown_on, transient=True)

    def show(self, text: str) -> None:
        """Put the text in place of the last one; its end is cut off where it is wider than the terminal."""
        self._live.start()
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"))

    def stop(self) -> None:
        """Take the line away."""
        self._live.stop()


def show_bytes(count: float) -> str:
    """`1.5 GB`, decimal units as disks are sold in."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def show_count(count: float) -> str:
    """`1.5 M`, or the number itself below ten thousand."""
    if count < 10_000:
        return f"{count:,.0f}"
    for unit in ("k", "M", "G"):
        count /= 1000
        if count < 1000 or unit == "G":
            break
    return f"{count:.1f} {unit}"


def show_seconds(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
