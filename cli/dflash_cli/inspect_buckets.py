"""`dflash inspect-buckets`: what a cache holds, and how its lengths will be mixed in training."""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from dflash_cache.config.settings import TrainSettings
from dflash_cli.console import console, show_bytes
from dflash_cli.options import AsJson

DEFAULTS = TrainSettings()
BAR = 24


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("inspect-buckets")
    def inspect_buckets(
        cache: Annotated[Path, typer.Argument(metavar="CACHE", help="The cache's folder.")],
        token_budget: Annotated[
            int, typer.Option(min=1, help="Padded tokens of a micro-batch.")
        ] = DEFAULTS.token_budget,
        max_samples: Annotated[int, typer.Option(min=1, help="Samples of a micro-batch.")] = DEFAULTS.max_samples,
        accumulation: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = DEFAULTS.accumulation,
        world_size: Annotated[int, typer.Option(min=1, help="Ranks that share a step.")] = 1,
        min_buffer: Annotated[int, typer.Option(min=0, help="Micro-batches to pull from.")] = DEFAULTS.min_buffer,
        seed: Annotated[int, typer.Option(min=0, help="Seed of the order.")] = DEFAULTS.seed,
        as_json: AsJson = False,
    ) -> None:
        """Show each bucket, and how well the planned order mixes them in every optimizer step."""
        settings = DEFAULTS.model_copy(
            update={
                "token_budget": token_budget,
                "max_samples": max_samples,
                "accumulation": accumulation,
                "min_buffer": min_buffer,
                "seed": seed,
            }
        )
        report = inspect_cache(cache, settings, world_size)
        if as_json:
            typer.echo(json.dumps(report))
        else:
            show(report)


def inspect_cache(cache: Path, settings: TrainSettings, world_size: int = 1) -> dict[str, Any]:
    """The figures of a cache, from its index alone (no hidden state is read)."""
    from dflash_cache.cache.index import open_index, split_columns
    from dflash_cache.cache.layout import read_manifest
    from dflash_cache.cache.rejected import read_rejected
    from dflash_cache.cache.shards import TORCH_DTYPES
    from dflash_cache.data.plan import BatchLimits, plan_epoch, step_bounds

    manifest = read_manifest(cache)
    index = split_columns(open_index(cache))
    limits = BatchLimits(settings.token_budget, settings.max_samples, "interleaved")
    plan = plan_epoch(index.length, index.bucket, limits, settings.seed, 0)
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
    state_bytes = len(manifest.layer_ids) * manifest.hidden_size * TORCH_DTYPES[manifest.dtype].itemsize
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
    return {
        "cache": str(cache),
        "target": manifest.target_model,
        "layer_ids": list(manifest.layer_ids),
        "dtype": manifest.dtype,
        "num_samples": manifest.num_samples,
        "cached_samples": int(samples.sum()),
        "rejected": dict(Counter(read_rejected(cache)["reason"].to_pylist())),
        "bytes": sum(bucket["bytes"] for bucket in buckets),
        "buckets": buckets,
        "mix": {
            order: _mix(index.length, index.bucket, settings, world_size, order).to_dict()
            for order in ("sequential", "shuffled", "interleaved")
        },
        "step_size": settings.accumulation * world_size,
        "num_steps": len(bounds) - 1,
        "padding_efficiency": efficiency,
    }


def _mix(lengths: np.ndarray, buckets: np.ndarray, settings: TrainSettings, world_size: int, order: Any) -> Any:
    from dflash_cache.data.mixing import measure_mix
    from dflash_cache.data.plan import BatchLimits, plan_epoch, step_bounds
    from dflash_cache.train.sampler import pull_order

    limits = BatchLimits(settings.token_budget, settings.max_samples, order)
    plan = plan_epoch(lengths, buckets, limits, settings.seed, 0)
    bounds = step_bounds(plan.num_micro_batches, settings.accumulation * world_size)
    pulled = pull_order(plan.bucket, bounds, settings.min_buffer, (settings.seed, 0))
    efficiency = float(plan.tokens.sum() / max(1, plan.padded_tokens.sum()))
    return measure_mix(plan.bucket[pulled], bounds, int(buckets.max()) + 1, efficiency)


def show(report: dict[str, Any]) -> None:
    """Two tables: the buckets with bars, the orders with their figures."""
    console.print(
        f"{report['cache']}: {report['cached_samples']:,} of {report['num_samples']:,} samples of {report['target']}, "
        f"layers {report['layer_ids']}, {report['dtype']}, {show_bytes(report['bytes'])}",
        soft_wrap=True,
    )
    for reason, count in report["rejected"].items():
        console.print(f"{count:,} samples were left out: {reason}.")
    table = Table(box=None, pad_edge=False)
    for name in ("lengths", "samples", "share", "", "tokens", "shards", "bytes", "padding", "batches", "of all"):
        table.add_column(name, justify="left" if not name else "right")
    for bucket in report["buckets"]:
        table.add_row(
            f"{bucket['shortest']}–{bucket['longest']}",
            f"{bucket['samples']:,}",
            f"{bucket['share']:.1%}",
            "█" * round(BAR * bucket["share"]),
            f"{bucket['tokens']:,}",
            str(bucket["shards"]),
            show_bytes(bucket["bytes"]),
            f"{bucket['padding_efficiency']:.1%}",
            f"{bucket['micro_batches']:,}",
            f"{bucket['micro_batch_share']:.1%}",
        )
    console.print(table)
    console.print(
        f"\nAn epoch has {report['num_steps']:,} steps of {report['step_size']} micro-batches; "
        f"{report['padding_efficiency']:.1%} of the padded tokens are real. How each order mixes them:"
    )
    orders = Table(box=None, pad_edge=False)
    for name in ("order", "KL mean", "KL max", "off share", "longest run", "steps missing a bucket", "of one bucket"):
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
