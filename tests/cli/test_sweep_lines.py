"""The live line of a sweep, against figures counted by hand."""

import io
import math
from types import SimpleNamespace

import pytest
from cli.test_train_lines import screen_of
from rich.console import Console

from dflash_cli.sweep_lines import SweepConsole, SweepStatus


def make_run(name: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, config=SimpleNamespace(train=SimpleNamespace(log_every=2)))


def train_record(step: int, loss: float) -> dict:
    return {"kind": "train", "step": step, "num_steps": 4, "loss": loss, "seconds_left": 9.0}


def validation_record(step: int, score: float) -> dict:
    return {"kind": "validation", "step": step, "loss": 2.5, "acceptance_estimate": score}


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=100.0)


def test_a_terminal_has_each_validation_and_below_it_one_line_of_the_whole_sweep(clock) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100, highlight=False, markup=False)
    a, b, c = map(make_run, "abc")
    with SweepStatus([[a, b], [c]], terminal, lambda: clock.now) as status:
        shown = {run.name: SweepConsole(run, status) for run in (a, b, c)}

        def show(name: str, record: dict) -> list[str]:
            shown[name](record)
            status._line._live.refresh()
            return screen_of(terminal.file.getvalue())

        assert show("a", train_record(1, 6.0)) == ["0 of 3 runs done  step 1/4  loss 6.000"]
        clock.now += 2  # one step of one run took as long; left: 3 of a, 3 of b, 4 of c
        assert show("b", train_record(1, 5.0)) == ["0 of 3 runs done  step 1/4  0:20 left  loss 6.000/5.000"]
        clock.now += 10
        show("a", validation_record(4, 1.25))
        for name, step in (("a", 2), ("b", 2), ("a", 3), ("b", 3), ("a", 4)):
            show(name, train_record(step, 4.0))
        validated = "a  validation at step 4: loss 2.500, acceptance ~1.250"
        assert screen_of(terminal.file.getvalue()) == [
            validated,
            "1 of 3 runs done  step 4/4  0:10 left  loss 4.000  best ~1.250 a",  # 5 steps left, 12 s for 6
        ]
        show("b", train_record(4, 3.5))
        show("b", validation_record(4, 1.125))
        clock.now += 4  # 8 steps in 16 s, 3 left
        assert show("c", train_record(1, 3.0))[-1] == "2 of 3 runs done  step 1/4  0:06 left  loss 3.000  best ~1.250 a"
    assert screen_of(terminal.file.getvalue()) == [validated, "b  validation at step 4: loss 2.500, acceptance ~1.125"]


def test_a_sweep_that_goes_on_counts_what_earlier_sessions_did(clock) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100, highlight=False, markup=False)
    a, b, c, d, e = map(make_run, "abcde")
    with SweepStatus([[a, b, c], [d, e]], terminal, lambda: clock.now) as status:
        status.recall("a", train_record(4, 2.0), 1.5)  # complete
        status.recall("b", train_record(2, 2.25), 1.75)
        status.recall("c", None, -math.inf)
        status.recall("d", train_record(4, 2.5), 1.25)  # complete
        status.recall("e", train_record(1, 4.0), -math.inf)
        status.add("b", validation_record(2, 1.625))
        for name, step in (("b", 3), ("c", 1)):
            status.add(name, train_record(step, 3.0))
            clock.now += 2
        status.add("b", train_record(4, 3.0))  # 2 s a step; left: 3 of c, 3 of e
        status._line._live.refresh()
        assert screen_of(terminal.file.getvalue()) == [
            "3 of 5 runs done  step 4/4  0:12 left  loss 3.000  best ~1.750 b"
        ]


def test_a_file_has_plain_lines_every_few_steps() -> None:
    file = Console(file=io.StringIO(), width=80, highlight=False, markup=False)
    run = make_run("a")
    with SweepStatus([[run]], file) as status:
        shown = SweepConsole(run, status)
        for step in (1, 2, 3):
            shown(train_record(step, 4.0))
        shown(validation_record(3, 1.5))
    assert file.file.getvalue() == (
        "a  step 2/4  loss 4.000  0:09 left\na  validation at step 3: loss 2.500, acceptance ~1.500\n"
    )
