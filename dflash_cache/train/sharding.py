"""Sharded ranks (FSDP2): between steps each keeps its share of weights, gradients and optimizer state.

A step gathers the weights once, before its first pass, keeps them through all of its micro-batches, and sums and
splits the gradients once, in the last one's backward. So what is sent does not depend on how many micro-batches or
anchors a rank has; one that has none makes an empty pass, which sends zeros. Between the two a rank holds weights and
gradients whole, in float32, but of the optimizer's state and the moving average its share alone: with AdamW 8 +
8 / ranks bytes a parameter instead of 16, and 16 / ranks between steps.

The MLPs are units of their own, whose gradients travel while the backward goes on. The rest is one unit, for the
context goes through all layers' attention projections outside of the layers' own passes.

gloo between CPUs, nccl between GPUs.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dflash_cache.train.forward import DraftPass
from dflash_cache.train.ranks import Ranks


def shard(draft: DraftPass, ranks: Ranks) -> None:
    """Keep this rank's share of the parameters, which become DTensors; nothing is sent: all ranks hold the same."""
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    for module in (*(layer.mlp for layer in draft.drafter.layers), draft):
        unit = fully_shard(module, mesh=mesh, reshard_after_forward=False)
        unit.set_gradient_divide_factor(1.0)  # sums: the step's weights divide them
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_reshard_after_backward(False, recurse=False)


@contextmanager
def whole_weights(draft: DraftPass) -> Iterator[None]:
    """Inside the block passes may be made. All ranks enter it alike; it gathers and drops the weights of shards."""
    units = [module for module in draft.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    yield
    for unit in units:
        unit.reshard()


def sum_after_backward(draft: DraftPass, last: bool) -> None:
    """Whether the next backward of shards is the step's last on this rank, in which gradients are summed."""
    if isinstance(draft, FSDPModule):
        draft.set_requires_gradient_sync(last)


def pass_nothing(draft: DraftPass) -> None:
    """The step's only pass of a rank without a micro-batch, where the weights are sharded: zeros to the sums."""
    if not isinstance(draft, FSDPModule):
        return
    sum_after_backward(draft, last=True)
    shape = draft.drafter.shape
    anchors_SA = torch.zeros(1, 1, dtype=torch.int64, device=next(draft.parameters()).device)
    states_STLH = torch.zeros(1, 1, len(shape.target_layer_ids), shape.hidden_size, device=anchors_SA.device)
    slots_SABH = torch.zeros(1, 1, shape.block_size, shape.hidden_size, device=anchors_SA.device)
    (0.0 * draft(states_STLH, slots_SABH, anchors_SA).sum()).backward()


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, the same memory; a whole one itself. Without gradients."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def split_like(tensor: Tensor, reference: Tensor) -> Tensor:
    """This rank's part of a whole tensor, split as `reference` is, if it is; nothing is sent."""
    if not isinstance(reference, DTensor):
        return tensor
    own = tensor.to(reference.device)
    return distribute_tensor(own, reference.device_mesh, reference.placements, src_data_rank=None)
