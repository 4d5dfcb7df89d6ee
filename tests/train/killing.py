"""Kills `dflash` commands with SIGKILL at random instants, again and again, each time started anew.

A command is `dflash_cli`'s main in a process of its own, from the server that has imported torch. Half of the kills
come at any time from its start on, the other half a moment after a checkpoint began to be written.
"""

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from train.rank_runs import free_port, server

from dflash_cache.train import processes
from dflash_cli.__main__ import main

LONGEST_SAVE_SECONDS = 0.001  # of a tiny checkpoint, most of it until the disk has it
HANGS_SECONDS = 120.0


@dataclass
class Kills:
    """What happened: kills, those of them that left a checkpoint half written, and how often the command was done."""

    num_kills: int = 0
    num_in_a_save: int = 0
    finished: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Command:
    """`dflash …` in as many processes as it has ranks; its runs lie in `folder`, what it prints in `shown`."""

    arguments: Sequence[str]
    folder: Path
    num_ranks: int = 1

    @property
    def shown(self) -> Path:
        """What it printed since it was first started."""
        return self.folder.with_suffix(".txt")

    def start(self) -> list[BaseProcess]:
        """Its processes, as torchrun starts them if there are several."""
        port = free_port()
        places = [(rank, self.num_ranks, port) for rank in range(self.num_ranks)]
        started = [server.Process(target=_run, args=(list(self.arguments), self.shown, place)) for place in places]
        for process in started:
            process.start()
        return started

    def half_saved(self) -> set[str]:
        """Checkpoints in all runs' folders that are being written, or were when their writer was killed."""
        found = set()
        for place, folders, files in os.walk(self.folder):  # unlike a glob it minds no folder that vanishes meanwhile
            if place.endswith("/checkpoints"):
                names = (name for name in (*folders, *files) if name.startswith(".") and name.endswith(".partial"))
                found |= {f"{place}/{name}" for name in names}
        return found


def run_whole(command: Command) -> float:
    """Its seconds, undisturbed."""
    started = time.monotonic()
    assert _wait_for_end(command.start()) == [0] * command.num_ranks, command.shown.read_text()
    return time.monotonic() - started


def kill_until_done(make: Callable[[int], Command], seconds: float, num_kills: int, seed: int) -> Kills:
    """Kill `make(0)` until it is done in spite of it, then `make(1)` …, until there were enough kills of both kinds.

    `seconds`: what the command takes. The last command is left to end by itself.
    """
    dice, kills, number = random.Random(seed), Kills(), 0
    while kills.num_kills < num_kills or kills.num_in_a_save == 0:
        command = make(number)
        while not _killed_once(command, seconds, dice, kills):
            if kills.num_kills >= num_kills and kills.num_in_a_save:
                run_whole(command)
                break
        kills.finished.append(number)
        number += 1
    return kills


def _killed_once(command: Command, seconds: float, dice: random.Random, kills: Kills) -> bool:
    """Start it, and kill it at a random instant unless it ends before; whether it did."""
    before = command.half_saved()
    ranks = command.start()
    if dice.random() < 0.5:
        _wait(ranks, dice.uniform(0, seconds))
    else:
        _wait(ranks, HANGS_SECONDS, lambda: bool(command.half_saved() - before))
        _wait(ranks, dice.uniform(0, LONGEST_SAVE_SECONDS))
    victim = dice.choice(ranks)
    victim.kill()
    victim.join()
    for other in ranks:
        other.terminate()  # as torchrun does
    codes = _wait_for_end(ranks)
    if set(codes) == {0}:
        return True
    assert -signal.SIGKILL in codes, (codes, command.shown.read_text())
    kills.num_kills += 1
    kills.num_in_a_save += bool(command.half_saved() - before)
    return False


def _wait(ranks: list[BaseProcess], seconds: float, until: Callable[[], bool] = lambda: False) -> None:
    """Until so many seconds went by, something came true, or all have ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not until() and any(process.is_alive() for process in ranks):
        time.sleep(0.0002)


def _wait_for_end(ranks: list[BaseProcess]) -> list[int | None]:
    for process in ranks:
        process.join(HANGS_SECONDS)
        if process.is_alive():
            process.kill()
            raise TimeoutError("a command did not end")
    return [process.exitcode for process in ranks]


def _run(arguments: list[str], shown: Path, place: tuple[int, int, int]) -> None:
    torch.set_num_threads(1)
    descriptor = os.open(shown, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    processes.get_context = lambda _: multiprocessing.get_context("fork")  # its own processes, too, import nothing
    rank, num_ranks, port = place
    if num_ranks > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = ["dflash", *arguments]
    main()
