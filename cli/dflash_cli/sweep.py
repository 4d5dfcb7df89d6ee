"""`dflash sweep`: many drafters over one cache."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dflash_cache.config.sweep import Sweep, SweepRun, load_sweep
from dflash_cli.console import console, errors, show_seconds

if TYPE_CHECKING:
    from dflash_cache.train.metrics import Record, Sink


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def sweep(config: Annotated[Path, typer.Argument(help="The sweep's YAML file.")]) -> None:
        """Train many drafters from one cache, and rank them; goes on where it was stopped."""
        from dflash_cache.train.sweep import run_sweep
        from dflash_cache.train.sweep_table import tabulate, write_sweep_table

        planned = load_sweep(config)
        outcomes = run_sweep(planned, open_sinks)
        rows = tabulate(planned, outcomes)
        show(planned, rows)
        console.print(f"The table is in {write_sweep_table(planned, rows)}.")
        for row in rows:
            if row["status"] == "failed":
                errors.print(f"{row['name']} failed: {row['error']}")
        statuses = {outcome.status for outcome in outcomes.values()}
        if "stopped" in statuses:
            console.print("Stopped; the same command goes on from there.")
            raise typer.Exit(130)
        if "failed" in statuses:
            raise typer.Exit(2)


@contextmanager
def open_sinks(run: SweepRun) -> Iterator[Sequence["Sink"]]:
    """Console, JSONL, and wandb where it is on; in whichever process trains the run."""
    from dflash_cache.train.metrics import JsonLines, Wandb

    with ExitStack() as stack:
        log = stack.enter_context(JsonLines(Path(run.config.run_dir) / "log.jsonl"))
        sinks: list[Sink] = [SweepConsole(run), log]
        if run.config.wandb.mode != "disabled":
            sinks.append(stack.enter_context(Wandb(run.config)))
        yield sinks


class SweepConsole:
    """One run's lines: its name, step, loss and time left, and each validation's acceptance."""

    def __init__(self, run: SweepRun) -> None:
        self._name = run.name
        self._log_every = run.config.train.log_every

    def __call__(self, record: "Record") -> None:
        """Show a record if it is due."""
        if record["kind"] == "validation":
            console.print(
                f"{self._name}  validation at step {record['step']}: loss {record['loss']:.3f}, "
                f"acceptance ~{record['acceptance_estimate']:.3f}",
                soft_wrap=True,
            )
            return
        step, num_steps = record["step"], record["num_steps"]
        if step % self._log_every and step != num_steps:
            return
        console.print(
            f"{self._name}  step {step}/{num_steps}  loss {record['loss']:.3f}  "
            f"{show_seconds(record['seconds_left'])} left",
            soft_wrap=True,
        )


def show(planned: Sweep, rows: list[dict[str, Any]]) -> None:
    """The ranking."""
    changed = list(dict.fromkeys(key for run in planned.runs for key in run.changes))
    table = Table(box=None)
    for title in (*changed, "status", "step", "loss", "first slot", "acceptance"):
        table.add_column(title, justify="left" if title in changed else "right")
    for row in rows:
        measured = row["acceptance_estimate"] is not None
        figures = (
            [
                str(row["step"]),
                f"{row['loss']:.3f}",
                f"{100 * row['accuracy_1']:.1f} %",
                f"~{row['acceptance_estimate']:.3f}",
            ]
            if measured
            else ["–"] * 4
        )
        table.add_row(*(str(row.get(key, "–")) for key in changed), row["status"], *figures)
    console.print(table)
