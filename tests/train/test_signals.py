import os
import signal
import subprocess
import sys
import time
from multiprocessing import active_children

import pytest

from dflash_cache.train.processes import Outcome, TrainingProcess
from dflash_cache.train.signals import SIGNALS, StopRequest

RUN = """
import sys, time
from dflash_cache.train.signals import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("asked", flush=True)
    if sys.argv[1] == "stuck":
        time.sleep(60)
print("ended in order", flush=True)
"""


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def start(how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_sigint_and_sigterm_are_the_signals() -> None:
    assert set(SIGNALS) == {signal.SIGINT, signal.SIGTERM}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_sets_requested_and_does_nothing_else(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        deadline = time.monotonic() + 5
        while not stop.requested and time.monotonic() < deadline:
            time.sleep(0.001)
        assert stop.requested


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGTERM])
def test_the_handlers_after_the_block_are_those_before_it(number: signal.Signals | None) -> None:
    before = handlers()
    with StopRequest():
        assert all(now != then for now, then in zip(handlers(), before, strict=True))
        if number is not None:
            signal.raise_signal(number)
    assert handlers() == before


def test_the_handlers_are_back_as_soon_as_a_signal_came_and_after_an_exception() -> None:
    before = handlers()
    with StopRequest():
        signal.raise_signal(signal.SIGTERM)
        assert handlers() == before
    with pytest.raises(KeyError), StopRequest():
        raise KeyError
    assert handlers() == before


def test_a_second_sigint_interrupts_at_once() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    try:
        interrupt_twice()
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt_twice() -> None:
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_asked_once_ends_in_order(number: signal.Signals) -> None:
    with start("willing") as process:
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "asked\nended in order\n")


def test_a_process_asked_twice_ends_at_once() -> None:
    with start("stuck") as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "asked\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (-signal.SIGTERM, "")


def test_ctrl_c_does_not_reach_a_training_process_even_while_it_starts() -> None:
    process = TrainingProcess(all, [[True]], 1, {})
    (child,) = active_children()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGINT)  # as a terminal sends it to all processes of a command
    assert process.end() == Outcome("complete")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
