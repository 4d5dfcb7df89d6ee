"""`dflash demo`: all stages in a row, and a report at the end. Stages that are done are not done again."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_cache.config.loading import load_config
from dflash_cache.config.settings import Config
from dflash_cli.console import console, show_bytes, show_seconds
from dflash_cli.options import ConfigFile, Overrides

Figures = dict[str, Any]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def demo(
        config: ConfigFile,
        overrides: Overrides = None,
        convert: Annotated[
            tuple[str, str] | None,
            typer.Option(
                metavar="GGUF FOLDER",
                help="If target.model is FOLDER, make it first, as `dflash convert GGUF FOLDER` does.",
                show_default=False,
            ),
        ] = None,
    ) -> None:
        """Run the whole job: target, cache, inspection, training, measurement, report."""
        settings = load_config(config, overrides or [])
        gguf = convert[0] if convert and Path(convert[1]) == Path(settings.target.model) else None
        report_demo(settings, Stages(settings, gguf).run())


class Stages:
    """The demo's stages; each leaves its figures in `stages.json`, so that a rerun takes up where it stopped."""

    def __init__(self, config: Config, gguf: str | None) -> None:
        self._config = config
        self._gguf = gguf
        self._path = Path(config.run_dir) / "stages.json"

    def run(self) -> Figures:
        """All figures by stage."""
        stages: dict[str, Callable[[], Figures]] = {
            "target": self._target,
            "generate": self._generate,
            "inspect": self._inspect,
            "train": self._train,
            "eval": self._eval,
        }
        for name, stage in stages.items():
            console.print(f"\n{name}", style="bold")
            before = self._read()
            started = time.perf_counter()
            figures = stage()
            seconds = time.perf_counter() - started
            # A stage that found everything done keeps the figures of the run that did it.
            worked = figures.pop("worked", True)
            if worked or name not in before:
                before[name] = {**before.get(name, {}), **figures, "seconds": seconds}
                self._write(before)
        return self._read()

    def _target(self) -> Figures:
        from dflash_cli.convert import convert_target

        out = Path(self._config.target.model)
        if self._gguf is None:
            console.print(f"The target is {out}.")
            return {"worked": False}
        worked = not (out / "config.json").is_file()
        convert_target(self._gguf, out)
        return {"worked": worked}

    def _generate(self) -> Figures:
        from dflash_cli.generate import generate_cache

        manifest, shown = generate_cache(self._config)
        assert manifest is not None  # the demo is not run under torchrun
        return {
            "worked": shown.cached_tokens > 0,
            "samples": manifest.num_samples,
            "answer_tokens": shown.new_tokens,
            "answer_seconds": shown.answer_seconds,
            "cached_tokens": shown.cached_tokens,
            "cache_seconds": shown.cache_seconds,
            "dtype": manifest.dtype,
        }

    def _inspect(self) -> Figures:
        from dflash_cli.inspect_buckets import inspect_cache, show

        report = inspect_cache(self._config.cache_dir, self._config.train).report
        show(report)
        return {"bytes": report["bytes"]}

    def _train(self) -> Figures:
        from dflash_cli.train import train_drafter

        shown = train_drafter(self._config)
        if not shown.complete:
            raise typer.Exit(130)  # what a shell says of a command that was interrupted
        return {
            "worked": shown.tokens > 0,
            "tokens": shown.tokens,
            "blocks": shown.blocks,
            "wait_share": shown.waited / max(1e-9, shown.seconds),
        }

    def _eval(self) -> Figures:
        from dflash_cache.train.checkpoint import best_path, latest_path
        from dflash_cache.train.setup import open_run
        from dflash_cli.evaluate import Bench, open_drafter, show

        run_dir = Path(self._config.run_dir)
        measured = {
            "checkpoint": str(best_path(run_dir) or latest_path(run_dir)),
            "target": self._config.target.model,
            "settings": self._config.eval.model_dump(mode="json"),
        }
        if measured.items() <= self._read().get("eval", {}).items():
            console.print(f"{measured['checkpoint']} is measured already.")
            return {"worked": False}
        bench = Bench(self._config)
        trained = bench.measure(open_drafter(self._config, None), "With the trained drafter")
        show(trained)
        with open_run(self._config.model_copy(update={"run_dir": str(run_dir / "untrained")})) as fresh:
            untrained = bench.measure(fresh.drafter.eval(), "With an untrained drafter", 2)
        return {**measured, "trained": trained.to_dict(), "untrained": untrained.to_dict()}

    def _read(self) -> Figures:
        return json.loads(self._path.read_text()) if self._path.exists() else {}

    def _write(self, figures: Figures) -> None:
        from dflash_cache.cache.files import write_atomically

        write_atomically(self._path, json.dumps(figures, indent=2).encode())


def report_demo(config: Config, stages: Figures) -> None:
    """Write `report.json` and show its lines."""
    from dflash_cache.cache.files import write_atomically

    made, trained, untrained = stages["generate"], stages["eval"]["trained"], stages["eval"]["untrained"]
    report = {
        "acceptance_length": trained["acceptance_length"],
        "acceptance_length_untrained": untrained["acceptance_length"],
        "lossless": trained["lossless"] and untrained["lossless"],  # null where tokens were drawn
        "seconds": {name: figures["seconds"] for name, figures in stages.items()},
        "cache_bytes": stages["inspect"]["bytes"],
        "data_wait_share": stages["train"]["wait_share"],
        "tokens_per_second": {
            "answer": made["answer_tokens"] / max(1e-9, made["answer_seconds"]),
            "cache": made["cached_tokens"] / max(1e-9, made["cache_seconds"]),
            "train": stages["train"]["tokens"] / stages["train"]["seconds"],
            "decode": trained["tokens_per_second"],
            "decode_plain": trained["tokens_per_second_plain"],
        },
        "histogram": trained["histogram"],
        "stages": stages,
    }
    path = Path(config.run_dir) / "report.json"
    write_atomically(path, json.dumps(report, indent=2).encode())
    rates = report["tokens_per_second"]
    own = "the target’s own, token for token"
    output = {True: own, False: f"NOT {own}", None: "drawn from the target’s distribution"}[report["lossless"]]
    total = sum(report["seconds"].values())
    console.print(
        f"\nReport ({path})\n"
        f"cache                {show_bytes(report['cache_bytes'])}, {made['samples']:,} samples\n"
        f"answering            {rates['answer']:,.0f} tokens/s\n"
        f"caching              {rates['cache']:,.0f} tokens/s\n"
        f"training             {rates['train']:,.0f} tokens/s, {100 * report['data_wait_share']:.1f} % of the time "
        "waiting for data\n"
        f"decoding             {rates['decode']:.1f} tokens/s with the drafter, {rates['decode_plain']:.1f} without\n"
        f"acceptance length    {report['acceptance_length']:.3f} "
        f"(untrained: {report['acceptance_length_untrained']:.3f})\n"
        f"output               {output}\n"
        f"time                 {show_seconds(total)}"
    )
