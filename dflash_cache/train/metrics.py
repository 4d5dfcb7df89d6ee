"""What a step did, gathered once and shown three ways: the console, a JSONL file and wandb get the same record.

Sums are gathered over the micro-batches of a step and divided once, so that short batches count by their slots, not
by their number. The expected acceptance length is 1 + Σ_k (share of blocks whose first k drafts are all right): what
greedy decoding would accept from these anchors, the target's own token counted.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import torch
import wandb
from torch import Tensor
from xxhash import xxh3_64

from dflash_cache.cache.files import write_atomically
from dflash_cache.config.settings import Config
from dflash_cache.drafter.loss import BlockLoss

Record = dict[str, Any]
Sink = Callable[[Record], None]


class StepSums:
    """Sums over the micro-batches of one step (or of one validation); a handful of small tensors on the device."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        K = block_size - 1
        self.loss_sum = torch.zeros((), device=device)
        self.weight_sum = torch.zeros((), device=device)
        self.num_blocks = 0
        self._slots_K = torch.zeros(K, device=device)
        self._correct_K = torch.zeros(K, device=device)
        self._streak_K = torch.zeros(K, device=device)

    def add(self, loss: BlockLoss) -> None:
        """Add one micro-batch."""
        self.loss_sum += loss.loss_sum.detach()
        self.weight_sum += loss.weight_sum
        self.num_blocks += len(loss.mask_NK)
        self._slots_K += loss.mask_NK.sum(0)
        self._correct_K += loss.correct_NK.sum(0)
        self._streak_K += loss.correct_NK.long().cumprod(1).sum(0)

    def figures(self) -> Record:
        """Loss (nats, weighted mean), accuracy by slot, expected acceptance length. Synchronises the device."""
        loss = self.loss_sum / self.weight_sum.clamp(min=1e-30)
        accuracy_K = self._correct_K / self._slots_K.clamp(min=1)
        acceptance = 1 + self._streak_K.sum() / max(1, self.num_blocks)
        numbers: Tensor = torch.cat([loss[None], acceptance[None], accuracy_K])
        first, second, *rest = numbers.tolist()
        return {
            "loss": first,
            "acceptance_estimate": second,
            "accuracy": sum(rest) / len(rest),
            "position_accuracy": rest,
        }


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
        """Write one record."""
        if self._file is None:
            self._file = self._open_at(record["step"])
        self._file.write(json.dumps(record) + "\n")

    def _open_at(self, step: int) -> TextIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True) if self._path.exists() else []
        kept = "".join(line for line in lines if _step_of(line) < step)
        write_atomically(self._path, kept.encode())
        return self._path.open("a", encoding="utf-8", buffering=1)


def _step_of(line: str) -> float:
    """The record's step; infinite, so that it is cut off, if the line was only half written."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else float("inf")
    except ValueError:
        return float("inf")


def wandb_id(run_dir: Path) -> str:
    """The same for the same folder, so that a resumed run goes on in its own curves, and different for others."""
    path = run_dir.resolve()
    return f"{path.name}-{xxh3_64(str(path).encode()).hexdigest()[:8]}"


class Wandb(AbstractContextManager["Wandb"]):
    """The same records in Weights & Biases, named `train/loss` and so on."""

    def __init__(self, config: Config) -> None:
        settings = config.wandb
        self._run = wandb.init(
            project=settings.project,
            name=settings.name,
            group=settings.group,
            mode=settings.mode,
            dir=config.run_dir,
            id=wandb_id(Path(config.run_dir)),
            resume="allow",
            config=config.model_dump(mode="json"),
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run.finish(exit_code=0 if kind is None else 1)

    def __call__(self, record: Record) -> None:
        """Log one record at its step; lists become one series a position."""
        prefix = record["kind"]
        flat: Record = {}
        for name, value in record.items():
            if isinstance(value, list):
                flat |= {f"{prefix}/{name}_{i}": part for i, part in enumerate(value, start=1)}
            elif isinstance(value, int | float):
                flat[f"{prefix}/{name}"] = value
        self._run.log(flat, step=record["step"])
