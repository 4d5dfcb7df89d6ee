"""Everything a training run needs, opened and checked before its first step.

The cache must be whole and of this target, the run's folder new or of this very run, the drafter's shape possible:
whatever is wrong ends here in one sentence, not in a figure weeks later.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_cache.cache.files import write_atomically
from dflash_cache.cache.layout import Manifest
from dflash_cache.cache.lock import lock_folder
from dflash_cache.cache.reader import Batch, CacheReader
from dflash_cache.cache.rejected import read_rejected
from dflash_cache.config.loading import dump_config
from dflash_cache.config.settings import Config, TrainSettings
from dflash_cache.data.held_out import split_rows
from dflash_cache.data.plan import (
    BatchLimits,
    EpochPlan,
    count_micro_batches,
    encode_plan,
    plan_epoch,
    step_bounds,
)
from dflash_cache.drafter.device import resolve_device
from dflash_cache.drafter.frozen import FrozenTarget, load_frozen
from dflash_cache.drafter.mask_token import check_unused, choose_mask_token
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.shape import OF_LOGITS, shape_from_target
from dflash_cache.drafter.start import start_drafter
from dflash_cache.drafter.teacher import load_teacher
from dflash_cache.drafter.trained_for import target_of_cache
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.errors import CacheError, RunError
from dflash_cache.train.average import start_average
from dflash_cache.train.checkpoint import (
    ORDER,
    Checkpoint,
    check_identity,
    differences,
    latest_path,
    load_checkpoint,
    remove_unfinished,
    restore_best,
)
from dflash_cache.train.earlier import fingerprint, keep_mask_token, load_earlier, start_from
from dflash_cache.train.forward import DraftPass
from dflash_cache.train.ranks import Ranks
from dflash_cache.train.sampler import EpochOrder, order_fingerprint
from dflash_cache.train.sharding import shard

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PATIENCE_SECONDS = 20.0  # for another process that trains the run, before it is refused
VALIDATION_EPOCH = 2**31  # anchors of held-out samples: the same at every validation, of no training epoch

# Micro-batches have a multiple of so many tokens. For each size that it has not met, a CPU's bfloat16 product is built
# anew, which takes longer than to compute it (4 ms against 1), and a compiled kernel on a GPU likewise.
PAD_TO = 64


@dataclass
class TrainingRun:
    """One run: what it reads, what it trains, and how far it is (`step` optimizer steps done).

    draft: a pass through the drafter; average_draft: one through the moving average of its weights, if
    `train.ema_decay` is set; num_skipped: steps so far that were not finite, skipped_in_row: those since the last one
    that was.
    """

    config: Config
    reader: CacheReader
    read_batch: Callable[[np.ndarray], Batch]
    frozen: FrozenTarget
    draft: DraftPass
    average_draft: DraftPass | None
    optimizers: list[torch.optim.Optimizer]
    ranks: Ranks
    training_rows: np.ndarray
    validation_rows: np.ndarray
    epoch_steps: list[int]
    identity: dict[str, Any]
    step: int
    num_skipped: int = 0
    skipped_in_row: int = 0

    @property
    def drafter(self) -> Drafter:
        """What is trained; on sharded ranks its parameters are DTensors."""
        return self.draft.drafter

    @property
    def average(self) -> Drafter | None:
        """The moving average of its weights, if there is one."""
        return self.average_draft.drafter if self.average_draft else None

    @property
    def is_sharded(self) -> bool:
        """Whether this rank keeps a share of the weights."""
        return self.config.train.parallel == "sharded" and self.ranks.world_size > 1

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.ranks.device

    @property
    def num_buckets(self) -> int:
        """Buckets of the cache."""
        return len(self.reader.manifest.bucket_bounds)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        limit = self.config.train.max_steps
        total = sum(self.epoch_steps)
        return total if limit is None else min(total, limit)

    def plan(self, epoch: int) -> EpochPlan:
        """The epoch's list; the same whenever it is asked for."""
        return plan_training_epoch(self.config, self.reader, self.training_rows, epoch)

    def checkpoint(self) -> Checkpoint:
        """The run as it stands; on sharded ranks with this rank's part of the tensors."""
        return Checkpoint(
            step=self.step,
            drafter=self.drafter.state_dict(),
            average=self.average.state_dict() if self.average else None,
            optimizers=[optimizer.state_dict() for optimizer in self.optimizers],
            identity=self.identity,
            shape=self.drafter.shape.to_dict(),
            num_skipped=self.num_skipped,
            skipped_in_row=self.skipped_in_row,
            trained_for=target_of_cache(self.reader.manifest).to_dict(),
        )

    def parameter_of(self, name: str) -> Tensor | None:
        """The parameter that a checkpoint's tensor (`checkpoint_folder.flatten`) belongs to, if to any."""
        kind, _, rest = name.partition(".")
        if kind == "optimizers":
            number, place, _ = rest.split(".")
            groups = self.optimizers[int(number)].param_groups
            found: Tensor = [each for group in groups for each in group["params"]][int(place)]
            return found
        model = self.drafter if kind == "drafter" else self.average
        return None if model is None else dict(model.named_parameters()).get(rest)


