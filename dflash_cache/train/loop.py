"""The training loop: steps of several micro-batches of mixed lengths, logged, validated, saved.

A step sums the weighted loss over its micro-batches on all ranks, divides the gradients by the step's summed weights,
clips, and moves. So a step over N micro-batches has the gradient of one large batch, whatever their lengths and
wherever they were computed. Every rank makes every move; the first one writes.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_cache.config.settings import Config
from dflash_cache.data.plan import EpochPlan
from dflash_cache.drafter.anchors import pad_anchors
from dflash_cache.drafter.loss import BlockLoss
from dflash_cache.errors import RunError
from dflash_cache.train.average import update_average
from dflash_cache.train.checkpoint import best_mark, best_score, mark_best, save_checkpoint
from dflash_cache.train.forward import DraftPass, draft_loss, draft_streaks, shared_casts
from dflash_cache.train.metrics import PassSums, Record, Sink, StepSums
from dflash_cache.train.mix import NO_BUCKET, EpochMix, tabulate_step
from dflash_cache.train.noise import add_noise, noise_level
from dflash_cache.train.pace import Pace
from dflash_cache.train.ranks import Ranks
from dflash_cache.train.sampler import EpochOrder, buffer_fill
from dflash_cache.train.schedules import learning_rate
from dflash_cache.train.setup import PAD_TO, VALIDATION_EPOCH, TrainingRun, open_run, plan_training_epoch, write_plan
from dflash_cache.train.sharded_checkpoint import save_sharded
from dflash_cache.train.sharding import own_part, pass_nothing, sum_after_backward, whole_weights
from dflash_cache.train.signals import StopRequest
from dflash_cache.train.stream import AnchorDraw, MicroBatch, ReadAhead, load_micro_batch
from dflash_cache.train.walk import AnswerWalks

MAX_NAMED = 8  # samples that are named where a step was not finite


@dataclass(frozen=True)
class StepInput:
    """A rank's part of one step of `size` micro-batches: those at `slots` of it, ascending.

    buffer_fill: list entries that the step's micro-batches were pulled from, on average; wait_seconds: for the data;
    ready: micro-batches that were loaded when the step began. The last two are this rank's.
    """

    epoch: int
    size: int
    slots: list[int]
    micro_batches: list[MicroBatch]
    mix: EpochMix
    buffer_fill: float
    wait_seconds: float
    ready: int


def train(config: Config, sinks: Sequence[Sink], ranks: Ranks | None = None) -> bool:
    """Train until the last step, or until a signal asks any rank to stop; True if the run is complete.

    Every record goes to every sink (of each rank its own). What was trained is in the run's folder (`checkpoints/`).
    """
    with open_run(config, ranks) as run, StopRequest() as stop:
        for _ in advance(run, sinks, stop):
            pass
        return run.step == run.num_steps


def advance(run: TrainingRun, sinks: Sequence[Sink], stop: StopRequest) -> Iterator[None]:
    """Take the run's steps, yielding after each one; ends, with a checkpoint, after the last or a stop request."""
    pace = Pace(run.device)
    for part in steps(run):
        taken = take_step(run, part)
        run.step += 1
        record: Record = {"kind": "train", "step": run.step, "num_steps": run.num_steps} | taken
        _show(record | pace.add(record), sinks)
        if run.skipped_in_row >= run.config.train.max_skipped:
            raise _divergence(run, record["suspects"])
        done = run.step == run.num_steps
        score = None
        if len(run.validation_rows) and (run.step % run.config.train.validate_every == 0 or done):
            validation = validate(run)
            _show(validation, sinks)
            score = validation["acceptance_estimate"]
        stopped = run.ranks.any(stop.requested)
        if score is not None or done or stopped or run.step % run.config.train.checkpoint_every == 0:
            _save(run, score, done or stopped)
        yield
        if stopped:
            return


