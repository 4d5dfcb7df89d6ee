"""Checkpoints: one file each, or a folder each of sharded ranks (`sharded_checkpoint`), written aside and renamed.

The last few and the best are kept.

A checkpoint holds the drafter, the optimizer and the number of steps done. Order, anchors and learning rate are
functions of that number, so nothing else has to be stored and a resumed run gives the same bits as one that never
stopped. It names what it belongs to (cache, drafter's shape, settings that decide the bits), and anything else is
refused with the difference shown.
"""

import io
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from shutil import rmtree
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from dflash_cache.cache.files import explain_write_errors, write_atomically
from dflash_cache.drafter.export import read_export, read_trained_for
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.shape import DrafterShape
from dflash_cache.drafter.trained_for import parse_target
from dflash_cache.errors import RunError
from dflash_cache.train.checkpoint_folder import ParameterOf, is_folder_checkpoint, read_folder, split_fields

BEST = "best.json"
MEASURE = "walk"  # how the mark's estimate was made; a mark without it was made over random anchors, which is higher
ORDER = "order of the first epoch"  # the identity's key for what no setting but the program itself decides


@dataclass(frozen=True)
class Checkpoint:
    """step: optimizer steps done; drafter: its tensors; optimizers: their states; identity: what this run is.

    average: the moving average of the drafter's tensors, None without one; num_skipped: steps that were not finite,
    skipped_in_row: those since the last one that was.
    best: the mark of the best checkpoint (this one, if it is), empty before any.
    trained_for: the drafter's target (`TrainedFor`); empty in older ones.
    """

    step: int
    drafter: dict[str, Tensor]
    optimizers: list[dict[str, Any]]
    identity: dict[str, Any]
    shape: dict[str, Any]
    average: dict[str, Tensor] | None = None
    num_skipped: int = 0
    skipped_in_row: int = 0
    best: dict[str, Any] = field(default_factory=dict)
    trained_for: dict[str, Any] = field(default_factory=dict)