@contextmanager
def open_run(config: Config, ranks: Ranks | None = None, reader: CacheReader | None = None) -> Iterator[TrainingRun]:
    """A new run, or the one in `run_dir` where its last checkpoint left it; without `ranks` in this process alone.

    `reader`, if given, is one of this cache that stays open.

    Raises CacheError, ConfigError, TargetError or RunError before anything but the run's lock is written.
    """
    settings = config.train
    ranks = ranks or Ranks(resolve_device(settings.device))
    device = ranks.device
    with ExitStack() as stack:
        if reader is None:
            reader = stack.enter_context(open_reader(config))
        files = TargetFiles(config.target)
        check_cache(reader, files, config)
        earlier = load_earlier(config.drafter, Path(config.run_dir))
        wanted, candidates = keep_mask_token(config.drafter, earlier), reader.manifest.mask_token_candidates
        mask_token = choose_mask_token(wanted, reader.manifest.vocab_size, candidates)
        check_unused(mask_token, candidates, reader.tables_dir)
        shape = shape_from_target(files.load_config(), wanted, reader.manifest.drafter_layer_ids, mask_token)
        drafter = Drafter(shape)
        drafter.attention, drafter.recomputes = settings.attention, settings.gradient_checkpointing
        init: str
        if earlier is None:
            init = start_drafter(drafter, config.drafter, files, settings.seed)
        else:
            start_from(drafter, earlier, str(config.drafter.init_from))
            init = f"weights {fingerprint(drafter)}"
        draft = DraftPass(drafter.to(device))
        average_draft = None if settings.ema_decay is None else DraftPass(start_average(drafter))
        if settings.parallel == "sharded" and ranks.world_size > 1:
            for each in (draft, average_draft) if average_draft else (draft,):
                shard(each, ranks)
        training_rows, validation_rows = split_rows(reader.index.sample, settings.validation_share, settings.seed)
        run = TrainingRun(
            config=config,
            reader=reader,
            read_batch=reader.read_batch,
            frozen=read_frozen(files, shape.embedding_scale, config, device),
            draft=draft,
            average_draft=average_draft,
            optimizers=make_optimizers(drafter, config.train),
            ranks=ranks,
            training_rows=training_rows,
            validation_rows=validation_rows,
            epoch_steps=[],
            identity={},
            step=0,
        )
        run.epoch_steps = [count_steps(run, epoch) for epoch in range(settings.epochs)]
        run.identity = identify(run, init)
        if ranks.is_first:
            stack.enter_context(_lock_run(Path(config.run_dir)))
            remove_unfinished(Path(config.run_dir))
        ranks.any(False)  # nobody looks for the last checkpoint while others may still be writing one
        _resume(run)
        _check_ranks(run)
        if ranks.is_first:
            write_atomically(Path(config.run_dir) / "config.yaml", dump_config(config).encode())
        yield run