def steps(run: TrainingRun) -> Iterator[StepInput]:
    """This rank's part of every step from the run's on; its micro-batches are dropped when the next is asked for."""
    ranks = run.ranks
    first = 0
    last_run: tuple[int, int] | None = None
    for epoch, num_steps in enumerate(run.epoch_steps):
        begin = run.step - first
        first += num_steps
        if begin >= num_steps:
            continue
        plan = run.plan(epoch)
        if ranks.is_first:
            write_plan(run.config, plan, epoch)
        order = EpochOrder.from_plan(plan, run.config.train, epoch, ranks.world_size)
        last_run = last_run or find_last_run(run, epoch)
        mix = EpochMix(plan.bucket[order.order], int(order.bounds[begin]), run.num_buckets, last_run)
        fill_M = buffer_fill(order.order, run.config.train.min_buffer)
        places = (place for places in order.steps(begin, ranks.rank) for place in places[places >= 0].tolist())
        with closing(micro_batch_stream(run, plan, places, epoch)) as stream:
            for step in range(begin, num_steps):
                if run.step >= run.num_steps:
                    return
                started, ready = time.perf_counter(), stream.num_ready
                slots = [slot for slot in order.slots(step, ranks.rank).tolist() if slot >= 0]
                micro_batches = stream.take(len(slots))
                fill = float(fill_M[order.bounds[step] : order.bounds[step + 1]].mean())
                wait_seconds = time.perf_counter() - started
                yield StepInput(epoch, len(order.step(step)), slots, micro_batches, mix, fill, wait_seconds, ready)
                micro_batches.clear()  # whoever still holds the step holds no states while the next one is loaded
        last_run = mix.last_run


def find_last_run(run: TrainingRun, epoch: int) -> tuple[int, int]:
    """Bucket and length of the run that the epochs before this one ended with, from their orders alone."""
    if epoch == 0:
        return NO_BUCKET, 0
    plan = run.plan(epoch - 1)
    order = EpochOrder.from_plan(plan, run.config.train, epoch - 1, run.ranks.world_size)
    bucket_M = plan.bucket[order.order]
    of_one_bucket = len(np.unique(bucket_M)) == 1
    before = find_last_run(run, epoch - 1) if of_one_bucket else (NO_BUCKET, 0)
    return EpochMix(bucket_M, len(bucket_M), run.num_buckets, before).last_run


def micro_batch_stream(
    run: TrainingRun, plan: EpochPlan, places: Iterable[int], epoch: int
) -> ReadAhead[int, MicroBatch]:
    """The micro-batches at these places of the list, read ahead in this order."""
    settings = run.config.train
    manifest = run.reader.manifest
    draw = anchor_draw(run, epoch)
    token_bytes = len(manifest.layer_ids) * manifest.hidden_size * (4 if manifest.dtype == "float32" else 2)

    def size(place: int) -> int:
        num_samples = len(plan.rows_of(place))
        longest = int(plan.padded_tokens[place]) // num_samples
        return num_samples * (longest + -longest % PAD_TO) * token_bytes

    def load(place: int) -> MicroBatch:
        return load_micro_batch(run.read_batch, plan.rows_of(place), int(plan.bucket[place]), draw)

    items = ((place, size(place)) for place in places)
    return ReadAhead(items, load, settings.reader_threads, settings.read_ahead_bytes)


def anchor_draw(run: TrainingRun, epoch: int) -> AnchorDraw:
    """How the epoch's anchors are drawn."""
    settings = run.config.train
    return AnchorDraw(settings.anchors_per_sample, settings.seed, epoch, settings.max_anchors)


def take_step(run: TrainingRun, part: StepInput) -> Record:
    """One optimizer step; a non-finite loss or gradient leaves all weights as they are, is counted and reported.

    The record is of the whole step, but for `seconds`, `wait` and `batch.ready`, which are this rank's.
    """
    started = time.perf_counter()
    config = run.config
    sums = StepSums(run.drafter.shape.block_size, run.num_buckets, run.device)
    rate = learning_rate(run.step, run.num_steps, config.train)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
    losses = make_passes(run, part, sums)
    table = tabulate_step(part.size, zip(part.slots, part.micro_batches, strict=True))
    table_G = torch.from_numpy(table).to(run.device)
    run.ranks.sum([sums.by_bucket, table_G])
    if not run.is_sharded:
        run.ranks.sum_gradients(run.drafter.parameters())
    norm = finish_gradients(run, sums.weight_sum)
    finite = bool(torch.isfinite(norm) & torch.isfinite(sums.by_bucket[:, 0].sum()))  # synchronises the device
    suspects = {} if finite else {"suspects": name_suspects(run, part, losses)}
    run.num_skipped += not finite
    run.skipped_in_row = 0 if finite else run.skipped_in_row + 1
    for optimizer in run.optimizers:
        if finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if finite and run.average is not None and config.train.ema_decay is not None:
        update_average(run.average, run.drafter, config.train.ema_decay, run.step)
    seconds = time.perf_counter() - started
    figures, batch = sums.figures(), part.mix.add(table_G.cpu().numpy())
    tokens, samples = batch.pop("tokens"), batch.pop("samples")
    return (
        figures
        | suspects
        | {
            "epoch": part.epoch,
            "learning_rate": rate,
            "noise": noise_level(run.step, run.num_steps, config.train.noise),
            "gradient_norm": float(norm),
            "skipped": not finite,
            "num_skipped": run.num_skipped,
            "tokens": tokens,
            "samples": samples,
            "seconds": seconds,
            "wait": part.wait_seconds,
            "batch": batch | sums.bucket_figures() | {"buffer_fill": part.buffer_fill, "ready": part.ready},
        }
    )


