"""What a step did, gathered once and shown three ways: the console, a JSONL file and wandb get the same record.

Sums are gathered over the micro-batches of a step and divided once, so that short batches count by their slots, not
by their number. Two figures say how far drafts are right, the target's own token counted:

    anchor acceptance      over anchors drawn evenly: 1 + Σ_k (share of blocks whose first k drafts are all right)
    acceptance estimate    over the anchors that greedy decoding stands at (`walk`): tokens over passes, of all answers

Decoding stands at hard places more often, so the first is the higher one. It costs nothing beside the loss, and is the
training log's; validation has both, and the second chooses the best checkpoint: it is what decoding this text costs.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import numpy as np
import torch
import wandb
from torch import Tensor
from xxhash import xxh3_64

from dflash_cache.cache.files import write_atomically
from dflash_cache.config.settings import Config
from dflash_cache.drafter.loss import BlockLoss
from dflash_cache.errors import RunError

Record = dict[str, Any]
Sink = Callable[[Record], None]


class StepSums:
    """Sums over the micro-batches of one step (or of one validation), by bucket, as one small tensor on the device.

    by_bucket: (buckets, 3 + 4K) float64: loss, weight, blocks; then by slot: supervised, right, all right up to here,
    cross-entropy.
    Ranks add theirs up and have the whole step's.
    """

    def __init__(self, block_size: int, num_buckets: int, device: torch.device) -> None:
        self._num_slots = block_size - 1
        self.by_bucket = torch.zeros(num_buckets, 3 + 4 * self._num_slots, dtype=torch.float64, device=device)

    def add(self, loss: BlockLoss, bucket: int) -> None:
        """Add one micro-batch."""
        sums = torch.stack([loss.loss_sum.detach(), loss.weight_sum, loss.weight_sum.new_tensor(len(loss.mask_NK))])
        streak_NK = loss.correct_NK.long().cumprod(1)
        parts = [sums, loss.mask_NK.sum(0), loss.correct_NK.sum(0), streak_NK.sum(0), loss.ce_NK.sum(0)]
        self.by_bucket[bucket] += torch.cat([part.double() for part in parts])

    @property
    def weight_sum(self) -> Tensor:
        """Summed weights of all micro-batches, a float32 scalar on the device."""
        return self.by_bucket[:, 1].sum().float()

    def figures(self) -> Record:
        """Loss (nats, weighted mean), anchor acceptance, and by slot. Synchronises the device.

        By slot (`position_…`): accuracy, cross-entropy, and the share of blocks that are right up to here, whose sum is
        the anchor acceptance but for the target's own token.
        """
        total = self.by_bucket.cpu().sum(0)
        loss_sum, weight_sum, num_blocks = total[:3].tolist()
        slots_K, correct_K, streak_K, ce_K = total[3:].view(4, -1)
        accuracy = (correct_K / slots_K.clamp(min=1)).tolist()
        return {
            "loss": loss_sum / max(weight_sum, 1e-30),
            "anchor_acceptance": 1 + float(streak_K.sum()) / max(1.0, num_blocks),
            "accuracy": sum(accuracy) / len(accuracy),
            "position_accuracy": accuracy,
            "position_loss": (ce_K / slots_K.clamp(min=1)).tolist(),
            "position_anchor_acceptance": (streak_K / max(1.0, num_blocks)).tolist(),
            "blocks": round(num_blocks),
        }

    def bucket_figures(self) -> Record:
        """Loss, accuracy (of all slots) and anchor acceptance of each bucket, None where nothing was supervised."""
        figures: Record = {}
        for bucket, sums in enumerate(self.by_bucket.cpu()):
            loss_sum, weight_sum, num_blocks = sums[:3].tolist()
            slots, correct, streak, _ = sums[3:].view(4, -1).sum(1).tolist()
            figures[f"bucket_{bucket}_loss"] = loss_sum / weight_sum if weight_sum else None
            figures[f"bucket_{bucket}_accuracy"] = correct / slots if slots else None
            figures[f"bucket_{bucket}_anchor_acceptance"] = 1 + streak / num_blocks if slots else None
        return figures


class PassSums:
    """Sums over the passes that decoding would take through known answers, by bucket; ranks add theirs up.

    by_bucket: (buckets, B + 2) float64: passes by the tokens they yield, 1 … B; then answers, and the sum of each
    one's mean.
    """

    def __init__(self, block_size: int, num_buckets: int, device: torch.device) -> None:
        self._block_size = block_size
        self.by_bucket = torch.zeros(num_buckets, block_size + 2, dtype=torch.float64, device=device)

    def add(self, yields: Sequence[Sequence[int]], bucket: int) -> None:
        """Add answers of one bucket: each one's passes, as `AnswerWalks.yields` has them."""
        passes_B = np.bincount([m - 1 for answer in yields for m in answer], minlength=self._block_size)
        means = sum(sum(answer) / len(answer) for answer in yields)
        sums = torch.tensor([*passes_B.tolist(), len(yields), means], dtype=torch.float64)
        self.by_bucket[bucket] += sums.to(self.by_bucket.device)

    def figures(self) -> Record:
        """The acceptance estimate (tokens over passes, as `eval`'s tokens_per_pass), and by slot.

        answer_acceptance_estimate: the mean over answers of each one's mean, as `eval`'s acceptance_length (z-lab's
        convention; short answers count as much as long ones); position_acceptance: of each drafted slot, the share of
        passes that yield more than the tokens up to it, whose sum is the estimate but for the target's own token.
        """
        total = self.by_bucket.cpu().sum(0)
        passes_B, (num_answers, means) = total[:-2], total[-2:].tolist()
        num_passes = max(1.0, float(passes_B.sum()))
        beyond_K = (passes_B.flip(0).cumsum(0).flip(0)[1:] / num_passes).tolist()
        return {
            "acceptance_estimate": _tokens_of(passes_B) / num_passes if passes_B.any() else 1.0,
            "answer_acceptance_estimate": means / num_answers if num_answers else 1.0,
            "position_acceptance": beyond_K,
            "passes": round(float(passes_B.sum())),
        }

    def bucket_figures(self) -> Record:
        """The acceptance estimate of each bucket, None where there was no pass."""
        figures: Record = {}
        for bucket, passes_B in enumerate(self.by_bucket.cpu()[:, :-2]):
            num_passes = float(passes_B.sum())
            figures[f"bucket_{bucket}_acceptance"] = _tokens_of(passes_B) / num_passes if num_passes else None
        return figures


