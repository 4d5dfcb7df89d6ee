"""The training loop: steps of several micro-batches of mixed lengths, logged, validated, saved.

A step sums the weighted loss over its micro-batches, divides the gradients by the step's summed weights, clips, and
moves. So a step over N micro-batches has the gradient of one large batch, whatever their lengths.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_cache.config.settings import Config, ObjectiveSettings
from dflash_cache.data.plan import EpochPlan
from dflash_cache.drafter.frozen import FrozenTarget
from dflash_cache.drafter.loss import BlockLoss, block_loss
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.objective import weigh_slots
from dflash_cache.errors import RunError
from dflash_cache.train.checkpoint import best_score, mark_best, save_checkpoint
from dflash_cache.train.metrics import Record, Sink, StepSums
from dflash_cache.train.sampler import pull_order
from dflash_cache.train.schedules import learning_rate
from dflash_cache.train.setup import (
    VALIDATION_EPOCH,
    TrainingRun,
    epoch_bounds,
    open_run,
    plan_training_epoch,
    write_plan,
)
from dflash_cache.train.signals import StopRequest
from dflash_cache.train.stream import BlockDraw, MicroBatch, load_micro_batch, read_ahead

MAX_SKIPPED = 10  # steps in a row with a non-finite gradient before the run stops


def train(config: Config, sinks: Sequence[Sink]) -> bool:
    """Train until the last step, or until a signal asks to stop; True if the run is complete.

    Every record goes to every sink. What was trained is in the run's folder (`checkpoints/`).
    """
    with open_run(config) as run, StopRequest() as stop:
        skipped = 0
        for epoch, micro_batches, waited in steps(run):
            record = take_step(run, micro_batches)
            skipped = skipped + 1 if record["skipped"] else 0
            run.step += 1
            record |= {"kind": "train", "step": run.step, "num_steps": run.num_steps, "epoch": epoch, "wait": waited}
            _show(record, sinks)
            if skipped == MAX_SKIPPED:
                names = [sample for micro_batch in micro_batches for sample in micro_batch.batch.sample.tolist()]
                raise RunError(
                    f"The gradient was not finite for {MAX_SKIPPED} steps, up to step {run.step} with samples "
                    f"{names[:8]} …: lower train.learning_rate, or look at these samples."
                )
            done = run.step == run.num_steps
            score = None
            if len(run.validation_rows) and (run.step % config.train.validate_every == 0 or done):
                validation = validate(run)
                _show(validation, sinks)
                score = validation["acceptance_estimate"]
            _save_if_due(run, score, done or stop.requested)
            if stop.requested:
                return done
        return True


def steps(run: TrainingRun) -> Iterator[tuple[int, list[MicroBatch], float]]:
    """From the run's step on: the epoch, the step's micro-batches, and the seconds it waited for them."""
    settings = run.config.train
    first = 0
    for epoch, num_steps in enumerate(run.epoch_steps):
        begin = run.step - first
        first += num_steps
        if begin >= num_steps:
            continue
        plan = run.plan(epoch)
        write_plan(run.config, plan, epoch)
        bounds = epoch_bounds(run.config, plan)
        order = pull_order(plan.bucket, bounds, settings.min_buffer, (settings.seed, epoch))
        stream = micro_batch_stream(run, plan, order[bounds[begin] :], epoch)
        for begin_place, end_place in zip(bounds[begin:-1], bounds[begin + 1 :], strict=True):
            if run.step >= run.num_steps:
                return
            started = time.perf_counter()
            micro_batches = [next(stream) for _ in range(end_place - begin_place)]
            yield epoch, micro_batches, time.perf_counter() - started


def micro_batch_stream(run: TrainingRun, plan: EpochPlan, order: np.ndarray, epoch: int) -> Iterator[MicroBatch]:
    """The micro-batches at these places of the list, read ahead in this order."""
    settings = run.config.train
    shape = run.drafter.shape
    manifest = run.reader.manifest
    draw = BlockDraw(shape.block_size, settings.anchors_per_sample, settings.seed, epoch)
    token_bytes = len(manifest.layer_ids) * manifest.hidden_size * (4 if manifest.dtype == "float32" else 2)
    items = ((place, int(plan.padded_tokens[place]) * token_bytes) for place in order.tolist())

    def load(place: int) -> MicroBatch:
        return load_micro_batch(run.reader, plan.rows_of(place), int(plan.bucket[place]), draw)

    return read_ahead(items, load, settings.reader_threads, settings.read_ahead_bytes)


def take_step(run: TrainingRun, micro_batches: list[MicroBatch]) -> Record:
    """One optimizer step; a non-finite gradient leaves the weights as they are and is reported as skipped."""
    started = time.perf_counter()
    config = run.config
    sums = StepSums(run.drafter.shape.block_size, run.device)
    rate = learning_rate(run.step, run.num_steps, config.train)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
    for micro_batch in micro_batches:
        loss = draft_loss(run.drafter, run.frozen, micro_batch.to(run.device), config.objective)
        loss.loss_sum.backward()  # type: ignore[no-untyped-call]
        sums.add(loss)
    norm = finish_gradients(run.drafter, sums.weight_sum, config.train.clip_norm)
    finite = bool(torch.isfinite(norm))  # synchronises the device
    for optimizer in run.optimizers:
        if finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - started
    tokens = sum(int(micro_batch.batch.length.sum()) for micro_batch in micro_batches)
    return sums.figures() | {
        "learning_rate": rate,
        "gradient_norm": float(norm),
        "skipped": not finite,
        "tokens": tokens,
        "samples": sum(len(micro_batch.batch.sample) for micro_batch in micro_batches),
        "blocks": sums.num_blocks,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "blocks_per_second": sums.num_blocks / seconds,
        "buckets": bucket_counts(micro_batches, len(run.reader.manifest.bucket_bounds)),
    }


def draft_loss(
    drafter: Drafter, frozen: FrozenTarget, micro_batch: MicroBatch, objective: ObjectiveSettings
) -> BlockLoss:
    """The summed, weighted loss of a micro-batch's blocks; matrix products in the frozen head's dtype."""
    dtype = frozen.head_VH.dtype
    blocks = micro_batch.blocks
    with torch.autocast(frozen.head_VH.device.type, dtype, enabled=dtype != torch.float32):
        context = drafter.read_context(micro_batch.batch.hidden_STLH.to(dtype))
        slots_SABH = frozen.embed_blocks(blocks.tokens_SA, drafter.shape)
        states_SABH = drafter(slots_SABH, context, blocks.anchors_SA)
    return block_loss(states_SABH, blocks, frozen.head_VH, partial(weigh_slots, settings=objective))


def finish_gradients(drafter: Drafter, weight_sum: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """Divide summed gradients by the step's weights and clip; returns the norm before clipping."""
    for parameter in drafter.parameters():
        if parameter.grad is not None:
            parameter.grad /= weight_sum.clamp(min=1e-30)
    return torch.nn.utils.clip_grad_norm_(drafter.parameters(), clip_norm)


