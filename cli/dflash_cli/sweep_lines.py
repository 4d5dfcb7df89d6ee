"""What a sweep shows while it trains: lines of its runs, and on a terminal one live line of the whole sweep below."""

import math
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Self

from rich.console import Console

from dflash_cache.config.sweep import SweepRun
from dflash_cli.console import LiveLine, console, show_seconds

if TYPE_CHECKING:
    from dflash_cache.train.metrics import Record


class SweepConsole:
    """One run's lines: each validation's acceptance, and every few steps its loss and time left, unless `status` does.

    Without a status they are plain lines: those of a process of its own.
    """

    def __init__(self, run: SweepRun, status: "SweepStatus | None" = None) -> None:
        self._name = run.name
        self._log_every = run.config.train.log_every
        self._status = status
        self._console = console if status is None else status.console

    def __call__(self, record: "Record") -> None:
        """Show a record if it is due."""
        if record["kind"] == "validation":
            self._console.print(
                f"{self._name}  validation at step {record['step']}: loss {record['loss']:.3f}, "
                f"acceptance ~{record['acceptance_estimate']:.3f}",
                soft_wrap=True,
            )
        elif (self._status is None or not self._status.is_live) and self._is_due(record):
            self._console.print(
                f"{self._name}  step {record['step']}/{record['num_steps']}  loss {record['loss']:.3f}  "
                f"{show_seconds(record['seconds_left'])} left",
                soft_wrap=True,
            )
        if self._status is not None:
            self._status.add(self._name, record)

    def _is_due(self, record: "Record") -> bool:
        return bool(record["step"] % self._log_every == 0 or record["step"] == record["num_steps"])


class SweepStatus:
    """The live line of a sweep whose groups of runs are trained one after the other, each group step by step in turn.

    How many runs are done, the step and the losses of those under way, the time left of all, and the best validation,
    each with what earlier sessions did (`recall`). A run that has not begun is taken to have as many steps as the one
    that took the last step. `clock` gives seconds.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[SweepRun]],
        shown_on: Console = console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = shown_on
        self._groups = [[run.name for run in group] for group in groups]
        self._clock = clock
        self._line = LiveLine(shown_on)
        self._last: dict[str, Record] = {}
        self._best: tuple[float, str] = -math.inf, ""
        self._began = 0.0
        self._num_taken = -1  # steps of all runs since the first record, which comes when one is over

    @property
    def is_live(self) -> bool:
        """Whether it is a terminal that shows it."""
        return self._line.has_place

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.stop()

    def recall(self, name: str, last: "Record | None", score: float) -> None:
        """Before any record: the last step of the run `name` in earlier sessions, and its best validation (or −inf)."""
        if last is not None:
            self._last[name] = last
        self._rank(name, score)

    def add(self, name: str, record: "Record") -> None:
        """Take in a record of the run `name`."""
        if not self.is_live:
            return
        if record["kind"] == "validation":
            self._rank(name, record["acceptance_estimate"])
            return
        if self._num_taken < 0:
            self._began = self._clock()
        self._num_taken += 1
        self._last[name] = record
        self._line.show(self._describe(name))

    def _rank(self, name: str, score: float) -> None:
        if score > self._best[0]:
            self._best = score, name

    def _describe(self, name: str) -> str:
        place = next(number for number, group in enumerate(self._groups) if name in group)
        record = self._last[name]
        num_runs = sum(map(len, self._groups))
        left = {each: self._last.get(each) for each in chain(*self._groups[place:])}  # the groups before are done
        steps_left = {
            each: record["num_steps"] if last is None else last["num_steps"] - last["step"]
            for each, last in left.items()
        }
        going = [last for each in self._groups[place] if steps_left[each] and (last := left[each]) is not None]
        parts = [f"{num_runs - sum(map(bool, steps_left.values()))} of {num_runs} runs done"]
        parts.append(f"step {record['step']}/{record['num_steps']}")
        if self._num_taken:
            seconds = sum(steps_left.values()) * (self._clock() - self._began) / self._num_taken
            parts.append(f"{show_seconds(seconds)} left")
        parts.append(f"loss {'/'.join(format(each['loss'], '.3f') for each in going or [record])}")
        if self._best[1]:
            parts.append(f"best ~{self._best[0]:.3f} {self._best[1]}")
        return "  ".join(parts)