def open_reader(config: Config) -> CacheReader:
    """The run's cache. Raises CacheError."""
    settings = config.train
    return CacheReader(config.cache_dir, settings.verify_checksums, settings.direct_io, config.remote, PAD_TO)


def check_cache(reader: CacheReader, files: TargetFiles, config: Config) -> None:
    """Raise CacheError if the cache is unfinished or was made from another target or with other layers."""
    manifest: Manifest = reader.manifest
    cache_dir = Path(config.cache_dir)
    fingerprint = files.fingerprint()
    if fingerprint != manifest.target_fingerprint:
        raise CacheError(
            f"The cache at {cache_dir} was made from another target ({manifest.target_model}, fingerprint "
            f"{manifest.target_fingerprint}) than {config.target.model} ({fingerprint}): set target.model to that one, "
            "or cache_dir to a cache of this one."
        )
    wanted, found = config.target.layer_ids, manifest.drafter_layer_ids
    if wanted is not None and wanted != found:
        raise CacheError(
            f"The cache at {cache_dir} holds layers {list(found)}, target.layer_ids is {list(wanted)}: "
            "take the cache's, or generate another cache."
        )
    if config.objective.distill > 0 and manifest.layer_ids[-1] != manifest.target_num_layers - 1:
        raise CacheError(
            f"objective.distill needs the target's last hidden state, which the cache at {cache_dir} does not hold: "
            "generate one with target.store_last_hidden, or set objective.distill to 0."
        )
    num_cached = len(reader.index.sample)
    num_rejected = read_rejected(
        reader.tables_dir
    ).num_rows  # bad states: left out when the cache was made, and recorded
    if num_cached + num_rejected < manifest.num_samples:
        raise CacheError(
            f"The cache at {cache_dir} is unfinished ({num_cached:,} of {manifest.num_samples:,} samples): run "
            "`dflash generate` again, it goes on where it stopped."
        )


def read_frozen(files: TargetFiles, embedding_scale: float, config: Config, device: torch.device) -> FrozenTarget:
    """The target's embedding and head, and its final norm if `objective.distill` asks for it. Raises TargetError."""
    dtype = COMPUTE_DTYPES[config.train.dtype]
    frozen = load_frozen(files, embedding_scale, dtype, device)
    return replace(frozen, teacher=load_teacher(files, dtype, device)) if config.objective.distill > 0 else frozen


def plan_training_epoch(config: Config, reader: CacheReader, rows: np.ndarray, epoch: int) -> EpochPlan:
    """The epoch's micro-batches over the index positions `rows`, in the order of the list."""
    plan = plan_epoch(
        reader.index.length[rows], reader.index.bucket[rows], _limits(config.train), config.train.seed, epoch
    )
    return replace(plan, rows=rows[plan.rows])


def count_steps(run: TrainingRun, epoch: int) -> int:
    """Optimizer steps of the epoch; its list is made only when training comes to it.

    The learning rate needs the number from the first step on, and epochs differ in it: cuts are counted, 0.1 µs a
    sample, nothing is ordered or kept.
    """
    index, rows, settings = run.reader.index, run.training_rows, run.config.train
    count = count_micro_batches(index.length[rows], index.bucket[rows], _limits(settings), settings.seed, epoch)
    return len(step_bounds(count, settings.accumulation * run.ranks.world_size)) - 1


def _limits(settings: TrainSettings) -> BatchLimits:
    return BatchLimits(settings.token_budget, settings.max_samples, settings.order)


def write_plan(config: Config, plan: EpochPlan, epoch: int) -> None:
    """Leave the epoch's list in the run's folder, to be looked at."""
    write_atomically(Path(config.run_dir) / "plans" / f"epoch-{epoch:03d}.parquet", encode_plan(plan))


