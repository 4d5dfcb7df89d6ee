"""How fast a run goes and what it takes: rates, waiting, time left and memory, for every step's record."""

import math
import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

WINDOW = 50  # steps: long enough for steps of all lengths, short enough to show a change
_UNITS = ("tokens", "samples", "blocks")


class Pace:
    """The last `WINDOW` steps of a run in this process; made when its first step begins.

    `clock` gives seconds that only grow.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._clock = clock
        self._began = clock()
        self._steps: deque[tuple[float, dict[str, Any]]] = deque(maxlen=WINDOW)

    def add(self, record: dict[str, Any]) -> dict[str, Any]:
        """Take in a step's record; the figures to be added to it.

        `…_per_second` are of passes and waiting, of which `wait_share` waits for data; `seconds_left` counts
        validations and checkpoints too; `memory_bytes` is the most that this rank has held: of its GPU's memory, or of
        the machine's where it computes on the CPU.
        """
        if len(self._steps) == WINDOW:
            self._began = self._steps[0][0]  # the step that is dropped ended when the others began
        self._steps.append((self._clock(), record))
        records = [each for _, each in self._steps]
        wait = math.fsum(each["wait"] for each in records)
        seconds = math.fsum(each["seconds"] for each in records) + wait
        a_step = (self._steps[-1][0] - self._began) / len(records)
        return {
            **{f"{unit}_per_second": sum(each[unit] for each in records) / seconds for unit in _UNITS},
            "wait_share": wait / seconds,
            "seconds_left": (record["num_steps"] - record["step"]) * a_step,
            "memory_bytes": peak_bytes(self._device),
        }


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has held: on the GPU, or on the machine if `device` is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
