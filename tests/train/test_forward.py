"""Casts that a step's micro-batches share."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_cache.train.forward import shared_casts


class CountCasts(TorchDispatchMode):
    """Counts copies of the layer's weight into bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and args[0].shape == (8, 16)
        return func(*args, **(kwargs or {}))


def sum_gradients(layer: nn.Linear, inputs: list[Tensor]) -> tuple[Tensor, int]:
    """The gradient of Σ output² over all passes, and how often the weight was cast for them (not for gradients)."""
    layer.weight.grad, num_casts = None, 0
    for x in inputs:
        with CountCasts() as casts, torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        num_casts += casts.count
        out.float().square().sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad, num_casts


def test_passes_share_one_copy_of_a_weight_and_their_gradients_are_the_same() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 8, bias=False)
    inputs = [torch.randn(5, 16) for _ in range(3)]
    expected, num_casts = sum_gradients(layer, inputs)
    assert num_casts == 3
    with shared_casts():
        found, num_casts = sum_gradients(layer, inputs)
    assert num_casts == 1
    assert torch.equal(found, expected)


def test_after_the_block_no_copy_of_an_old_weight_is_left() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 8, bias=False)
    inputs = [torch.randn(5, 16)]
    with shared_casts():
        before, _ = sum_gradients(layer, inputs)
    with torch.no_grad():
        layer.weight.mul_(2)  # exact in bfloat16, and the gradient is linear in the weight
    with shared_casts():
        after, _ = sum_gradients(layer, inputs)
    assert torch.equal(after, 2 * before)
