"""SwiGLU's gate with its gradient written out: silu is computed again in the backward pass instead of being kept, and
products reuse memory, for at rows × intermediate size fresh memory costs more than the arithmetic.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def gate(gates: Tensor, states: Tensor) -> Tensor:
    """silu(gates) · states, both of one shape and dtype."""
    gated: Tensor = _Gate.apply(gates, states)  # type: ignore[no-untyped-call]
    return gated


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates: Tensor, states: Tensor) -> Tensor:
        ctx.save_for_backward(gates, states)
        return F.silu(gates).mul_(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gates, states = ctx.saved_tensors
        to_gates = gradients[0] * states
        torch.ops.aten.silu_backward.grad_input(to_gates, gates, grad_input=to_gates)
        return to_gates, F.silu(gates).mul_(gradients[0])