def make_passes(run: TrainingRun, part: StepInput, sums: StepSums) -> list[torch.Tensor]:
    """Forward and backward of this rank's micro-batches, added to `sums`; their losses."""
    losses: list[torch.Tensor] = []
    with run.ranks.explain_losses(), whole_weights(run.draft):
        cap_weight = weigh_entropy(run, part)
        with nullcontext() if run.is_sharded else shared_casts():  # a sharded weight is gathered anew for each pass
            for micro_batch in inputs(run, part):
                sum_after_backward(run.draft, last=len(losses) == len(part.micro_batches) - 1)
                loss = draft_loss(run.draft, run.frozen, micro_batch, run.config.objective, cap_weight)
                loss.loss_sum.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.loss_sum.detach())
                sums.add(loss, micro_batch.bucket)
        if not losses:
            pass_nothing(run.draft)
    return losses


def inputs(run: TrainingRun, part: StepInput) -> Iterator[MicroBatch]:
    """The step's micro-batches on the device, with the step's noise: the same ones whenever they are asked for."""
    settings = run.config.train
    level = noise_level(run.step, run.num_steps, settings.noise)
    for slot, micro_batch in zip(part.slots, part.micro_batches, strict=True):
        placed = place_states(run, micro_batch)
        states_STLH = placed.batch.hidden_STLH
        noisy_STLH = add_noise(states_STLH, level, settings.noise, (settings.seed, run.step, slot))
        yield replace(placed, batch=replace(placed.batch, hidden_STLH=noisy_STLH))


def place_states(run: TrainingRun, micro_batch: MicroBatch) -> MicroBatch:
    """On the device, states in the head's dtype: those that the drafter reads, and the last ones for its teacher."""
    moved = micro_batch.to(run.device)
    states_STLH = moved.batch.hidden_STLH.to(run.frozen.dtype)
    read_STLH = states_STLH[:, :, : len(run.drafter.shape.target_layer_ids)]
    return replace(moved, batch=replace(moved.batch, hidden_STLH=read_STLH), last_STH=states_STLH[:, :, -1])


@torch.no_grad()
def weigh_entropy(run: TrainingRun, part: StepInput) -> float:
    """What one right slot's entropy weighs in the step's sum, so that divided by its weights it is λ · their mean.

    Both terms are means over the whole step, with denominators of their own, known when its last micro-batch was
    looked at; so with `cap_lambda` a first pass without gradients counts. Synchronises the device.
    """
    cap_lambda = run.config.objective.cap_lambda
    if cap_lambda == 0:
        return 0.0
    hard_labels = run.config.objective.model_copy(update={"distill": 0.0})  # soft ones do not change the counts
    weight_and_right = torch.zeros(2, dtype=torch.float64, device=run.device)
    for micro_batch in inputs(run, part):
        loss = draft_loss(run.draft, run.frozen, micro_batch, hard_labels)
        weight_and_right += torch.stack([loss.weight_sum, loss.correct_NK.sum()])
    run.ranks.sum([weight_and_right])
    weight_sum, num_right = weight_and_right.tolist()
    weight = cap_lambda * weight_sum / max(1.0, num_right)
    return weight if math.isfinite(weight) else 0.0  # the step is skipped, for the micro-batches that are not finite


