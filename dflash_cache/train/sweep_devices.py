"""A sweep's runs as processes of their own, one a device at a time; on the CPU they share its cores.

A run's process ends by itself, with a checkpoint, when the sweep's process is gone, however that ended.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.process import parent_process
from threading import Thread

import torch

from dflash_cache.config.sweep import Sweep, SweepRun
from dflash_cache.errors import ConfigError, DFlashError
from dflash_cache.train.loop import train
from dflash_cache.train.metrics import Sink
from dflash_cache.train.signals import StopRequest

OpenSinks = Callable[[SweepRun], AbstractContextManager[Sequence[Sink]]]
_STOPPED, _FAILED = 3, 2
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `complete`, `stopped` (the same sweep goes on with it), or `failed` with a sentence."""

    status: str
    error: str = ""


@dataclass(frozen=True)
class _Working:
    run: SweepRun
    device: str
    process: SpawnProcess
    told: Connection


def list_devices(text: str) -> list[str]:
    """`all` GPUs, `0,1`, or `cpu:2` as the devices of train.device. Raises ConfigError."""
    kind, _, number = text.partition(":")
    num_gpus = torch.cuda.device_count()
    if kind == "cpu" and (number.isdigit() or not number):
        devices = ["cpu"] * int(number or 1)
    else:
        places = [str(i) for i in range(num_gpus)] if text == "all" else text.split(",")
        if not all(place.isdigit() for place in places) or len(set(places)) < len(places):
            raise ConfigError(f"The sweep's devices {text!r} are none of all, 0,1 (numbers of GPUs) and cpu:2.")
        if missing := [place for place in places if int(place) >= num_gpus]:
            raise ConfigError(f"The sweep's devices name GPU {missing[0]}, but {num_gpus} are here: leave it out.")
        devices = [f"cuda:{int(place)}" for place in places]
    if not devices:
        raise ConfigError(f"The sweep's devices {text!r} name none (no GPU is here): use cpu:2, or mode: turns.")
    return devices


def train_on_devices(sweep: Sweep, open_sinks: OpenSinks) -> dict[str, Outcome]:
    """As many runs at a time as there are devices; a device that is free takes the next run."""
    free = list_devices(sweep.settings.devices)
    num_devices = len(free)
    outcomes = {run.name: Outcome("stopped") for run in sweep.runs}
    left, working = list(sweep.runs), list[_Working]()
    with StopRequest() as stop:
        while working or (left and not stop.requested):
            while left and free and not stop.requested:
                working.append(_start(left.pop(0), free.pop(0), num_devices, open_sinks))
            wait([one.process.sentinel for one in working], _POLL_SECONDS)
            for one in working:
                if stop.requested and one.process.is_alive():
                    one.process.terminate()
            for one in [one for one in working if not one.process.is_alive()]:
                working.remove(one)
                free.append(one.device)
                outcomes[one.run.name] = _end(one)
    return outcomes


def _start(run: SweepRun, device: str, num_devices: int, open_sinks: OpenSinks) -> _Working:
    context = get_context("spawn")  # a fork would not survive an initialised GPU
    told, tell = context.Pipe(duplex=False)
    settings = run.config.train.model_copy(update={"device": device})
    placed = SweepRun(run.name, run.changes, run.config.model_copy(update={"train": settings}))
    num_threads = max(1, torch.get_num_threads() // num_devices) if device == "cpu" else torch.get_num_threads()
    process = context.Process(target=_train_alone, args=(placed, num_threads, open_sinks, tell), name=run.name)
    process.start()
    tell.close()
    return _Working(run, device, process, told)


def _end(one: _Working) -> Outcome:
    one.process.join()
    code = one.process.exitcode
    error = one.told.recv() if one.told.poll() and code == _FAILED else ""
    one.told.close()
    if code == 0:
        return Outcome("complete")
    if code == _STOPPED:
        return Outcome("stopped")
    return Outcome("failed", error or f"its process ended with code {code}: run the sweep again, it goes on")


def _train_alone(run: SweepRun, num_threads: int, open_sinks: OpenSinks, tell: Connection) -> None:
    """What a run's process does; Ctrl-C reaches it through the sweep alone, so that it counts once."""
    os.setpgrp()
    Thread(target=_stop_with_parent, daemon=True).start()
    torch.set_num_threads(num_threads)
    try:
        with open_sinks(run) as sinks:
            complete = train(run.config, sinks)
    except DFlashError as error:
        tell.send(str(error))
        sys.exit(_FAILED)
    sys.exit(0 if complete else _STOPPED)


def _stop_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
