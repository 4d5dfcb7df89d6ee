"""The picture of `dflash inspect-buckets --plot`: lengths and bounds, each step's mix before and after the pull, runs.

One figure, as a PNG file or inside an HTML page that needs nothing else. The pull keeps each step's counts, so the
second and the third panel agree: that is what it promises; a plain shuffle stands below to compare.
"""

import html
import io
import json
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_cache.cache.files import write_atomically
from dflash_cache.data.mixing import MixFigures
from dflash_cache.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_BARS = 150  # steps in a panel; of more, every so many-th is drawn
LONGEST_SHOWN = 8  # runs longer than this share one place
PANELS = (
    ("interleaved, buffer 0", "before: the interleaved list"),
    ("interleaved", "after: pulled from it at random through the buffer"),
    ("shuffled", "to compare: a plain shuffle of all micro-batches"),
)


def check_plot(path: Path) -> None:
    """Raise ConfigError if no picture can be made of this name, or on this machine."""
    if path.suffix not in (".png", ".html"):
        raise ConfigError(f"--plot {path} is neither a .png nor a .html file: name one of these.")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: run `pip install 'dflash-cache[plot]'`.")


def draw_report(path: Path, report: dict[str, Any], lengths_N: np.ndarray, mix: dict[str, MixFigures]) -> None:
    """Draw the figures of `inspect_cache` into `path`. Raises ConfigError or CacheError if it cannot be."""
    check_plot(path)
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    buckets = [f"{bucket['shortest']}–{bucket['longest']}" for bucket in report["buckets"]]
    colours = colormaps["viridis"](np.linspace(0, 0.95, len(buckets))).tolist()
    figure = Figure(figsize=(12, 16), layout="constrained")
    lengths, *steps, runs = figure.subplots(5, 1)
    figure.suptitle(f"{report['cache']}: {report['cached_samples']:,} samples, steps of {report['step_size']}")
    _draw_lengths(lengths, lengths_N, [bucket["longest"] for bucket in report["buckets"]], colours)
    for axes, (order, title) in zip(steps, PANELS, strict=True):
        _draw_steps(axes, mix[order], title, colours)
    steps[0].legend(buckets, title="length", loc="center left", bbox_to_anchor=(1, 0.5))
    _draw_runs(runs, mix)

    picture = io.BytesIO()
    figure.savefig(picture, format="png" if path.suffix == ".png" else "svg")
    data = picture.getvalue()
    write_atomically(path, data if path.suffix == ".png" else _wrap_page(data.decode(), report).encode())


def _draw_lengths(axes: "Axes", lengths_N: np.ndarray, bounds: list[int], colours: list[Any]) -> None:
    """Samples by length, coloured by bucket, and where the buckets end."""
    longest = int(lengths_N.max())
    counts = np.bincount(lengths_N)
    width = -(-longest // MAX_BARS)
    begin = 0
    for bound, colour in zip(bounds, colours, strict=True):
        edges = np.unique([*range(begin, min(bound, longest), width), min(bound, longest)])  # bars end with the bucket
        held = [counts[first + 1 : end + 1].sum() / (end - first) for first, end in pairwise(edges.tolist())]
        axes.bar(edges[:-1], held, np.diff(edges), align="edge", color=colour)
        axes.axvline(min(bound, longest), color="grey", linewidth=0.8, linestyle="dashed")
        begin = bound
    axes.set(title="lengths, and where the buckets end", xlabel="tokens of a sample", ylabel="samples of a length")


def _draw_steps(axes: "Axes", figures: MixFigures, title: str, colours: list[Any]) -> None:
    """Each step's shares as stacked bars, with lines where the whole epoch's are."""
    num_steps = len(figures.counts_nK)
    shown = np.arange(0, num_steps, -(-num_steps // MAX_BARS))
    counts_nK = figures.counts_nK[shown]
    percent_nK = 100 * counts_nK / counts_nK.sum(1, keepdims=True)
    edges = np.arange(len(shown) + 1)
    below = np.zeros(len(shown))
    for percent, colour in zip(percent_nK.T, colours, strict=True):
        axes.stairs(below + percent, edges, baseline=below, fill=True, color=colour)
        below = below + percent
    for end in 100 * figures.share_K.cumsum()[:-1]:
        axes.axhline(end, color="white", linewidth=0.8, linestyle="dashed")
    which = "every step" if len(shown) == num_steps else f"{len(shown)} of {num_steps:,} steps"
    axes.set(title=f"{title} ({which}; KL {figures.kl_n.mean():.3f})", ylabel="% of micro-batches", ylim=(0, 100))
    axes.set_xlim(0, len(shown))
    axes.set_xticks([])


def _draw_runs(axes: "Axes", mix: dict[str, MixFigures]) -> None:
    """How many of the micro-batches stand in runs of each length, by order."""
    width = 0.8 / len(mix)
    for i, (order, figures) in enumerate(mix.items()):
        lengths = np.arange(len(figures.runs_R))
        held = np.bincount(np.minimum(lengths, LONGEST_SHOWN + 1), lengths * figures.runs_R, LONGEST_SHOWN + 2)[1:]
        places = np.arange(1, LONGEST_SHOWN + 2) + (i - (len(mix) - 1) / 2) * width
        axes.bar(places, 100 * held / held.sum(), width, label=f"{order} (longest: {figures.longest_run:,})")
    ticks = range(1, LONGEST_SHOWN + 2)
    axes.set_xticks(ticks, [*map(str, ticks[:-1]), f"over {LONGEST_SHOWN}"])
    axes.set(title="runs of one bucket", xlabel="length of the run", ylabel="% of micro-batches")
    axes.legend(loc="upper center")


def _wrap_page(svg: str, report: dict[str, Any]) -> str:
    title = html.escape(f"Buckets of {report['cache']}")
    figures = html.escape(json.dumps(report, indent=2, ensure_ascii=False))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>\n<body>\n'
        f"{svg[svg.index('<svg') :]}\n<details><summary>All figures</summary><pre>{figures}</pre></details>\n"
        "</body></html>\n"
    )
