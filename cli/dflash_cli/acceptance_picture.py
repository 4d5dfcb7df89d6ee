"""The picture of `dflash eval --plot`: how many tokens the passes yielded, and how far drafts were accepted."""

import io
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_cache.cache.files import write_atomically
from dflash_cache.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dflash_cache.decode.evaluate import Evaluation


def check_plot(path: Path) -> None:
    """Raise ConfigError if no picture can be made of this name, or on this machine."""
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"--plot {path} is neither a .png nor a .svg file: name one of these.")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: run `pip install 'dflash-cache[plot]'`.")


def draw_acceptance(path: Path, result: "Evaluation") -> None:
    """Write the picture to `path`."""
    from matplotlib import rc_context

    picture = io.BytesIO()
    with rc_context({"svg.fonttype": "none"}):  # words stay words
        draw(result).savefig(picture, format=path.suffix.removeprefix("."))
    write_atomically(path, picture.getvalue())


def draw(result: "Evaluation") -> "Figure":
    """All passes as bars, each category as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    yielded, accepted = figure.subplots(1, 2)
    overall = result.overall
    passes = max(1, sum(overall.histogram.values()))
    shares = [100 * count / passes for count in overall.histogram.values()]
    bars = yielded.bar([*overall.histogram], shares)
    yielded.bar_label(bars, [f"{share:.1f}" for share in shares], fontsize=8)
    yielded.axvline(overall.tokens_per_pass, color="grey", linestyle="dashed")
    yielded.set(
        title=f"{overall.tokens_per_pass:.3f} tokens a pass\nacceptance length {overall.acceptance_length:.3f} "
        f"(mean of {overall.num_prompts:,} prompts)",
        xlabel="tokens that one pass of the target yields",
        ylabel="% of passes",
        xticks=[*overall.histogram],
    )
    slots = range(1, result.block_size)
    for place, (category, figures) in enumerate(result.categories.items()):
        shares = [100 * share for share in figures.position_acceptance]
        # Escaped, for a dollar sign would begin a formula.
        label = f"{category} ({figures.acceptance_length:.2f})".replace("$", r"\$")
        style = ("-", "--", ":")[place // 10 % 3]  # colours come again after ten
        accepted.plot(slots, shares, style, marker="o", markersize=3, label=label)
    accepted.set(
        title="drafts accepted, with all before them",
        xlabel="slot of the block",
        ylabel="% of passes",
        xticks=[*slots],
        ylim=(0, 100),
    )
    accepted.legend()
    return figure
