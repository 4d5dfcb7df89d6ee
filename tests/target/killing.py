"""Kills `generate` with SIGKILL at random instants, again and again, each time resumed; a program of its own.

Each run is a fork of this warmed-up process, so a run costs no imports; the kill is real. Its arguments are a
configuration, the number of workers, of kills, and a seed. As often as a cache is finished, a new one is begun. It
prints one JSON object: the finished caches, and where each kill came.
"""

import json
import multiprocessing
import os
import random
import select
import signal
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflash_cache.cache.layout import manifest_path
from dflash_cache.config.loading import load_config
from dflash_cache.config.settings import Config
from dflash_cache.errors import CacheError
from dflash_cache.target import crew
from dflash_cache.target.generate import generate
from dflash_cache.target.observer import Estimate, Observer

_run_worker = crew._run_worker


def run_forked_worker(*arguments: Any) -> None:
    """A worker without the driver's sockets, as a spawned one is: else it waits for a dead driver's answer for ever."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # the listing's own
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.dup2(nothing, number)  # and not closed: the number stays taken
    _run_worker(*arguments)


crew.get_context = lambda _: multiprocessing.get_context("fork")  # type: ignore[assignment]  # no imports here either
crew._run_worker = run_forked_worker
FINISHED, FAILED, LOCKED = 0, 2, 3
HANGS_SECONDS = 120.0  # a run takes less than one


class Announce(Observer):
    """Tells the parent when the forwards begin."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def estimated(self, estimate: Estimate) -> None:
        os.write(self._pipe, b"!")


def start_run(config: Config) -> tuple[int, int]:
    """A forked run in a process group of its own; returns its pid and a pipe that announces the forwards."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    os.setpgid(0, 0)
    code = 1
    try:
        generate(config, Announce(writer))
        code = FINISHED
    except CacheError as error:
        code = LOCKED if "Another `dflash generate`" in str(error) else FAILED
    finally:
        os._exit(code)


def kill_some(pid: int, dice: random.Random) -> str:
    """Kill the run's whole group, or its first process alone, or one of its workers; returns which."""
    workers = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    which = dice.choice(["all", "driver", "worker"]) if workers else "all"
    with suppress(ProcessLookupError):
        if which == "all":
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(dice.choice(workers) if which == "worker" else pid, signal.SIGKILL)
    return which


def end_run(run: tuple[int, int], after: tuple[str, float] | None, dice: random.Random) -> tuple[int, str, float]:
    """Wait for a run's end, killing it `after` seconds from its start or from its forwards; code, victim, seconds."""
    pid, pipe = run
    victim, started = "", time.monotonic()
    if after is not None:
        if after[0] == "forwards":
            select.select([pipe], [], [])  # its end of file counts too
        deadline = time.monotonic() + after[1]
        while time.monotonic() < deadline and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.0005)
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            victim = kill_some(pid, dice)
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() - started > HANGS_SECONDS:
            os.killpg(pid, signal.SIGKILL)
            raise TimeoutError(f"a run did not end; {victim or 'nothing'} was killed")
        time.sleep(0.001)
    _, status = os.waitpid(pid, 0)
    os.close(pipe)
    return os.waitstatus_to_exitcode(status), victim, time.monotonic() - started


def measure_run(config: Config, dice: random.Random) -> tuple[float, float]:
    """Seconds of preparation and of the forwards of a run that nothing disturbs."""
    run = start_run(config)
    started = time.monotonic()
    select.select([run[1]], [], [])
    prepared = time.monotonic() - started
    code, _, _ = end_run(run, None, dice)
    assert code == FINISHED, code
    return prepared, time.monotonic() - started - prepared


def main(path: str, num_workers: int, num_kills: int, seed: int) -> None:
    """Kill until there were enough kills, then let the last cache be finished."""
    dice = random.Random(seed)
    base = load_config(Path(path))
    settings = base.generate.model_copy(update={"devices": f"cpu:{num_workers}"})

    def config(name: str) -> Config:
        return base.model_copy(update={"cache_dir": f"{base.cache_dir}-{name}", "generate": settings})

    generate(config("warm"), Observer())  # loads code that a fork would otherwise load each time
    prepared, worked = measure_run(config("whole"), dice)
    caches, victims, kills = [], [], 0
    while kills < num_kills or manifest_path(Path(caches[-1])).exists():
        current = config(f"killed-{len(caches)}")
        caches.append(current.cache_dir)
        code = 1
        while code != FINISHED:
            after = ("start", dice.uniform(0, prepared)) if dice.random() < 0.1 else (
                "forwards", dice.uniform(0, 0.7 * worked)
            )  # fmt: skip
            code, victim, _ = end_run(start_run(current), after if kills < num_kills else None, dice)
            if code == LOCKED:  # orphans are at their last job still
                time.sleep(0.01)
            elif victim and code != FINISHED:  # it was not done just then
                victims.append(victim)
                kills += 1
        if kills >= num_kills:
            break
    sys.stdout.write(json.dumps({"whole": config("whole").cache_dir, "caches": caches, "victims": victims}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:]))
