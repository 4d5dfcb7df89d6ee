"""`dflash train`: the drafter, from the cache alone."""

import json
from contextlib import ExitStack
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_cache.config.loading import load_config
from dflash_cache.config.settings import Config
from dflash_cli.console import console, show_seconds
from dflash_cli.options import ConfigFile, Overrides

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
        if devices is None:
            train_drafter(settings)
        else:
            train_on_devices(settings, devices)


def train_on_devices(config: Config, devices: str) -> None:
    """A rank a device, each in a process of its own. Raises RunError if one fails."""
    from dflash_cache.drafter.device import list_devices
    from dflash_cache.errors import RunError
    from dflash_cache.train.processes import train_on_ranks

    outcome = train_on_ranks(list_devices(devices, "--devices"), partial(train_rank, config))
    if outcome.status == "failed":
        raise RunError(outcome.error)


def train_rank(config: Config, device: str) -> bool:
    """What one of these processes does; whether the run is complete."""
    settings = config.train.model_copy(update={"device": device})
    return train_drafter(config.model_copy(update={"train": settings})).complete


def train_drafter(config: Config) -> "TrainConsole":
    """Train to the end, or until a signal stops it; under torchrun together with the other ranks.

    All ranks take the first one's configuration: what `auto` became is measured, and might differ.
    """
    from dflash_cache.train.checkpoint import latest_path
    from dflash_cache.train.loop import train
    from dflash_cache.train.metrics import JsonLines, Wandb
    from dflash_cache.train.ranks import join_ranks

    shown = TrainConsole(config.train.log_every)
    with join_ranks(config.train.device) as ranks, ExitStack() as stack:
        config = ranks.gather(config)[0]
        run_dir = Path(config.run_dir)
        sinks: list[Sink] = []
        if ranks.is_first:
            sinks = [shown, stack.enter_context(JsonLines(run_dir / "log.jsonl"))]
            if config.wandb.mode != "disabled":
                sinks.append(stack.enter_context(Wandb(config)))
        shown.complete = train(config, sinks, ranks)
    if ranks.is_first:
        saved = latest_path(run_dir)
        if shown.complete:
            console.print(f"Training is complete: {saved}")
        else:
            console.print(f"Stopped with a checkpoint ({saved}); the same command goes on from there.")
    return shown


class TrainConsole:
    """Two lines every few steps: loss, accuracy by slot, acceptance, rates, time left; and how the step was mixed."""

    def __init__(self, log_every: int) -> None:
        self._log_every = log_every
        self.complete = False
        self.tokens = 0
        self.blocks = 0
        self.seconds = 0.0
        self.waited = 0.0
        self._first_step: int | None = None

    def __call__(self, record: "Record") -> None:
        """Show a record if it is due."""
        if record["kind"] == "validation":
            console.print(
                f"validation at step {record['step']}: loss {record['loss']:.3f}, accuracy "
                f"{_percentages(record['position_accuracy'])}, acceptance ~{record['acceptance_estimate']:.3f}"
            )
            return
        step, num_steps = record["step"], record["num_steps"]
        if self._first_step is None:
            self._first_step = step - 1
        self.tokens += record["tokens"]
        self.blocks += record["blocks"]
        self.seconds += record["seconds"] + record["wait"]
        self.waited += record["wait"]
        if record["skipped"]:
            console.print(
                f"step {step}: loss or gradient is not finite with samples {record['suspects']}; the step is skipped, "
                f"{record['num_skipped']} so far."
            )
        if step % self._log_every and step != num_steps:
            return
        left = (num_steps - step) * self.seconds / (step - self._first_step)
        console.print(
            f"step {step}/{num_steps}  loss {record['loss']:.3f}  accuracy {_percentages(record['position_accuracy'])}"
            f"  acceptance ~{record['acceptance_estimate']:.2f}  lr {record['learning_rate']:.1e}"
            f"  norm {record['gradient_norm']:.2f}  {self.tokens / self.seconds:,.0f} tokens/s"
            f"  wait {100 * self.waited / self.seconds:.0f} %  {show_seconds(left)} left",
            soft_wrap=True,
        )
        console.print(f"  {show_mix(record['batch'])}", soft_wrap=True)


def show_mix(batch: "Record") -> str:
    """How the step was mixed, on one line.

    Micro-batches by bucket, of the step and of the epoch so far, and the step's distance from the whole epoch; longest
    run of one bucket; padding efficiency; lengths; the sampler's buffer; loss and accuracy by bucket.
    """
    step, running, losses, accuracies = (
        [batch[f"bucket_{bucket}_{name}"] for bucket in takewhile(lambda b: f"bucket_{b}_pct" in batch, count())]
        for name in ("pct", "running_pct", "loss", "accuracy")
    )
    return (
        f"mix {_join(step, '.0f')} % (so far {_join(running, '.0f')} %; KL {batch['kl']:.3f})"
        f"  run {batch['longest_run']}  {100 * batch['padding_efficiency']:.0f} % real"
        f"  length {batch['mean_length']:.0f}, {batch['max_length']} max"
        f"  buffer {batch['buffer_fill']:.0f}, {batch['ready']} ready"
        f"  by bucket: loss {_join(losses, '.2f')}, accuracy {_join(accuracies, '.0%')}"
    )


def _join(values: list[float | None], form: str) -> str:
    """`1.50/–/2.25`, a dash where there is no value."""
    return "/".join("–" if value is None else format(value, form) for value in values)


def _percentages(shares: list[float]) -> str:
    return "/".join(f"{100 * share:.0f}" for share in shares) + " %"
