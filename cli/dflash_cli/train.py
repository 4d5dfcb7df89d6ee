"""`dflash train`: the drafter, from the cache alone."""

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich.console import Console

from dflash_cache.config.loading import load_config
from dflash_cache.config.settings import Config
from dflash_cli.console import LiveLine, console
from dflash_cli.options import ConfigFile, Overrides
from dflash_cli.train_lines import StepTable, show_mix, show_percentages, show_status, show_step

if TYPE_CHECKING:
    from dflash_cache.train.metrics import Record, Sink


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def train(
        config: ConfigFile,
        overrides: Overrides = None,
        devices: Annotated[
            str | None,
            typer.Option(help="One rank a device: all (GPUs), 0,1 (these GPUs), or cpu:2.", show_default=False),
        ] = None,
        start: Annotated[
            Path | None,
            typer.Option(
                "--from",
                help="Start from an earlier drafter: a checkpoint, a run's folder, or one in z-lab's format.",
                show_default=False,
            ),
        ] = None,
    ) -> None:
        """Train a drafter from the cache; goes on where it was stopped."""
        overrides = [*(overrides or []), *([f"drafter.init_from={json.dumps(str(start))}"] if start else [])]
        settings = load_config(config, overrides)
        is_complete = train_drafter(settings).complete if devices is None else train_on_devices(settings, devices)
        if not is_complete:
            raise typer.Exit(130)  # what a shell says of a command that was interrupted


def train_on_devices(config: Config, devices: str) -> bool:
    """A rank a device, each in a process of its own; whether the run is complete. Raises RunError if one fails."""
    from dflash_cache.drafter.device import list_devices
    from dflash_cache.errors import RunError
    from dflash_cache.train.processes import train_on_ranks

    outcome = train_on_ranks(list_devices(devices, "--devices"), partial(train_rank, config))
    if outcome.status == "failed":
        raise RunError(outcome.error)
    is_complete = outcome.status == "complete"
    show_end(config, is_complete)
    return is_complete


def train_rank(config: Config, device: str) -> bool:
    """What one of these processes does; whether the run is complete."""
    settings = config.train.model_copy(update={"device": device})
    return train_drafter(config.model_copy(update={"train": settings}), is_whole=False).complete


def train_drafter(config: Config, is_whole: bool = True) -> "TrainConsole":
    """Train to the end, or until a signal stops it; under torchrun together with the other ranks.

    is_whole: whether it is all that the command does, so that its end is shown.
    All ranks take the first one's configuration: what `auto` became is measured, and might differ.
    """
    from dflash_cache.train.loop import train
    from dflash_cache.train.metrics import JsonLines, Wandb
    from dflash_cache.train.ranks import join_ranks

    shown = TrainConsole(config.train.log_every)
    with join_ranks(config.train.device) as ranks, ExitStack() as stack:
        config = ranks.gather(config)[0]
        run_dir = Path(config.run_dir)
        sinks: list[Sink] = []
        if ranks.is_first:
            sinks = [stack.enter_context(shown), stack.enter_context(JsonLines(run_dir / "log.jsonl"))]
            if config.wandb.mode != "disabled":
                sinks.append(stack.enter_context(Wandb(config)))
        shown.complete = train(config, sinks, ranks)
    if ranks.is_first and is_whole:
        show_end(config, shown.complete)
    return shown


def show_end(config: Config, is_complete: bool) -> None:
    """How far the run is, and where its last checkpoint lies."""
    from dflash_cache.train.checkpoint import latest_path

    saved = latest_path(Path(config.run_dir))
    if is_complete:
        console.print(f"Training is complete: {saved}", soft_wrap=True)
    else:
        where = f" with a checkpoint ({saved})" if saved else " before the first step"
        console.print(f"Stopped{where}; the same command goes on from there.", soft_wrap=True)


class TrainConsole:
    """A step every few steps: on a terminal a table's row, and below the table one live line of the last step.

    In a file two plain lines: loss, accuracy by slot, anchor acceptance, rates, time left; and how the step was mixed.
    All figures are the records'; beside them it sums up what the whole command did.
    """

    def __init__(self, log_every: int, shown_on: Console = console) -> None:
        self._log_every = log_every
        self._console = shown_on
        self._line = LiveLine(shown_on)
        self._table: StepTable | None = None
        self.complete = False
        self.tokens = 0
        self.blocks = 0
        self.seconds = 0.0
        self.waited = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.stop()

    def __call__(self, record: "Record") -> None:
        """Show a record if it is due."""
        if record["kind"] == "validation":
            self._console.print(
                f"validation at step {record['step']}: loss {record['loss']:.3f}, accuracy "
                f"{show_percentages(record['position_accuracy'])}, anchor acceptance "
                f"~{record['anchor_acceptance']:.3f}, acceptance ~{record['acceptance_estimate']:.3f}",
                soft_wrap=True,
            )
            return
        self.tokens += record["tokens"]
        self.blocks += record["blocks"]
        self.seconds += record["seconds"] + record["wait"]
        self.waited += record["wait"]
        if record["skipped"]:
            self._console.print(
                f"step {record['step']}: loss or gradient is not finite with samples {record['suspects']}; the step is "
                f"skipped, {record['num_skipped']} so far."
            )
        if record["step"] % self._log_every == 0 or record["step"] == record["num_steps"]:
            self._show_step(record)
        if self._line.has_place:
            self._line.show(show_status(record))

    def _show_step(self, record: "Record") -> None:
        if not self._line.has_place:
            self._console.print(show_step(record), soft_wrap=True)
            self._console.print(f"  {show_mix(record['batch'])}", soft_wrap=True)
            return
        if self._table is None:
            self._table = StepTable(record, self._console.width)
            self._console.print(self._table.head, style="bold", no_wrap=True)
        self._console.print(self._table.row(record), no_wrap=True)