def make_optimizers(drafter: Drafter, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """AdamW for all, or Muon for matrices and AdamW for the rest; weight decay on matrices only."""
    matrices = [parameter for parameter in drafter.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in drafter.parameters() if parameter.dim() <= 1]
    decayed = {"params": matrices, "weight_decay": settings.weight_decay}
    plain = {"params": vectors, "weight_decay": 0.0}
    if settings.optimizer == "adamw":
        return [torch.optim.AdamW([decayed, plain], lr=settings.learning_rate, betas=settings.betas, fused=True)]
    return [
        torch.optim.Muon(
            [decayed], lr=settings.learning_rate, momentum=settings.muon_momentum, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW([plain], lr=settings.learning_rate, betas=settings.betas, fused=True),
    ]


def identify(run: TrainingRun, init: str) -> dict[str, Any]:
    """What decides a run's bits: the cache, the drafter, the objective, and the training settings but for logging.

    `init` says where its weights started; an earlier drafter counts by its weights, wherever it lies.
    A step may be split over any number of ranks, so its size stands for accumulation and ranks. The first epoch's
    order stands for all that it is made with, down to numpy's random numbers. The factor and the cap of the target's
    logits go with the target, for which the cache stands.
    """
    config, ranks = run.config, run.ranks
    free = {
        "accumulation", "log_every", "checkpoint_every", "keep_checkpoints", "reader_threads", "read_ahead_bytes",
        "direct_io", "device", "max_skipped", "parallel", "gradient_checkpointing",
    }  # fmt: skip
    train = config.train.model_dump(mode="json")
    shape = {name: value for name, value in run.drafter.shape.to_dict().items() if name not in OF_LOGITS}
    plan = run.plan(0)
    order = EpochOrder.from_plan(plan, config.train, 0, ranks.world_size)
    return {
        "cache": run.reader.fingerprint,
        "init": init,
        "device": ranks.device.type,
        ORDER: order_fingerprint(plan, order),
        "train.accumulation × ranks": config.train.accumulation * ranks.world_size,
        **{f"drafter.{key}": list(value) if isinstance(value, tuple) else value for key, value in shape.items()},
        **{f"objective.{key}": value for key, value in config.objective.model_dump(mode="json").items()},
        **{f"train.{key}": value for key, value in train.items() if key not in free},
    }


def _lock_run(run_dir: Path) -> AbstractContextManager[int | None]:
    """One process, or one group of ranks, trains a run at a time. Raises RunError.

    What a killed parent leaves behind ends after the step under way, with a checkpoint: it is waited for.
    """
    held = f"The run in {run_dir} is being trained by another process"
    return lock_folder(run_dir, "train.lock", held, RunError, PATIENCE_SECONDS)


def _resume(run: TrainingRun) -> None:
    path = latest_path(Path(run.config.run_dir))
    if path is None:
        return
    checkpoint = load_checkpoint(path, run.parameter_of if run.is_sharded else None)
    check_identity(checkpoint, run.identity, Path(run.config.run_dir))
    run.drafter.load_state_dict(checkpoint.drafter)
    if run.average is not None and checkpoint.average is not None:
        run.average.load_state_dict(checkpoint.average)
    for optimizer, state in zip(run.optimizers, checkpoint.optimizers, strict=True):
        optimizer.load_state_dict(state)
    run.step = checkpoint.step
    run.num_skipped, run.skipped_in_row = checkpoint.num_skipped, checkpoint.skipped_in_row
    if run.ranks.is_first:
        restore_best(Path(run.config.run_dir), checkpoint)


def _check_ranks(run: TrainingRun) -> None:
    """Raise RunError unless all ranks stand at the same step of the same run."""
    views = run.ranks.gather({"checkpoint": run.step, **run.identity})
    for rank, view in enumerate(views):
        if different := differences(views[0], view, "on rank 0", f"on rank {rank}"):
            raise RunError(
                f"Rank {rank} sees another run than rank 0 ({different}): give all ranks the same configuration, and "
                "cache_dir and run_dir on storage that all of them share."
            )
