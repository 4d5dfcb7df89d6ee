"""`dflash estimate`: what a cache will take, how long, and when it pays, before anything runs."""

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_cache.config.loading import load_config
from dflash_cli.console import console, show_bytes, show_seconds
from dflash_cli.options import AsJson, ConfigFile, Overrides

if TYPE_CHECKING:
    from dflash_cache.target.forecast import Rates


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def estimate(
        config: ConfigFile,
        overrides: Overrides = None,
        tokens_per_second: Annotated[
            float | None, typer.Option(min=1e-9, help="The target's rate, all devices together.", show_default=False)
        ] = None,
        train_tokens_per_second: Annotated[
            float | None, typer.Option(min=1e-9, help="Tokens a second that training takes in.", show_default=False)
        ] = None,
        storage_gb_per_second: Annotated[
            float | None, typer.Option(min=1e-9, help="What the storage reads and writes.", show_default=False)
        ] = None,
        as_json: AsJson = False,
    ) -> None:
        """Tell the cache's size, shards and time, what training will read, and from how many passes on it pays."""
        from dflash_cache.target.forecast import Rates

        settings = load_config(config, overrides or [])
        storage = storage_gb_per_second * 1e9 if storage_gb_per_second is not None else None
        report = estimate_cache(settings, Rates(tokens_per_second, train_tokens_per_second, storage), quiet=as_json)
        if as_json:
            typer.echo(json.dumps(report))
        else:
            show(report)


def estimate_cache(config: Any, rates: "Rates", quiet: bool) -> dict[str, Any]:
    """All figures by name; None where a rate is missing, `passes_until_it_pays` also where it never pays."""
    from dflash_cache.target.forecast import forecast, generate_seconds, needed_bytes_per_second, passes_until_it_pays
    from dflash_cache.target.observer import Observer
    from dflash_cli.generate import GenerateConsole

    found = forecast(config, Observer() if quiet else GenerateConsole())
    passes = passes_until_it_pays(found, rates)
    return {
        **asdict(found),
        "codec": config.generate.codec,
        "fits": None if found.free_bytes is None else found.num_bytes <= found.free_bytes,
        "generate_seconds": generate_seconds(found, rates),
        "needed_gb_per_second": _in_gb(needed_bytes_per_second(found, rates)),
        "pays": None if passes is None else math.isfinite(passes),
        "passes_until_it_pays": None if passes is None or math.isinf(passes) else int(passes),
    }


def show(report: dict[str, Any]) -> None:
    """Whole sentences, one for each thing that is known."""
    most = "at most " if report["num_open"] else ""
    console.print(
        f"{report['num_samples']:,} samples, {most}{report['num_tokens']:,} tokens of {report['token_bytes']:,} bytes: "
        f"the cache takes {most}{show_bytes(report['num_bytes'])} in about {report['num_shards']:,} shards.",
        soft_wrap=True,
    )
    others = {name: size for name, size in report["state_bytes_by_codec"].items() if name != report["codec"]}
    if others:
        sizes = ", ".join(
            f"{show_bytes(size)} with {'none' if name == 'raw' else name}" for name, size in others.items()
        )
        console.print(f"Of generate.codec, its states would take {sizes}.", soft_wrap=True)
    if report["num_open"]:
        console.print(f"{report['num_open']:,} answers are still to be written; they count with their greatest length.")
    if report["free_bytes"] is None:
        console.print("How much room its store has is not known here.")
    else:
        fits = "" if report["fits"] else ": too little"
        console.print(f"{show_bytes(report['free_bytes'])} are free where it will lie{fits}.")
    if report["generate_seconds"] is not None:
        console.print(f"`dflash generate` takes about {show_seconds(report['generate_seconds'])}.")
    if report["needed_gb_per_second"] is not None:
        console.print(f"Training reads {report['needed_gb_per_second']:.3g} GB/s at that rate.")
    if report["pays"]:
        console.print(
            f"It pays from {report['passes_until_it_pays']} passes over the data on (epochs × drafters), against "
            "running the target in each.",
            soft_wrap=True,
        )
    elif report["pays"] is False:
        console.print("It never pays in time: reading a pass from that storage takes longer than the target does.")


def _in_gb(num_bytes: float | None) -> float | None:
    return None if num_bytes is None else num_bytes / 1e9
