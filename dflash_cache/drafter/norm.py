"""RMS norm in the states' dtype, with its gradient written out.

Torch's own computes it with separate operations where it has no fused kernel (on a CPU) or where weight and states
differ in dtype (float32 master weights under bfloat16 autocast), and then returns float32, which makes all that
follows twice as wide. Statistics are float32 here too; what is returned has the states' dtype.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """weight · x / sqrt(mean(x²) + eps) over the last axis, in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """The normalised states (…, size)."""
        if states.is_cuda:
            return F.rms_norm(states, self.weight.shape, self.weight.to(states.dtype), self.eps)
        normed: Tensor = _RMSNorm.apply(states, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        length = torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=torch.float32)
        inverse = length.square_().div_(states.shape[-1]).add_(eps).rsqrt_()
        normed = (states * inverse).to(states.dtype)
        ctx.save_for_backward(normed, inverse, weight)
        scaled: Tensor = normed * weight.to(states.dtype)
        return scaled

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        normed, inverse, weight = ctx.saved_tensors
        weight_low = weight.to(normed.dtype)
        product = gradient * normed
        to_weight = product.flatten(0, -2).sum(0, dtype=weight.dtype)
        # d/dx of x·r(x) is r·(g − n·mean(g·n)), g the gradient at the normalised states n.
        mean = (product @ weight_low).unsqueeze(-1).float().div_(normed.shape[-1]).mul_(inverse)
        to_states = torch.addcmul(gradient * weight_low * inverse, normed, mean, value=-1)
        return to_states.to(normed.dtype), to_weight, None
