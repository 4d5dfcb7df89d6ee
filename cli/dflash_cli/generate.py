"""`dflash generate`: run the target once and leave a cache of its hidden states."""

import json
from contextlib import ExitStack
from typing import Annotated, Self

import typer

from dflash_cache.cache.layout import Manifest
from dflash_cache.config.loading import load_config
from dflash_cache.config.settings import Config
from dflash_cache.data.report import DataReport
from dflash_cache.target.observer import Estimate, Observer
from dflash_cli.console import WorkProgress, console, show_bytes
from dflash_cli.options import ConfigFile, Overrides, Strict

Devices = Annotated[
    str | None, typer.Option(help="One worker a device: all (GPUs), 0,1 (these GPUs), or cpu:2.", show_default=False)
]
Append = Annotated[bool, typer.Option("--append", help="Add the data's conversations to what the cache holds.")]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def generate(
        config: ConfigFile,
        overrides: Overrides = None,
        strict: Strict = False,
        devices: Devices = None,
        append: Append = False,
    ) -> None:
        """Run the target over the conversations and cache its hidden states; goes on where it was stopped."""
        given = ["data.strict=true"] if strict else []
        given += [f"generate.devices={json.dumps(devices)}"] if devices else []
        generate_cache(load_config(config, [*(overrides or []), *given]), append)


def generate_cache(config: Config, append: bool = False) -> tuple[Manifest | None, "GenerateConsole"]:
    """Fill the cache, showing what happens; returns its manifest (None in torchrun's others) and the figures shown."""
    from dflash_cache.cache.layout import is_remote, place_of, write_config
    from dflash_cache.target.generate import generate

    with GenerateConsole() as shown:
        manifest = generate(config, shown, append)
    if manifest is not None:
        if not is_remote(config.cache_dir):
            write_config(config)
        left_out = f", {shown.num_bad:,} of them bad and left out" if shown.num_bad else ""
        console.print(
            f"The cache {place_of(config.cache_dir)} is complete: {manifest.num_samples:,} samples{left_out}."
        )
    return manifest, shown


class GenerateConsole(Observer):
    """Shows the first stage on the console, and keeps its figures."""

    def __init__(self) -> None:
        self.num_bad = 0
        self.new_tokens = 0
        self.cached_tokens = 0
        self.answer_seconds = 0.0
        self.cache_seconds = 0.0
        self._stack = ExitStack()
        self._progress: WorkProgress | None = None
        self._first_tokens: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def skipped(self, reasons: dict[str, int], first: dict[str, str]) -> None:
        """One line a reason."""
        for reason, count in reasons.items():
            console.print(f"Left out {count:,} (first: {first.get(reason, '?')}): {reason}.")

    def reported(self, report: DataReport) -> None:
        """The whole in one line."""
        console.print(report.sum_up())

    def rejected(self, reasons: dict[str, int], first: dict[str, str]) -> None:
        """One line a reason."""
        self.num_bad = sum(reasons.values())
        for reason, count in reasons.items():
            console.print(f"Left out {count:,} bad samples (first: {first[reason]}): {reason}.", soft_wrap=True)

    def responding(self, done: int, total: int, new_tokens: int) -> None:
        """Prompts and tokens answered."""
        self.new_tokens = new_tokens
        self.answer_seconds = self._show("Answering", done, total, "prompts", f"{new_tokens:,} tokens")

    def estimated(self, estimate: Estimate) -> None:
        """The size, before the first forward."""
        passing = estimate.disk_bytes < estimate.remaining_bytes
        at_once = f", of which {show_bytes(estimate.disk_bytes)} lie here at once" if passing else ""
        console.print(
            f"{estimate.num_samples:,} samples, {estimate.num_tokens:,} tokens of {estimate.token_bytes:,} bytes: "
            f"the cache takes {show_bytes(estimate.total_bytes)}, {show_bytes(estimate.remaining_bytes)} of it still "
            f"to be written{at_once}; {show_bytes(estimate.free_bytes)} are free. "
            f"At most {show_bytes(estimate.buffer_bytes)} of states wait in memory for the disk"
            f"{f' ({estimate.num_workers} workers)' if estimate.num_workers > 1 else ''}."
        )

    def noted(self, sentence: str) -> None:
        """The sentence."""
        console.print(sentence)

    def forwarding(self, done_tokens: int, total_tokens: int) -> None:
        """Tokens cached."""
        if self._first_tokens is None:
            self._first_tokens = done_tokens
        self.cached_tokens = done_tokens - self._first_tokens
        self.cache_seconds = self._show("Caching", done_tokens, total_tokens, "tokens", "")

    def _show(self, title: str, done: int, total: int, unit: str, note: str) -> float:
        if self._progress is None or self._progress.title != title:
            self._stack.close()
            self._progress = self._stack.enter_context(WorkProgress(title, total, unit))
        return self._progress.update(done, note)