def _tokens_of(passes_B: Tensor) -> float:
    """Tokens that so many passes yield, by their yields 1 … B."""
    return float((passes_B * torch.arange(1, len(passes_B) + 1)).sum())


class JsonLines:
    """One JSON object a line, flushed line by line; a resumed run goes on in the same file.

    A killed run may have logged past its last checkpoint: at the first record, lines from its step on are cut off.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def __call__(self, record: Record) -> None:
        """Write one record; a number that is not finite is null, for JSON has none."""
        if self._file is None:
            self._file = self._open_at(record["step"])
        self._file.write(json.dumps(_as_json(record), allow_nan=False) + "\n")

    def _open_at(self, step: int) -> TextIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True) if self._path.exists() else []
        kept = "".join(line for line in lines if _step_of(line) < step)
        write_atomically(self._path, kept.encode())
        return self._path.open("a", encoding="utf-8", buffering=1)


def _as_json(value: Any) -> Any:
    """The value with null for every number that is not finite."""
    if isinstance(value, dict):
        return {name: _as_json(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_as_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: str) -> float:
    """The record's step; infinite, so that it is cut off, if the line was only half written."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else float("inf")
    except ValueError:
        return float("inf")


def wandb_id(run_dir: Path) -> str:
    """The same for the same folder, so that a resumed run goes on in its own curves, and different for others.

    Of the folder's name what wandb takes in an id: no comma, say, as sweeps have; 128 characters at most.
    """
    path = run_dir.resolve()
    name = re.sub(r"[^\w.=+-]", "_", path.name)[:100]
    return f"{name}-{xxh3_64(str(path).encode()).hexdigest()[:8]}"


class Wandb(AbstractContextManager["Wandb"]):
    """The same records in Weights & Biases, named `train/loss`, `batch/bucket_0_pct` and so on.

    Any number may be open in one process, each a run of its own. Raises RunError if wandb refuses the run.
    """

    def __init__(self, config: Config) -> None:
        settings = config.wandb
        Path(config.run_dir).mkdir(parents=True, exist_ok=True)  # without it wandb writes to a temporary folder
        try:
            self._run = wandb.init(
                project=settings.project,
                name=settings.name,
                group=settings.group,
                mode=settings.mode,
                dir=config.run_dir,
                id=wandb_id(Path(config.run_dir)),
                resume="allow",
                reinit="create_new",  # else it gives the run that is open already, and two share one curve
                config=config.model_dump(mode="json"),
            )
        except wandb.Error as error:
            reason = str(error).strip().rstrip(".") or type(error).__name__
            raise RunError(
                f"Weights & Biases does not take the run {config.run_dir} ({reason}): mend that, or set wandb.mode to "
                "offline or disabled."
            ) from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run.finish(exit_code=0 if kind is None else 1)

    def __call__(self, record: Record) -> None:
        """Log one record at its step; lists become one series a position, a part like `batch` goes by its own name."""
        prefix = record["kind"]
        flat: Record = {}
        for name, value in record.items():
            if isinstance(value, list):
                flat |= {f"{prefix}/{name}_{i}": part for i, part in enumerate(value, start=1)}
            elif isinstance(value, dict):
                flat |= {f"{name}/{key}": part for key, part in value.items() if part is not None}
            elif isinstance(value, int | float):
                flat[f"{prefix}/{name}"] = value
        self._run.log(flat, step=record["step"])
