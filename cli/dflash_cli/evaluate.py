"""`dflash eval`: real speculative decoding, measured."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_cache.config.loading import load_config
from dflash_cache.config.settings import Config
from dflash_cli.console import WorkProgress, console
from dflash_cli.options import AsJson, ConfigFile, Overrides

if TYPE_CHECKING:
    from dflash_cache.decode.evaluate import Evaluation
    from dflash_cache.decode.speculate import Decoded
    from dflash_cache.drafter.model import Drafter


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("eval")
    def evaluate(
        config: ConfigFile,
        overrides: Overrides = None,
        checkpoint: Annotated[
            Path | None, typer.Option(help="A checkpoint, or an exported drafter; without it the run's best.")
        ] = None,
        as_json: AsJson = False,
    ) -> None:
        """Decode prompts with target and drafter: acceptance length, speed, and whether the output is the target's."""
        settings = load_config(config, overrides or [])
        result = Bench(settings, quiet=as_json).measure(open_drafter(settings, checkpoint), "with the drafter")
        if as_json:
            typer.echo(json.dumps(result.to_dict()))
        else:
            show(result)


def open_drafter(config: Config, checkpoint: Path | None) -> "Drafter":
    """The drafter at `checkpoint`, or of the run's best checkpoint, or of its last."""
    from dflash_cache.train.checkpoint import best_path, latest_path, load_drafter

    run_dir = Path(config.run_dir)
    return load_drafter(checkpoint or best_path(run_dir) or latest_path(run_dir) or run_dir / "checkpoints")


class Bench:
    """The target, the prompts, and its own answers to them, made once for any number of drafters."""

    def __init__(self, config: Config, quiet: bool = False) -> None:
        from dflash_cache.decode.evaluate import Limits, answer_plainly
        from dflash_cache.decode.prompts import load_prompts
        from dflash_cache.target.load import load_target, stop_tokens

        settings = config.eval
        self._quiet = quiet
        own = {"dtype": settings.dtype, "device": settings.device, "store_last_hidden": False}  # no drafter reads it
        self.target = load_target(config.target.model_copy(update=own))
        self.prompts = load_prompts(self.target.tokenizer, settings)
        self.limits = Limits(settings.max_new_tokens, stop_tokens(self.target))
        with self._progress("The target alone", len(self.prompts)) as tell:
            self.plain = answer_plainly(self.target, self.prompts, self.limits, tell)

    def measure(self, drafter: "Drafter", title: str, max_prompts: int | None = None) -> "Evaluation":
        """Decode with this drafter."""
        from dflash_cache.decode.evaluate import evaluate

        prompts, plain = self.prompts[:max_prompts], self.plain[:max_prompts]
        drafter = drafter.to(self.target.device, self.target.dtype)
        with self._progress(title, len(prompts)) as tell:
            return evaluate(self.target, drafter, prompts, plain, self.limits, tell)

    def _progress(self, title: str, total: int) -> "DecodeProgress":
        return DecodeProgress(title, total, self._quiet)


class DecodeProgress:
    """Counts decoded prompts."""

    def __init__(self, title: str, total: int, quiet: bool) -> None:
        self._progress = None if quiet else WorkProgress(title, total, "prompts")
        self._done = 0

    def __enter__(self) -> "DecodeProgress":
        if self._progress:
            self._progress.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.__exit__(None, None, None)

    def __call__(self, decoded: "Decoded") -> None:
        """One more prompt is decoded."""
        self._done += 1
        if self._progress:
            self._progress.update(self._done)


def show(result: "Evaluation") -> None:
    """Figures, and the histogram as bars."""
    console.print(
        f"acceptance length {result.acceptance_length:.3f} over {result.num_prompts} prompts; "
        f"{result.tokens_per_second:.1f} tokens/s with the drafter, {result.tokens_per_second_plain:.1f} without"
    )
    verdict = "the target's own, token for token" if result.lossless else "NOT the target's own"
    console.print(
        f"output: {verdict} ({result.same} same, {result.ties} ties in rounding, {result.different} different)"
    )
    passes = max(1, sum(result.histogram.values()))
    for length, count in result.histogram.items():
        bar = "█" * round(40 * count / passes)
        console.print(f"{length:>4} tokens  {bar} {100 * count / passes:.1f} %")
