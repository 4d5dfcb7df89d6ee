"""`dflash verify`: what a cache holds, proven; damage ends with exit code 2."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
import typer

from dflash_cli.console import WorkProgress, console, show_bytes
from dflash_cli.options import AsJson

if TYPE_CHECKING:
    from dflash_cache.cache.verify import Report

LISTED = 12  # numbers of samples on a line


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def verify(
        cache: Annotated[Path, typer.Argument(metavar="CACHE", help="The cache's folder.")],
        full: Annotated[bool, typer.Option("--full", help="Read every byte, not only tables and headers.")] = False,
        repair: Annotated[
            bool, typer.Option("--repair", help="Take damaged samples out; `dflash generate` then redoes their jobs.")
        ] = False,
        threads: Annotated[int, typer.Option(min=1, help="Threads that read.")] = 2,
        as_json: AsJson = False,
    ) -> None:
        """Check that a cache is whole: its tables agree, its shards are there and, with --full, every byte is right."""
        report = check_cache(cache, full, threads, quiet=as_json)
        removed = None
        if repair and report.findings:
            from dflash_cache.cache.verify import repair as repair_cache

            removed = repair_cache(cache, report)
        if as_json:
            typer.echo(json.dumps(to_json(report) | {"removed_samples": removed}))
        else:
            show(cache, report, full, removed)
        if report.findings:
            raise typer.Exit(2)


def check_cache(cache: Path, full: bool, threads: int, quiet: bool) -> "Report":
    """The check, with its progress on the console."""
    from dflash_cache.cache.verify import verify

    if quiet or not full:
        return verify(cache, full, threads)
    with _ByteProgress() as progress:
        return verify(cache, full, threads, progress.update)


def to_json(report: "Report") -> dict[str, Any]:
    """The report for programs."""
    return {
        "whole": not report.findings,
        "num_samples": report.num_samples,
        "num_listed": report.num_listed,
        "num_shards": report.num_shards,
        "checked_bytes": report.checked_bytes,
        "damaged_samples": report.damaged_samples.tolist(),
        "findings": [
            {"place": finding.place, "reason": finding.reason, "samples": finding.samples.tolist()}
            for finding in report.findings
        ],
        "notes": report.notes,
    }


def show(cache: Path, report: "Report", full: bool, removed: int | None) -> None:
    """One line a finding, then the sum."""
    for finding in report.findings:
        samples = f", samples {_list(finding.samples)}" if len(finding.samples) else ""
        console.print(f"{finding.place}{samples}: {finding.reason.rstrip('.')}.", soft_wrap=True)
    for note in report.notes:
        console.print(f"Note: {note}", soft_wrap=True)
    checked = f"every byte checked ({show_bytes(report.checked_bytes)})" if full else "structure checked"
    held = f"{report.num_listed:,} of {report.num_samples:,} samples in {report.num_shards:,} shards, {checked}"
    if not report.findings:
        console.print(f"{cache} is whole: {held}.", soft_wrap=True)
        return
    console.print(
        f"{cache} is not whole: {len(report.findings):,} findings, {len(report.damaged_samples):,} damaged samples; "
        f"{held}.",
        soft_wrap=True,
    )
    if removed:
        console.print(f"{removed:,} samples are taken out with their jobs: run `dflash generate`, which redoes them.")
    elif removed is None and len(report.damaged_samples):
        console.print("`dflash verify --repair` takes them out, and `dflash generate` redoes them.")


def _list(samples: np.ndarray) -> str:
    shown = ", ".join(map(str, samples[:LISTED].tolist()))
    return shown if len(samples) <= LISTED else f"{shown}, … ({len(samples):,} in all)"


class _ByteProgress:
    """A bar in megabytes that begins when the total is known."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._shown: WorkProgress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def update(self, done: int, total: int) -> None:
        """Bytes read so far."""
        if self._shown is None:
            self._shown = self._stack.enter_context(WorkProgress("Verifying", total // 10**6, "MB"))
        self._shown.update(done // 10**6)
