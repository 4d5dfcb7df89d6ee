"""The ranks of a training run: processes that hold the same weights and share every optimizer step.

`torchrun` starts them; each works out the same order and trains its own places of it (`train.sampler`). They meet a
fixed number of times a step, whatever each of them holds, so that none ever waits for another that will not come: one
sum of the step's figures, one of the gradients, one question whether anyone was asked to stop. Losses are sums, so
summed gradients divided by summed weights are those of one process that did the whole step. Every rank gets the same
bits of a sum, so weights stay the same without being sent. In a single process all of it is nothing.

gloo between CPUs, nccl between GPUs (written for, not yet seen to run).
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_cache.drafter.device import resolve_device
from dflash_cache.errors import RunError

Value = TypeVar("Value")

BUCKET_BYTES = 1 << 26  # summed at once: large enough for a network's full rate, small beside the drafter
_NETWORKS = ("gloo", "nccl", "connection")  # gloo raises plain RuntimeErrors


@dataclass(frozen=True)
class Ranks:
    """This process among `world_size`, and the device it trains on. Every method is called by all ranks alike.

    All methods raise RunError where another rank has ended.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes logs, lists and checkpoints."""
        return self.rank == 0

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks; all are of one dtype, on `device`."""
        if self.world_size == 1:
            return
        for bucket in _split_bytes(tensors, BUCKET_BYTES):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            with self.explain_losses():
                dist.all_reduce(flat)
            parts = torch.split_with_sizes(flat, [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum the gradients; a rank that had no micro-batch has zeros."""
        if self.world_size == 1:
            return
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        self.sum(gradients)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. Synchronises the device where there are others."""
        if self.world_size == 1:
            return flag
        count = torch.tensor([float(flag)], device=self.device)
        self.sum([count])
        return bool(count > 0)

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, by rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self.explain_losses():
            dist.all_gather_object(values, value)
        return values

    @contextmanager
    def explain_losses(self) -> Iterator[None]:
        """Turn what a broken connection raises, in whatever the block calls, into a RunError."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or any(name in str(error).lower() for name in _NETWORKS):
                raise RunError(
                    f"Rank {self.rank} has lost another rank ({_first_line(error)}): the one that ended first says "
                    "why, if it could; start all of them again, the run goes on from its last checkpoint."
                ) from None
            raise


@contextmanager
def join_ranks(device_name: str) -> Iterator[Ranks]:
    """The ranks that torchrun started (its RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* say so), or this process alone.

    `device_name` as in the settings; `auto` and `cuda` are each rank's own GPU. Raises ConfigError or RunError.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks(resolve_device(device_name))
        return
    device = resolve_device(device_name)
    if device.type == "cuda" and device_name in ("auto", "cuda"):
        device = resolve_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where gathered objects travel
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"The ranks cannot meet ({_first_line(error)}): start them with `torchrun --nproc-per-node N -m dflash_cli "
            "train …`, or unset WORLD_SIZE to train in one process."
        ) from None
    ranks = Ranks(device, dist.get_rank(), dist.get_world_size())
    try:
        yield ranks
        ranks.any(False)  # nobody leaves while another still receives
    finally:
        dist.destroy_process_group()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__


def _split_bytes(tensors: Sequence[Tensor], max_bytes: int) -> Iterator[list[Tensor]]:
    """The tensors in order, in lists of at most `max_bytes` (or of one tensor)."""
    bucket: list[Tensor] = []
    held_bytes = 0
    for tensor in tensors:
        if bucket and held_bytes + tensor.nbytes > max_bytes:
            yield bucket
            bucket, held_bytes = [], 0
        bucket.append(tensor)
        held_bytes += tensor.nbytes
    if bucket:
        yield bucket
