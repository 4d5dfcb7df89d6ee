"""Progress in a log file, by a clock that is told what time it is."""

import io

import pytest
from cli.test_train_lines import screen_of
from rich.console import Console

from dflash_cli import console
from dflash_cli.console import LiveLine, WorkProgress


@pytest.mark.parametrize(
    ("done", "line"),
    [
        (30, "Decoding: 30 of 40 prompts, 2 prompts/s, 0:07 left\n"),
        (3, "Decoding: 3 of 40 prompts, 0.15 prompts/s, 4:07 left\n"),
        (0, "Decoding: 0 of 40 prompts, 0 prompts/s\n"),
    ],
)
def test_a_rate_below_one_is_no_zero_and_without_one_no_time_is_left(capsys, monkeypatch, done, line) -> None:
    clock = iter([100.0, 100.0, 120.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with WorkProgress("Decoding", 40, "prompts") as progress:
        progress.update(0)
        progress.update(done)
    assert capsys.readouterr().out == line


def test_a_live_line_is_cut_at_the_terminals_width_and_gone_at_the_end() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=9)
    line = LiveLine(terminal)
    line.stop()  # before its first text, too
    for text in ("first", "a line of text"):
        line.show(text)
    line._live.refresh()
    assert screen_of(terminal.file.getvalue()) == ["a line o…"]
    line.stop()
    assert screen_of(terminal.file.getvalue()) == []


def test_the_end_is_told_once(capsys) -> None:
    with WorkProgress("Verifying", 0, "MB") as progress:
        for _ in range(3):
            progress.update(0)
    assert capsys.readouterr().out == "Verifying: 0 of 0 MB, 0 MB/s, 0:00 left\n"
