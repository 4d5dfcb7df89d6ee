"""`dflash verify`: what a cache holds, proven; damage ends with exit code 2."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
import typer
from rich.table import Table

from dflash_cache.cache.layout import place_of
from dflash_cli.console import WorkProgress, console, show_bytes
from dflash_cli.options import AsJson, Cache

if TYPE_CHECKING:
    from dflash_cache.cache.verify import Report
    from dflash_cache.target.recheck import Recheck

LISTED = 12  # numbers of samples on a line


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def verify(
        cache: Cache,
        full: Annotated[bool, typer.Option("--full", help="Read every byte, not only tables and headers.")] = False,
        repair: Annotated[
            bool, typer.Option("--repair", help="Take damaged samples out; `dflash generate` then redoes their jobs.")
        ] = False,
        against_target: Annotated[
            int, typer.Option("--against-target", metavar="N", min=0, help="Compute N random samples again.")
        ] = 0,
        target: Annotated[
            str | None, typer.Option(help="The target's folder or name.", show_default="the manifest's")
        ] = None,
        device: Annotated[str, typer.Option(help="Where the target runs.")] = "auto",
        device_map: Annotated[
            str | None, typer.Option(help="auto: spread a target too large for one device over all of them.")
        ] = None,
        trust_remote_code: Annotated[
            bool, typer.Option("--trust-remote-code", help="Run the target's own Python code.")
        ] = False,
        allow_pickle: Annotated[
            bool, typer.Option("--allow-pickle", help="Take the target's weights from pytorch_model.bin.")
        ] = False,
        seed: Annotated[int, typer.Option(min=0, help="Which samples are computed again.")] = 0,
        threads: Annotated[int, typer.Option(min=1, help="Threads that read.")] = 2,
        as_json: AsJson = False,
    ) -> None:
        """Check that a cache is whole: its tables agree, its shards are there and, with --full, every byte is right.

        With --against-target also that its states are right: those that the target computes.
        """
        report = check_cache(cache, full, threads, quiet=as_json)
        removed = repair_cache(cache, report, quiet=as_json) if repair and report.findings else None
        if not as_json:
            show(cache, report, full, removed)
        rechecked = None
        if against_target and report.num_listed and not len(report.damaged_samples):
            with _Bar("Computing again", "samples", 1) as bar:
                place = Place(target, device, device_map, trust_remote_code, allow_pickle)
                rechecked = recheck_cache(
                    cache, against_target, place, seed, (lambda *_: None) if as_json else bar.update
                )
            if not as_json:
                show_recheck(rechecked)
        elif against_target and not as_json:
            console.print("Nothing is computed again: repair the cache and run `dflash generate` first.")
        if as_json:
            found = {"removed_samples": removed, "against_target": asdict(rechecked) if rechecked else None}
            typer.echo(json.dumps(to_json(report) | found))
        if report.findings or (rechecked is not None and not rechecked.is_right):
            raise typer.Exit(2)


@dataclass(frozen=True)
class Place:
    """The target that computes again (None: the manifest's), and where it runs."""

    model: str | None
    device: str
    device_map: str | None
    trust_remote_code: bool = False  # never taken from the manifest: who made the cache may not decide it
    allow_pickle: bool = False


def recheck_cache(
    cache: str, num_samples: int, place: Place, seed: int, progress: Callable[[int, int], None]
) -> "Recheck":
    """Random samples computed again in the cache's dtype."""
    from dflash_cache.cache.reader import CacheReader
    from dflash_cache.config.settings import TargetSettings
    from dflash_cache.target.load import load_target
    from dflash_cache.target.recheck import recheck

    with CacheReader(cache) as reader:
        manifest = reader.manifest
        settings = TargetSettings(
            model=place.model or manifest.target_model,
            revision=manifest.target_revision if place.model is None else None,
            dtype=manifest.dtype,
            device=place.device,
            device_map=place.device_map,
            trust_remote_code=place.trust_remote_code,
            allow_pickle=place.allow_pickle,
            layer_ids=manifest.layer_ids,
        )
        return recheck(reader, load_target(settings), num_samples, seed, progress)


def repair_cache(cache: str, report: "Report", quiet: bool) -> int:
    """Take what is damaged out of the cache."""
    from dflash_cache.cache.repair import repair

    return repair(cache, report, (lambda _: None) if quiet else console.print)


def check_cache(cache: str, full: bool, threads: int, quiet: bool) -> "Report":
    """The check, with its progress on the console."""
    from dflash_cache.cache.verify import verify

    if quiet or not full:
        return verify(cache, full, threads)
    with _Bar("Verifying", "MB", 10**6) as bar:
        return verify(cache, full, threads, bar.update)


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


def show(cache: str, report: "Report", full: bool, removed: int | None) -> None:
    """One line a finding, then the sum."""
    for finding in report.findings:
        samples = f", samples {_list(finding.samples)}" if len(finding.samples) else ""
        console.print(f"{finding.place}{samples}: {finding.reason.rstrip('.')}.", soft_wrap=True)
    for note in report.notes:
        console.print(f"Note: {note}", soft_wrap=True)
    checked = f"every byte checked ({show_bytes(report.checked_bytes)})" if full else "structure checked"
    held = f"{report.num_listed:,} of {report.num_samples:,} samples in {report.num_shards:,} shards, {checked}"
    if not report.findings:
        console.print(f"{place_of(cache)} is whole: {held}.", soft_wrap=True)
        return
    console.print(
        f"{place_of(cache)} is not whole: {len(report.findings):,} findings, {len(report.damaged_samples):,} damaged "
        f"samples; {held}.",
        soft_wrap=True,
    )
    if removed:
        console.print(f"{removed:,} samples are taken out with their jobs: run `dflash generate`, which redoes them.")
    elif removed is None and len(report.damaged_samples):
        console.print("`dflash verify --repair` takes them out, and `dflash generate` redoes them.")


def _list(samples: np.ndarray) -> str:
    shown = ", ".join(map(str, samples[:LISTED].tolist()))
    return shown if len(samples) <= LISTED else f"{shown}, … ({len(samples):,} in all)"


def show_recheck(found: "Recheck") -> None:
    """One row a layer, one line a fault, then the sum."""
    table = Table(box=None, pad_edge=False)
    for name in ("layer", "cosine", "least", "largest difference", "relative", "faulty samples"):
        table.add_column(name, justify="right")
    for layer in found.layers:
        table.add_row(
            str(layer.layer_id),
            f"{layer.mean_cosine:.6f}",
            f"{layer.least_cosine:.6f}",
            f"{layer.largest_difference:.3g}",
            f"{layer.relative_difference:.2g}",
            str(layer.num_faulty),
        )
    console.print(table)
    for fault in found.faults:
        console.print(f"{fault.shard}, sample {fault.sample}, layer {fault.layer_id}: {fault.reason}.", soft_wrap=True)
    if found.head_agreement is not None:
        console.print(f"The head's most likely token agrees for {found.head_agreement:.2%} of the tokens.")
    if found.other_target is not None:
        console.print(f"Another target: {found.other_target}.", soft_wrap=True)
    verdict = "are the target's" if found.is_right else "are not all the target's"
    console.print(
        f"The states of {len(found.samples):,} samples ({found.num_tokens:,} tokens), computed again, {verdict}."
    )


class _Bar:
    """Progress that begins when the total is known; counts in `unit`s of `size`."""

    def __init__(self, title: str, unit: str, size: int) -> None:
        self._title, self._unit, self._size = title, unit, size
        self._stack = ExitStack()
        self._shown: WorkProgress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def update(self, done: int, total: int) -> None:
        """So much is done."""
        if self._shown is None:
            self._shown = self._stack.enter_context(WorkProgress(self._title, total // self._size, self._unit))
        self._shown.update(done // self._size)
