"""`dflash sweep`: many drafters over one cache."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dflash_cache.config.sweep import Sweep, SweepRun, load_sweep, shorten
from dflash_cli.console import console, errors
from dflash_cli.options import Overrides
from dflash_cli.sweep_lines import SweepConsole, SweepStatus

if TYPE_CHECKING:
    from dflash_cache.train.metrics import Sink
    from dflash_cache.train.processes import Outcome


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def sweep(
        config: Annotated[Path, typer.Argument(help="The sweep's YAML file.")], overrides: Overrides = None
    ) -> None:
        """Train many drafters from one cache, and rank them; goes on where it was stopped."""
        from dflash_cache.train.sweep_table import tabulate, write_sweep_table

        planned = load_sweep(config, overrides or [])
        outcomes = train_drafters(planned)
        rows = tabulate(planned, outcomes)
        show(planned, rows)
        console.print(f"The table is in {write_sweep_table(planned, rows)}.")
        for error, names in name_failures(rows).items():
            errors.print(f"{' and '.join(names)} failed: {error}")
        statuses = {outcome.status for outcome in outcomes.values()}
        if "stopped" in statuses:
            console.print("Stopped; the same command goes on from there.")
            raise typer.Exit(130)
        if "failed" in statuses:
            raise typer.Exit(2)


def train_drafters(planned: Sweep) -> dict[str, "Outcome"]:
    """All runs, with one live line for them on a terminal; those of processes of their own show plain lines."""
    from dflash_cache.train.checkpoint import best_score
    from dflash_cache.train.sweep import group_runs, run_sweep
    from dflash_cache.train.sweep_table import read_last_step

    if planned.settings.mode == "devices":
        return run_sweep(planned, open_sinks)
    with SweepStatus(group_runs(planned)) as status:
        for run in planned.runs:
            run_dir = Path(run.config.run_dir)
            status.recall(run.name, read_last_step(run_dir), best_score(run_dir))
        return run_sweep(planned, partial(open_sinks, status=status))


@contextmanager
def open_sinks(run: SweepRun, status: SweepStatus | None = None) -> Iterator[Sequence["Sink"]]:
    """Console, JSONL, and wandb where it is on; in whichever process trains the run."""
    from dflash_cache.train.metrics import JsonLines, Wandb

    with ExitStack() as stack:
        log = stack.enter_context(JsonLines(Path(run.config.run_dir) / "log.jsonl"))
        sinks: list[Sink] = [SweepConsole(run, status), log]
        if run.config.wandb.mode != "disabled":
            sinks.append(stack.enter_context(Wandb(run.config)))
        yield sinks


def name_failures(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The runs that failed, by their errors: many often have the same."""
    failures: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] == "failed":
            failures.setdefault(row["error"], []).append(row["name"])
    return failures


def show(planned: Sweep, rows: list[dict[str, Any]]) -> None:
    """The ranking."""
    changed = list(dict.fromkeys(key for run in planned.runs for key in run.changes))
    table = Table(box=None)
    for title in shorten(changed):
        table.add_column(title, overflow="fold")
    for title in ("status", "best step", "loss", "first slot", "acceptance"):
        table.add_column(title, justify="right", no_wrap=True)
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