@torch.no_grad()
def finish_gradients(run: TrainingRun, weight_sum: torch.Tensor) -> torch.Tensor:
    """Divide summed gradients by the step's weights and clip; returns the norm before clipping."""
    gradients = [own_part(each.grad) for each in run.drafter.parameters() if each.grad is not None]
    torch._foreach_div_(gradients, weight_sum.clamp(min=1e-30))
    norm = torch.nn.utils.get_total_norm(gradients)
    if run.is_sharded:
        square = norm.square()
        run.ranks.sum([square])
        norm = square.sqrt()
    shrink = (run.config.train.clip_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    torch._foreach_mul_(gradients, shrink)
    return norm


@torch.no_grad()
def validate(run: TrainingRun) -> Record:
    """Loss on the held-out samples, with the same anchors every time, and what decoding would take through them.

    Of the weights' moving average, if there is one; the loss is the plain weighted cross-entropy of all slots, whatever
    else training adds. Each rank takes its share of the micro-batches.
    """
    started = time.perf_counter()
    plan = plan_training_epoch(run.config, run.reader, run.validation_rows, 0)
    block_size = run.drafter.shape.block_size
    sums = StepSums(block_size, run.num_buckets, run.device)
    passes = PassSums(block_size, run.num_buckets, run.device)
    places = range(run.ranks.rank, plan.num_micro_batches, run.ranks.world_size)
    whole_blocks = run.config.objective.model_copy(update={"max_slots": None, "distill": 0.0})
    draft = run.average_draft or run.draft
    with run.ranks.explain_losses(), whole_weights(draft):
        for micro_batch in micro_batch_stream(run, plan, places, VALIDATION_EPOCH):
            placed = place_states(run, micro_batch)
            loss = draft_loss(draft, run.frozen, placed, whole_blocks)
            sums.add(loss, micro_batch.bucket)
            passes.add(walk_answers(run, draft, placed, loss), micro_batch.bucket)
            del micro_batch, placed, loss  # before the next is asked for
    run.ranks.sum([sums.by_bucket, passes.by_bucket])
    figures: dict[str, Any] = {"kind": "validation", "step": run.step}
    for found in (sums, passes):
        figures |= found.figures() | found.bucket_figures()
    return figures | {"seconds": time.perf_counter() - started}


def walk_answers(run: TrainingRun, draft: DraftPass, placed: MicroBatch, loss: BlockLoss) -> list[list[int]]:
    """What each pass of greedy decoding yields in the micro-batch's answers (`walk`), an answer a list.

    The blocks of `loss`, at the anchors drawn, are known; further ones are computed as many at a time as are drawn.
    """
    walks = AnswerWalks(placed.batch.loss_mask.cpu().numpy())
    walks.learn(placed.anchors_SA.cpu().numpy(), loss.correct_NK.long().cumprod(1).sum(1).cpu().numpy())
    count = anchor_draw(run, VALIDATION_EPOCH).count_of(len(placed.batch.sample))
    while (wanted := walks.next_anchors(count)) is not None:
        anchors_SA = pad_anchors(wanted)
        streaks_SA = draft_streaks(draft, run.frozen, placed, anchors_SA.to(run.device)).cpu()
        walks.learn(anchors_SA.numpy(), streaks_SA[anchors_SA >= 0].numpy())
    return walks.yields


def name_suspects(run: TrainingRun, part: StepInput, losses: Sequence[torch.Tensor]) -> str:
    """The first samples of the step's micro-batches, on all ranks, whose loss is not finite; of all if each is.

    Every rank asks. Synchronises the device.
    """
    own = [micro_batch.batch.sample.tolist() for micro_batch in part.micro_batches]
    bad = [samples for samples, loss in zip(own, losses, strict=True) if not torch.isfinite(loss)]
    found = run.ranks.gather(bad)
    if not any(found):
        found = run.ranks.gather(own)
    names = [str(sample) for rank in found for samples in rank for sample in samples]
    return ", ".join(names[:MAX_NAMED]) + (" …" if len(names) > MAX_NAMED else "")


def _divergence(run: TrainingRun, suspects: str) -> RunError:
    return RunError(
        f"Too many steps in a row ({run.skipped_in_row}) had a loss or gradient that was not finite, up to step "
        f"{run.step} with samples {suspects}: lower train.learning_rate, look at these samples, or raise "
        "train.max_skipped."
    )


def _save(run: TrainingRun, score: float | None, last: bool) -> None:
    """Save what is due or better than all before, as the first rank finds: it alone reads the mark of the best."""
    run_dir = Path(run.config.run_dir)
    settings = run.config.train
    better = run.ranks.gather(score is not None and score > best_score(run_dir, run.step))[0]
    if not (last or better or run.step % settings.checkpoint_every == 0):
        return
    mark = best_mark(run_dir, run.step, score if better else None, run.is_sharded)
    checkpoint = replace(run.checkpoint(), best=mark)
    if run.is_sharded:
        save_sharded(run_dir, checkpoint, settings.keep_checkpoints, run.ranks)
    elif run.ranks.is_first:
        save_checkpoint(run_dir, checkpoint, settings.keep_checkpoints)
    if better and run.ranks.is_first:
        mark_best(run_dir, mark)


def _show(record: Record, sinks: Sequence[Sink]) -> None:
    for sink in sinks:
        sink(record)
