"""`dflash eval`: real speculative decoding, measured."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from dflash_cache.config.loading import load_config
from dflash_cache.config.settings import Config
from dflash_cli.console import WorkProgress, console, errors
from dflash_cli.options import AsJson, ConfigFile, OtherTarget, Overrides

if TYPE_CHECKING:
    from dflash_cache.decode.evaluate import Evaluation, Figures
    from dflash_cache.decode.speculate import Decoded
    from dflash_cache.drafter.model import Drafter


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("eval")
    def evaluate(
        config: ConfigFile,
        overrides: Overrides = None,
        checkpoint: Annotated[
            Path | None,
            typer.Option(help="A checkpoint, a run's folder, or an exported drafter; without it the run's best."),
        ] = None,
        block_size: Annotated[
            int | None, typer.Option(help="Draft blocks of fewer slots than trained; short for eval.block_size.")
        ] = None,
        temperature: Annotated[
            float | None, typer.Option(help="Draw tokens; 0 is greedy; short for eval.temperature.")
        ] = None,
        batch_size: Annotated[
            int | None, typer.Option(help="Prompts decoded at once; short for eval.batch_size.")
        ] = None,
        plot: Annotated[
            Path | None,
            typer.Option(metavar="FILE", help="Draw the acceptance histogram into a .png or .svg file (matplotlib)."),
        ] = None,
        other_target: OtherTarget = False,
        as_json: AsJson = False,
    ) -> None:
        """Decode prompts with target and drafter: acceptance length, speed, and whether the output is the target's."""
        from dflash_cache.decode.evaluate import resolve_block_size
        from dflash_cache.decode.fit import check_target
        from dflash_cli.acceptance_picture import check_plot, draw_acceptance

        given = {"block_size": block_size, "temperature": temperature, "batch_size": batch_size}
        named = [f"eval.{name}={value}" for name, value in given.items() if value is not None]
        settings = load_config(config, [*(overrides or []), *named])
        if plot is not None:
            check_plot(plot)
        drafter = open_drafter(settings, checkpoint)
        resolve_block_size(drafter, settings.eval)  # refused before the target has answered everything
        check_target(drafter, settings.target, other_target)
        result = Bench(settings, quiet=as_json).measure(drafter, "With the drafter")
        if plot is not None:
            draw_acceptance(plot, result)
        if as_json:
            typer.echo(json.dumps(result.to_dict()))
        else:
            show(result)
        if plot is not None:
            (errors if as_json else console).print(f"The picture is in {plot}.", soft_wrap=True)


def open_drafter(config: Config, checkpoint: Path | None) -> "Drafter":
    """The drafter at `checkpoint`, or of the run's best checkpoint, or of its last."""
    from dflash_cache.train.checkpoint import load_drafter

    return load_drafter(checkpoint or Path(config.run_dir))


class Bench:
    """The target, the questions, and its own answers to them, made once for any number of drafters."""

    def __init__(self, config: Config, quiet: bool = False) -> None:
        from dflash_cache.decode.evaluate import answer_plainly
        from dflash_cache.decode.probe import probe_target
        from dflash_cache.decode.prompts import load_questions
        from dflash_cache.decode.rows import check_batches
        from dflash_cache.target.load import load_target

        self._settings = settings = config.eval
        self._quiet = quiet
        own = {"dtype": settings.dtype, "device": settings.device, "store_last_hidden": False}  # no drafter reads it
        self.target = load_target(config.target.model_copy(update=own))
        if settings.batch_size > 1:
            check_batches(self.target)
        self.questions = load_questions(self.target.tokenizer, settings)
        # Before the target answers everything: what is refused now need not wait for that.
        self._probe = probe_target(self.target, self.questions, settings.batch_size) if self.questions else None
        with self._progress("The target alone", len(self.questions)) as tell:
            self.plain = answer_plainly(self.target, self.questions, settings, tell)

    def measure(self, drafter: "Drafter", title: str, max_prompts: int | None = None) -> "Evaluation":
        """Decode with this drafter."""
        from dflash_cache.decode.evaluate import evaluate

        questions, plain = self.questions[:max_prompts], self.plain[:max_prompts]
        drafter = drafter.to(self.target.device, self.target.dtype)
        with self._progress(title, len(questions)) as tell:
            result = evaluate(self.target, drafter, questions, plain, self._settings, tell)
        return replace(result, probe=self._probe)

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
    """The table of categories, the verdict, and the histogram as bars."""
    overall = result.overall
    console.print(_tabulate(result), soft_wrap=True)
    console.print(f"output: {_describe_output(result)}", soft_wrap=True)
    if overall.reread_tokens:
        console.print(
            f"read again after rejected drafts: {overall.reread_tokens:,} tokens, {overall.extra_passes:,} passes for "
            "that alone (recurrent layers; in the speed, not in the acceptance)",
            soft_wrap=True,
        )
    passes = max(1, sum(overall.histogram.values()))
    console.print("a pass yields" + " " * 44 + "slot accepted")
    reached = ["", *(f"{k:>4} {100 * share:5.1f} %" for k, share in enumerate(overall.position_acceptance, 1))]
    for (length, count), note in zip(overall.histogram.items(), reached, strict=True):
        bar = "█" * round(32 * count / passes)
        console.print(f"{length:>4} tokens {100 * count / passes:5.1f} %  {bar:<32}  {note}".rstrip())


def _describe_output(result: "Evaluation") -> str:
    """Whether it is the target's own, as far as that was checked."""
    overall, probe = result.overall, result.probe
    if overall.lossless is not None:
        verdict = "the target's own, token for token" if overall.lossless else "NOT the target's own"
        return f"{verdict} ({overall.same} same, {overall.ties} ties in rounding, {overall.different} different)"
    drawn = f"drawn at temperature {result.temperature:g}; tokens cannot be compared"
    if probe is None:
        return drawn
    return (
        f"{drawn}, but drafts are verified by a rule that keeps the target's distribution, and behind rejected drafts "
        f"its logits were its own to rounding ({probe.difference:.1e}, without drafts {probe.rounding:.1e}; "
        f"{probe.num_positions} positions)"
    )


def _tabulate(result: "Evaluation") -> Table:
    measured = f"blocks of {result.block_size}, {result.batch_size} at once"
    table = Table(box=None, title=measured, title_justify="left", pad_edge=False)
    table.add_column("category", overflow="fold")
    for title in ("prompts", "acceptance", "per pass", "tokens/s", "without", "speed-up", "output"):
        table.add_column(title, justify="right", no_wrap=True)
    named = [*result.categories.items(), ("all", result.overall)]
    for name, figures in named if len(result.categories) > 1 else named[:1]:
        table.add_row(
            Text(name),  # data's words, not markup
            f"{figures.num_prompts:,}",
            f"{figures.acceptance_length:.3f}",
            f"{figures.tokens_per_pass:.3f}",
            f"{figures.tokens_per_second:.1f}",
            f"{figures.tokens_per_second_plain:.1f}",
            f"{figures.speed_up:.2f}×",
            _judge(figures),
        )
    return table


def _judge(figures: "Figures") -> str:
    if figures.lossless is None:
        return "drawn"
    if figures.different:
        return f"{figures.different} differ"
    return f"{figures.ties} tie" if figures.ties else "same"
