"""What `dflash train` shows, in a file and on a terminal, against the JSONL file's record of the same step."""

import io
import json
import os
import re
import signal
import threading
import time

import pytest
from rich.console import Console

from dflash_cli import evaluate, train
from dflash_cli.train import TrainConsole
from dflash_cli.train_lines import show_mix

IN_EVERY_RECORD = {"micro_batches", "padding_efficiency", "mean_length", "max_length", "kl", "longest_run",
                   "buffer_fill", "ready"}  # fmt: skip

OF_A_BUCKET = ("loss", "accuracy", "anchor_acceptance")


def test_every_step_is_logged_whole_and_every_so_many_th_is_shown_with_how_it_was_mixed(dflash, project) -> None:
    assert dflash("generate", project).code == 0
    trained = dflash("train", project, "--set", "train.max_steps=4")
    assert trained.code == 0, trained.err
    lines = (project.parent / "run" / "log.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    per_bucket = {f"bucket_{b}_{name}" for b in range(3) for name in ("pct", "running_pct", *OF_A_BUCKET)}
    for record in records:
        assert record["batch"].keys() == IN_EVERY_RECORD | per_bucket
    shown = [line.strip() for line in trained.out.splitlines() if line.startswith("  mix ")]
    assert shown == [show_mix(record["batch"]) for record in records if record["step"] % 2 == 0]


def test_the_line_of_a_step_is_the_one_written_by_hand() -> None:
    batch = {
        "bucket_0_pct": 25.0, "bucket_1_pct": 75.0, "bucket_0_running_pct": 30.4, "bucket_1_running_pct": 69.6,
        "bucket_0_loss": None, "bucket_1_loss": 2.345, "bucket_0_accuracy": None, "bucket_1_accuracy": 0.5,
        "kl": 0.0123, "longest_run": 3, "padding_efficiency": 0.953, "mean_length": 310.4, "max_length": 512,
        "buffer_fill": 10.2, "ready": 4,
    }  # fmt: skip
    assert show_mix(batch) == (
        "mix 25/75 % (so far 30/70 %; KL 0.012)  run 3  95 % real  length 310, 512 max  buffer 10, 4 ready  "
        "by bucket: loss –/2.35, accuracy –/50%"
    )


def record(step: int, **changes: object) -> dict:
    """A step's record as `take_step` and `Pace` make it."""
    batch = {"bucket_0_pct": 25.0, "bucket_1_pct": 75.0, "bucket_0_loss": None, "bucket_1_loss": 2.345,
             "bucket_0_anchor_acceptance": None, "bucket_1_anchor_acceptance": 1.5}  # fmt: skip
    return {
        "kind": "train", "step": step, "num_steps": 4, "loss": 3.25, "position_accuracy": [0.51, 0.2],
        "anchor_acceptance": 1.614, "learning_rate": 6e-4, "gradient_norm": 0.5, "noise": 0.0, "tokens": 10,
        "blocks": 5, "seconds": 1.0, "wait": 1.0, "skipped": False, "tokens_per_second": 12_345.0,
        "samples_per_second": 40.26, "wait_share": 0.5, "seconds_left": 75.0, "memory_bytes": 1_500_000_000,
        "batch": batch,
    } | changes  # fmt: skip


def screen_of(written: str) -> list[str]:
    """The lines that a terminal shows after these characters: a line fed, erased, gone up to; colours do nothing."""
    lines, place = [""], 0
    for text, control in re.findall(r"([^\x1b\r\n]*)(\x1b\[[0-9;?]*[a-zA-Z]|\r|\n|$)", written):
        lines[place] += text
        if control == "\n":
            place += 1
            lines += [""] * (place == len(lines))
        elif control == "\x1b[2K":
            lines[place] = ""
        elif control.endswith("A"):
            place -= int(control[2:-1])
    return [line.rstrip() for line in lines if line.strip()]


def test_a_terminal_has_a_row_every_few_steps_and_below_it_one_line_of_the_last_step() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=200, highlight=False, markup=False)
    head = (
        "step    loss  per anchor       lr    norm  tokens/s  samples/s   wait     left    memory  noise  "
        "right by slot  % by bucket  loss by bucket  per anchor by bucket"
    )
    rows = [
        f"   {step}   3.250       ~1.61  6.0e-04    0.50    12.3 k       40.3   50 %     1:15    1.5 GB  0.000        "
        "51/20 %        25/75          –/2.35                –/1.50"
        for step in (2, 4)
    ]
    with TrainConsole(log_every=2, shown_on=terminal) as shown:
        for step in (1, 2, 3, 4):
            shown(record(step))
            shown._line._live.refresh()
            done = f"step {step}/4  1:15 left  loss 3.250  anchor acceptance ~1.61"
            status = f"{done}  12.3 k tokens/s  wait 50 %  lr 6.0e-04  1.5 GB"
            table = [head, *rows[: step // 2]] if step > 1 else []
            assert screen_of(terminal.file.getvalue()) == [*table, status]
    assert screen_of(terminal.file.getvalue()) == [head, *rows]
    assert (shown.tokens, shown.blocks, shown.seconds, shown.waited) == (40, 20, 8.0, 4.0)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_narrow_terminal_has_the_columns_that_fit_whole_on_one_line(width) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=width, highlight=False, markup=False)
    with TrainConsole(log_every=1, shown_on=terminal) as shown:
        for step in (1, 2):
            shown(record(step, loss=10.0 * step))
    head, *rows = screen_of(terminal.file.getvalue())
    assert [row.split()[:2] for row in rows] == [["1", "10.000"], ["2", "20.000"]]
    assert len(head) == len(rows[0]) <= width
    assert head.split()[:5] == ["step", "loss", "per", "anchor", "lr"]


def test_a_file_has_the_plain_line_and_nothing_that_steers_a_terminal(monkeypatch) -> None:
    file = Console(file=io.StringIO(), width=80, highlight=False, markup=False)
    monkeypatch.setattr(train, "show_mix", lambda batch: "how it was mixed")
    with TrainConsole(log_every=2, shown_on=file) as shown:
        for step in (1, 2, 3):
            shown(record(step))
    assert file.file.getvalue() == (
        "step 2/4  loss 3.250  accuracy 51/20 %  anchor acceptance ~1.61  lr 6.0e-04  norm 0.50  12,345 tokens/s  "
        "wait 50 %  1.5 GB  1:15 left\n  how it was mixed\n"
    )


def test_a_validation_shows_what_random_anchors_and_what_decoding_would_accept() -> None:
    file = Console(file=io.StringIO(), width=80, highlight=False, markup=False)
    with TrainConsole(log_every=2, shown_on=file) as shown:
        shown({"kind": "validation", "step": 100, "loss": 5.6734, "position_accuracy": [0.17, 0.07],
               "anchor_acceptance": 1.7211, "acceptance_estimate": 1.3194})  # fmt: skip
    assert file.file.getvalue() == (
        "validation at step 100: loss 5.673, accuracy 17/7 %, anchor acceptance ~1.721, acceptance ~1.319\n"
    )


def test_a_run_that_is_stopped_says_where_its_checkpoint_is_and_the_exit_code_stops_a_script(dflash, project) -> None:
    assert dflash("generate", project).code == 0
    log = project.parent / "run" / "log.jsonl"

    def interrupt() -> None:
        while not (log.exists() and log.read_text().count("\n") >= 2):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    stopped = dflash("train", project, "--set", "train.epochs=100")
    assert stopped.code == 130
    last = max((project.parent / "run" / "checkpoints").glob("step-*.pt"))
    assert stopped.out.endswith(f"Stopped with a checkpoint ({last}); the same command goes on from there.\n")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train", "Stopped; what was committed is kept, and the same command goes on from there.\n"),
        ("eval", "Stopped.\n"),
    ],
)
def test_a_command_that_is_interrupted_before_it_can_stop_in_order_says_so(
    dflash, project, monkeypatch, command, said
) -> None:
    module = train if command == "train" else evaluate
    monkeypatch.setattr(module, "load_config", lambda *_: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        stopped = dflash(command, project)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (stopped.code, stopped.err) == (130, said)