@torch.no_grad()
def validate(run: TrainingRun) -> Record:
    """Loss and expected acceptance length on the held-out samples, with the same anchors every time."""
    started = time.perf_counter()
    plan = plan_training_epoch(run.config, run.reader, run.validation_rows, 0)
    sums = StepSums(run.drafter.shape.block_size, run.device)
    order = np.arange(plan.num_micro_batches)
    for micro_batch in micro_batch_stream(run, plan, order, VALIDATION_EPOCH):
        sums.add(draft_loss(run.drafter, run.frozen, micro_batch.to(run.device), run.config.objective))
    figures: dict[str, Any] = {"kind": "validation", "step": run.step, "blocks": sums.num_blocks}
    return figures | sums.figures() | {"seconds": time.perf_counter() - started}


def bucket_counts(micro_batches: list[MicroBatch], num_buckets: int) -> list[int]:
    """Micro-batches of each bucket in a step."""
    counts: list[int] = np.bincount(
        [micro_batch.bucket for micro_batch in micro_batches], minlength=num_buckets
    ).tolist()
    return counts


def _save_if_due(run: TrainingRun, score: float | None, last: bool) -> None:
    run_dir = Path(run.config.run_dir)
    settings = run.config.train
    better = score is not None and score > best_score(run_dir, run.step)
    if last or better or run.step % settings.checkpoint_every == 0:
        path = save_checkpoint(run_dir, run.checkpoint(), settings.keep_checkpoints)
        if better and score is not None:
            mark_best(run_dir, path, run.step, score)


def _show(record: Record, sinks: Sequence[Sink]) -> None:
    for sink in sinks:
        sink(record)