def checkpoints_dir(run_dir: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_dir / "checkpoints"


def checkpoint_path(run_dir: Path, step: int, sharded: bool = False) -> Path:
    """The checkpoint after `step` steps."""
    return checkpoints_dir(run_dir) / f"step-{step:06d}{'' if sharded else '.pt'}"


def save_checkpoint(run_dir: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write it atomically, then remove all but the last `keep` and the best."""
    path = checkpoint_path(run_dir, checkpoint.step)
    buffer = io.BytesIO()
    torch.save(vars(checkpoint), buffer)
    write_atomically(path, buffer.getvalue())
    remove_old(run_dir, keep, path)
    return path


def remove_old(run_dir: Path, keep: int, newest: Path) -> None:
    """Remove all but the last `keep`, the best and the newest."""
    for old in _list(run_dir)[:-keep]:
        if old in (best_path(run_dir), newest):
            continue
        if old.is_dir():
            aside = old.replace(old.with_name(f".{old.name}.partial"))  # at once: a half of it is none
            rmtree(aside)
        else:
            old.unlink()


def remove_unfinished(run_dir: Path) -> None:
    """Remove what killed processes left half written; nobody may be training the run. Raises WriteError."""
    for folder in (run_dir, run_dir / "plans", checkpoints_dir(run_dir)):
        for leftover in folder.glob(".*.partial"):
            with explain_write_errors(leftover):
                rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def load_checkpoint(path: Path, parameter_of: ParameterOf | None = None) -> Checkpoint:
    """Read one, on the CPU; with `parameter_of` (by a tensor's name) every tensor split as its parameter is.

    Raises RunError if it is missing or damaged.
    """
    try:
        if path.is_dir():
            return Checkpoint(**read_folder(path, parameter_of))
        fields = torch.load(path, map_location="cpu", weights_only=True, mmap=parameter_of is not None)
        return Checkpoint(**(split_fields(fields, parameter_of) if parameter_of else fields))
    except FileNotFoundError:
        raise RunError(f"There is no checkpoint {path}: run `dflash train` first.") from None
    except (Exception, CheckpointException) as error:  # whatever torch raises; the second is a BaseException
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, UnpicklingError):  # torch's own text advises to run what is pickled there
            reason = "it holds no tensors that torch can read"
        raise RunError(
            f"The checkpoint {path} is damaged ({reason}): remove it to go on from the one before, or name another "
            "if it was never one."
        ) from None


def load_drafter(path: Path) -> Drafter:
    """The drafter of a checkpoint, of a run's folder (its best, else its last one), or of an exported folder.

    Of a checkpoint with a moving average it is that. Raises RunError.
    """
    if checkpoints_dir(path).is_dir():
        path = best_path(path) or latest_path(path) or path
    if path.is_dir() and not is_folder_checkpoint(path):
        if not (path / "config.json").exists():
            raise RunError(f"There is no checkpoint in {path}: run `dflash train` first.")
        shape, tensors = read_export(path)
        trained_for = read_trained_for(path)
    else:
        checkpoint = load_checkpoint(path)
        shape, tensors = DrafterShape.from_dict(checkpoint.shape), checkpoint.average or checkpoint.drafter
        trained_for = parse_target(checkpoint.trained_for)
    drafter = Drafter(shape)
    drafter.load_state_dict(tensors)
    drafter.trained_for = trained_for
    return drafter.eval()


def latest_path(run_dir: Path) -> Path | None:
    """The last checkpoint, if there is one."""
    return next(iter(reversed(_list(run_dir))), None)


def best_path(run_dir: Path) -> Path | None:
    """The checkpoint with the best validation, if there is one."""
    best = _read_best(run_dir)
    path = checkpoints_dir(run_dir) / best.get("checkpoint", "none")
    return path if path.exists() else None


def best_score(run_dir: Path, up_to_step: float = math.inf) -> float:
    """Validation's acceptance estimate of the best checkpoint; −inf without one, or if it is past `up_to_step`.

    An estimate that was made otherwise (MEASURE) is compared with none: its checkpoint is the best until the next one.
    """
    best = _read_best(run_dir)
    comparable = best.get("measure") == MEASURE and best["step"] <= up_to_step
    return float(best["acceptance_estimate"]) if comparable else float("-inf")


def best_mark(
    run_dir: Path, step: int, acceptance_estimate: float | None = None, sharded: bool = False
) -> dict[str, Any]:
    """The mark to be saved with the checkpoint of `step`: its own if it has an estimate, else the one that stands."""
    if acceptance_estimate is None:
        return _read_best(run_dir)
    name = checkpoint_path(run_dir, step, sharded).name
    return {"checkpoint": name, "step": step, "acceptance_estimate": acceptance_estimate, "measure": MEASURE}


def mark_best(run_dir: Path, mark: dict[str, Any]) -> None:
    """Remember the checkpoint of `best_mark` as the best so far."""
    write_atomically(checkpoints_dir(run_dir) / BEST, json.dumps(mark).encode())


def restore_best(run_dir: Path, checkpoint: Checkpoint) -> None:
    """Mark as best what the checkpoint knows as best: the run may have been killed before it was marked."""
    if checkpoint.best and checkpoint.best != _read_best(run_dir):
        mark_best(run_dir, checkpoint.best)


def check_identity(checkpoint: Checkpoint, now: dict[str, Any], run_dir: Path) -> None:
    """Raise RunError, showing the differences, if the run's folder belongs to something else."""
    was = checkpoint.identity
    different = differences(was, now)
    if not different:
        return
    if different == differences({ORDER: was.get(ORDER)}, {ORDER: now.get(ORDER)}):
        raise RunError(
            f"The run in {run_dir} has another order of its samples, though its settings are the same ({different}): "
            "go on with the versions of numpy and dflash-cache that it was begun with, or in another run_dir."
        )
    raise RunError(
        f"The run in {run_dir} was made with other settings ({different}): set run_dir to another folder, or take the "
        "settings back."
    )


def differences(was: dict[str, Any], now: dict[str, Any], before: str = "was", after: str = "is") -> str:
    """ "key: was 1, is 2; …" for every key whose values differ; empty if none does."""
    return "; ".join(
        f"{key}: {before} {was.get(key)}, {after} {now.get(key)}"
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != now.get(key)
    )


def _read_best(run_dir: Path) -> dict[str, Any]:
    """What `mark_best` wrote; empty without it, or if someone broke it (the next validation writes it anew)."""
    try:
        best: dict[str, Any] = json.loads((checkpoints_dir(run_dir) / BEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return best


def _list(run_dir: Path) -> list[Path]:
    paths = [path for path in checkpoints_dir(run_dir).glob("step-*") if path.suffix in ("", ".pt")]
    return sorted(paths, key=lambda path: int(path.stem.removeprefix("step-")))
