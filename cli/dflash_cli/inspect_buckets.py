"""`dflash inspect-buckets`: what a cache holds, and how its lengths will be mixed in training.

Everything comes from the index alone, and torch is not imported: a million samples (86,549 micro-batches) took 1.4 s
on one core, start of the program included, and 2.6 s with bounds compared and a picture drawn.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.table import Table

from dflash_cache.config.loading import load_config
from dflash_cache.config.settings import RemoteSettings, TrainSettings
from dflash_cache.data.mixing import MixFigures
from dflash_cli.console import console, errors, show_bytes, show_count
from dflash_cli.options import AsJson, Cache

if TYPE_CHECKING:
    from dflash_cache.data.plan import EpochPlan, Order

DEFAULTS = TrainSettings()
BAR = 16


def _default(name: str) -> str:
    return f"--config's, or {getattr(DEFAULTS, name)}"


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("inspect-buckets")
    def inspect_buckets(
        cache: Cache,
        config: Annotated[
            Path | None, typer.Option(help="A YAML configuration: the mix as `dflash train` will have it.")
        ] = None,
        token_budget: Annotated[
            int | None,
            typer.Option(min=1, help="Padded tokens of a micro-batch.", show_default=_default("token_budget")),
        ] = None,
        max_samples: Annotated[
            int | None, typer.Option(min=1, help="Samples of a micro-batch.", show_default=_default("max_samples"))
        ] = None,
        accumulation: Annotated[
            int | None, typer.Option(min=1, help="Micro-batches of a step.", show_default=_default("accumulation"))
        ] = None,
        world_size: Annotated[int, typer.Option(min=1, help="Ranks that share a step.")] = 1,
        min_buffer: Annotated[
            int | None, typer.Option(min=0, help="Micro-batches to pull from.", show_default=_default("min_buffer"))
        ] = None,
        seed: Annotated[
            int | None, typer.Option(min=0, help="Seed of the order.", show_default=_default("seed"))
        ] = None,
        validation_share: Annotated[
            float | None,
            typer.Option(
                min=0,
                max=0.999,
                help="Share of the samples held out, which training never sees.",
                show_default=_default("validation_share"),
            ),
        ] = None,
        plot: Annotated[Path | None, typer.Option(help="Also draw it, into a .png or .html file.")] = None,
        suggest: Annotated[bool, typer.Option("--suggest", help="Find the bounds with the least padding.")] = False,
        buckets: Annotated[int | None, typer.Option(min=1, help="How many of them, instead of as many as now.")] = None,
        as_json: AsJson = False,
    ) -> None:
        """Show each bucket, and how well the planned order mixes them in every optimizer step."""
        from dflash_cli.bucket_pictures import check_plot, draw_report

        if plot is not None:
            check_plot(plot)
        given = {
            "token_budget": token_budget,
            "max_samples": max_samples,
            "accumulation": accumulation,
            "min_buffer": min_buffer,
            "seed": seed,
            "validation_share": validation_share,
        }
        settings = (DEFAULTS if config is None else load_config(config).train).model_copy(
            update={name: value for name, value in given.items() if value is not None}
        )
        inspection = inspect_cache(cache, settings, world_size)
        report = inspection.report
        if suggest or buckets is not None:
            report["bounds"] = compare_bounds(inspection, settings, buckets)
        if plot is not None:
            draw_report(plot, report, inspection.lengths_N, inspection.mix)
        if as_json:
            typer.echo(json.dumps(report))
        else:
            show(report)
        if plot is not None:
            (errors if as_json else console).print(f"The picture is in {plot}.", soft_wrap=True)


@dataclass(frozen=True)
class Inspection:
    """`report`: all figures, as plain values; the samples' lengths and each order's figures, to be drawn.

    training_rows: positions of the samples that training sees, all but the held-out ones.
    """

    report: dict[str, Any]
    lengths_N: np.ndarray
    training_rows: np.ndarray
    mix: dict[str, MixFigures]


def inspect_cache(cache: str, settings: TrainSettings, world_size: int = 1) -> Inspection:
    """The figures of a cache, from its index alone (no hidden state is read)."""
    from dflash_cache.cache.layout import is_remote, place_of

    if not is_remote(cache):
        return _inspect_tables(Path(cache), cache, settings, world_size)
    from dflash_cache.cache.remote import copy_tables  # loads torch
    from dflash_cache.cache.store import RemoteStore

    with TemporaryDirectory(prefix="dflash-cache-") as folder:
        copy_tables(RemoteStore(cache, RemoteSettings()), Path(folder))
        return _inspect_tables(Path(folder), place_of(cache), settings, world_size)


def _inspect_tables(cache: Path, place: str, settings: TrainSettings, world_size: int) -> Inspection:
    from dflash_cache.cache.index import open_index, split_columns
    from dflash_cache.cache.layout import read_manifest
    from dflash_cache.cache.rejected import read_rejected
    from dflash_cache.data.held_out import split_rows
    from dflash_cache.data.plan import BatchLimits, plan_epoch, step_bounds

    manifest = read_manifest(cache)
    index = split_columns(open_index(cache))
    rows, held_out = split_rows(index.sample, settings.validation_share, settings.seed)
    orders: tuple[Order, ...] = ("sequential", "shuffled", "interleaved")
    plans = {
        order: plan_epoch(
            index.length[rows],
            index.bucket[rows],
            BatchLimits(settings.token_budget, settings.max_samples, order),
            settings.seed,
            0,
        )
        for order in orders
    }
    plan = plans["interleaved"]
    K = len(manifest.bucket_bounds)
    per_bucket = [
        np.bincount(keys, weights, minlength=K)
        for keys, weights in (
            (index.bucket, None),
            (index.bucket, index.length),
            (index.bucket, index.loss_tokens),
            (plan.bucket, None),
            (plan.bucket, plan.tokens),
            (plan.bucket, plan.padded_tokens),
        )
    ]
    samples, tokens, loss_tokens, batches, real, padded = (np.asarray(column) for column in per_bucket)
    shards = [len(np.unique(index.shard[index.bucket == bucket])) for bucket in range(K)]
    state_bytes = manifest.states.token_bytes
    lower = [0, *manifest.bucket_bounds[:-1]]
    buckets = [
        {
            "bucket": bucket,
            "shortest": lower[bucket] + 1,
            "longest": manifest.bucket_bounds[bucket],
            "samples": int(samples[bucket]),
            "share": float(samples[bucket] / max(1, samples.sum())),
            "tokens": int(tokens[bucket]),
            "loss_tokens": int(loss_tokens[bucket]),
            "shards": shards[bucket],
            "bytes": int(tokens[bucket]) * (state_bytes + 5),
            "micro_batches": int(batches[bucket]),
            "micro_batch_share": float(batches[bucket] / max(1, batches.sum())),
            "padding_efficiency": float(real[bucket] / padded[bucket]) if padded[bucket] else 1.0,
        }
        for bucket in range(K)
    ]
    bounds = step_bounds(plan.num_micro_batches, settings.accumulation * world_size)
    efficiency = float(plan.tokens.sum() / max(1, plan.padded_tokens.sum()))
    without_buffer = settings.model_copy(update={"min_buffer": 0})
    mix = {
        "sequential": _mix(plans["sequential"], settings, world_size),
        "shuffled": _mix(plans["shuffled"], settings, world_size),
        "interleaved, buffer 0": _mix(plan, without_buffer, world_size),
        "interleaved": _mix(plan, settings, world_size),
    }
    report = {
        "cache": place,
        "target": manifest.target_model,
        "layer_ids": list(manifest.layer_ids),
        "dtype": manifest.dtype,
        "codec": manifest.codec,
        "num_samples": manifest.num_samples,
        "cached_samples": int(samples.sum()),
        "held_out_samples": len(held_out),
        "num_micro_batches": plan.num_micro_batches,
        "rejected": dict(Counter(read_rejected(cache)["reason"].to_pylist())),
        "bytes": sum(bucket["bytes"] for bucket in buckets),
        "buckets": buckets,
        "mix": {order: figures.to_dict() for order, figures in mix.items()},
        "step_size": settings.accumulation * world_size,
        "num_steps": len(bounds) - 1,
        "step_sizes": [int(np.diff(bounds).min()), int(np.diff(bounds).max())],
        "padding_efficiency": efficiency,
    }
    return Inspection(report, index.length, rows, mix)


def compare_bounds(inspection: Inspection, settings: TrainSettings, num_buckets: int | None) -> dict[str, Any]:
    """Padding under the cache's bounds and under the best ones: of `num_buckets`, or as many as there are.

    bucket_efficiency: tokens over padded tokens if every sample is padded to the longest of its bucket, which the best
    bounds make as high as it can be; padding_efficiency: of the micro-batches that training would cut.
    """
    from dflash_cache.data.buckets import assign_buckets, best_bounds, wasted_tokens
    from dflash_cache.data.plan import BatchLimits, plan_epoch

    lengths_N, rows = inspection.lengths_N, inspection.training_rows
    present = tuple(bucket["longest"] for bucket in inspection.report["buckets"])
    best = best_bounds(lengths_N, num_buckets or len(present), present[-1])
    limits = BatchLimits(settings.token_budget, settings.max_samples)
    num_tokens = int(lengths_N.sum(dtype=np.int64))
    compared = {}
    for name, bounds in (("present", present), ("best", best)):
        buckets_N = assign_buckets(lengths_N, bounds)
        plan = plan_epoch(lengths_N[rows], buckets_N[rows], limits, settings.seed, 0)
        compared[name] = {
            "bounds": list(bounds),
            "bucket_efficiency": num_tokens / (num_tokens + wasted_tokens(lengths_N, bounds)),
            "padding_efficiency": int(plan.tokens.sum()) / int(plan.padded_tokens.sum()),
            "micro_batches": plan.num_micro_batches,
        }
    return compared


def _mix(plan: "EpochPlan", settings: TrainSettings, world_size: int) -> MixFigures:
    from dflash_cache.data.mixing import measure_mix
    from dflash_cache.train.sampler import EpochOrder

    order = EpochOrder.from_plan(plan, settings, 0, world_size)
    efficiency = float(plan.tokens.sum() / max(1, plan.padded_tokens.sum()))
    return measure_mix(plan.bucket[order.order], order.bounds, int(plan.bucket.max()) + 1, efficiency)


def show(report: dict[str, Any]) -> None:
    """Tables: the buckets with bars, the orders with their figures, and the bounds if they were compared."""
    coded = "" if report["codec"] == "raw" else f" in {report['codec']}"
    console.print(
        f"{report['cache']}: {report['cached_samples']:,} of {report['num_samples']:,} samples of {report['target']}, "
        f"layers {report['layer_ids']}, {report['dtype']}{coded}, {show_bytes(report['bytes'])}",
        soft_wrap=True,
    )
    for reason, count in report["rejected"].items():
        console.print(f"{count:,} samples were left out: {reason}.")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("lengths", "samples", "share", "", "tokens", "shards", "bytes", "real", "batches", "of all"):
        table.add_column(name, justify="left" if not name else "right")
    for bucket in report["buckets"]:
        table.add_row(
            f"{bucket['shortest']}–{bucket['longest']}",
            f"{bucket['samples']:,}",
            f"{bucket['share']:.1%}",
            "█" * round(BAR * bucket["share"]),
            show_count(bucket["tokens"]),
            str(bucket["shards"]),
            show_bytes(bucket["bytes"]),
            f"{bucket['padding_efficiency']:.1%}",
            f"{bucket['micro_batches']:,}",
            f"{bucket['micro_batch_share']:.1%}",
        )
    console.print(table)
    console.print(f"\n{_tell_steps(report)}", soft_wrap=True)
    console.print(
        "How each order mixes them (micro-batches off a share at worst; longest run; steps that miss a bucket*,\n"
        "or are all of one):",
        soft_wrap=True,
    )
    orders = Table(box=None, pad_edge=False)
    for name in ("order", "KL mean", "KL max", "off share", "run", "miss one*", "all one"):
        orders.add_column(name, justify="left" if name == "order" else "right")
    for order, mix in report["mix"].items():
        orders.add_row(
            order,
            f"{mix['kl_mean']:.4f}",
            f"{mix['kl_max']:.3f}",
            f"{mix['max_deviation']:.2f}",
            str(mix["longest_run"]),
            f"{mix['missing_share']:.1%}",
            f"{mix['single_share']:.1%}",
        )
    console.print(orders)
    console.print(
        "* of those with a share of one micro-batch a step or more; rarer ones cannot be in all.", soft_wrap=True
    )
    if "bounds" in report:
        _show_bounds(report["bounds"])


def _tell_steps(report: dict[str, Any]) -> str:
    """What an epoch is made of, and how its micro-batches are divided into steps."""
    fewest, most = report["step_sizes"]
    sizes = str(most) if fewest == most else f"{fewest} or {most}"
    rule = "" if fewest == report["step_size"] else f" (at most {report['step_size']}; what is left over is spread)"
    return (
        f"Without the {report['held_out_samples']:,} held-out samples an epoch has {report['num_micro_batches']:,} "
        f"micro-batches, {report['padding_efficiency']:.1%} of their padded tokens real: {report['num_steps']:,} steps "
        f"of {sizes}{rule}."
    )


def _show_bounds(compared: dict[str, Any]) -> None:
    console.print("\nReal among padded tokens, if each bucket were one batch, and as micro-batches are cut:")
    table = Table(box=None, pad_edge=False)
    for name in ("", "bounds", "bucket", "cut", "batches"):
        table.add_column(name, justify="left" if name in ("bounds", "") else "right")
    for name, figures in compared.items():
        table.add_row(
            name,
            " ".join(map(str, figures["bounds"])),
            f"{figures['bucket_efficiency']:.1%}",
            f"{figures['padding_efficiency']:.1%}",
            f"{figures['micro_batches']:,}",
        )
    console.print(table)
    bounds = ",".join(map(str, compared["best"]["bounds"]))
    console.print(f"The best, for the next cache: --set data.bucket_bounds=[{bounds}]", soft_wrap=True, markup=False)
