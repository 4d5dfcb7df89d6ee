"""RMS norm in the states' dtype, with its gradient written out.

Torch's own computes it with separate operations where it has no fused kernel (on a CPU) or where weight and states
differ in dtype (float32 master weights under bfloat16 autocast), and then returns float32, which makes all that
follows twice as wide. Statistics are float32 here too; what is returned has the states' dtype. On a CPU two fused
kernels of other norms do it in one pass each: batch norm over rows as channels, with mean 0 and the rows' mean squares
as variances; and the backward of layer norm, given mean 0, which is RMS norm's but for the mean's own gradient.
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
        if states.device.type != "cpu":
            return F.rms_norm(states, self.weight.shape, self.weight.to(states.dtype), self.eps)
        normed: Tensor = _RMSNorm.apply(states, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


class _RMSNorm(torch.autograd.Function):
    """R rows of H numbers."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows_RH = states.reshape(-1, len(weight))
        length_R = torch.linalg.vector_norm(rows_RH, dim=-1, dtype=torch.float32)
        square_R = length_R.square_().div_(len(weight))
        mean_R = torch.zeros_like(square_R)
        normed_RH = F.batch_norm(rows_RH[None], mean_R, square_R, eps=eps)[0]
        inverse_R1 = square_R.add_(eps).rsqrt_()[:, None]
        ctx.save_for_backward(rows_RH, inverse_R1, mean_R[:, None], weight)
        return normed_RH.mul_(weight.to(states.dtype)).view(states.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_RH, inverse_R1, mean_R1, weight = ctx.saved_tensors
        gradient_RH, low = gradients[0].reshape(rows_RH.shape), rows_RH.dtype
        to_rows, _, _ = torch.ops.aten.native_layer_norm_backward(
            gradient_RH, rows_RH, weight.shape, mean_R1, inverse_R1, weight, None, [True, False, False]
        )
        level_R = (gradient_RH @ weight.to(low)).float() * inverse_R1[:, 0] / len(weight)
        to_rows.add_(level_R.to(low)[:, None])  # layer norm takes it off: there a row's mean moves with its states
        # Not by the kernel either: it sums over the rows in the states' dtype.
        to_weight = torch.mm(inverse_R1.T.to(low), gradient_RH * rows_RH)[0].to(weight.dtype)
        return to_rows.view(gradients[0].shape), to_weight, None
