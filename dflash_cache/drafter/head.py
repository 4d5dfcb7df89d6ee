"""The target's head, frozen: from normalised states to logits, and a gradient back to the states.

    logits = c · tanh(z / c),   z = scale · (states · weightᵀ + bias)

Most targets have the plain product alone (no bias, scale 1, no cap). The scale is applied to the states, where it costs
rows × hidden instead of rows × vocabulary; a bias is added by the product itself; so only a cap passes over the logits
once more. The scale is positive and tanh ascends: the argmax is the plain product's.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """weight_VH and bias_V (or None) in one dtype on one device; scale > 0; softcap: c, None for no cap."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the logits are states times weight, and nothing else."""
        return self.bias_V is None and self.scale == 1.0 and self.softcap is None

    def cut(self, begin: int, end: int) -> "Head":
        """The head of the vocabulary's entries begin … end − 1 alone: a view."""
        bias = None if self.bias_V is None else self.bias_V[begin:end]
        return replace(self, weight_VH=self.weight_VH[begin:end], bias_V=bias)

    def scale_states(self, states_RH: Tensor) -> Tensor:
        """What `fill_product` takes, in the head's dtype, from states (R, H) of any dtype."""
        return (states_RH if self.scale == 1.0 else states_RH.float() * self.scale).to(self.weight_VH.dtype)

    @torch.no_grad()
    def fill_product(self, scaled_RH: Tensor, low_RV: Tensor) -> None:
        """Fill `low_RV`, in the head's dtype, with the logits before a cap: the z above."""
        if self.bias_V is None:
            torch.mm(scaled_RH, self.weight_VH.T, out=low_RV)
        else:
            torch.addmm(self.bias_V * self.scale, scaled_RH, self.weight_VH.T, out=low_RV)

    @torch.no_grad()
    def fill_logits(self, states_RH: Tensor, low_RV: Tensor, wide_RV: Tensor, slope_RV: Tensor | None = None) -> None:
        """Fill `wide_RV` (float32) with the logits of states (R, H) of any dtype.

        `low_RV`, in the head's dtype, is overwritten too, and may be the same memory where that is float32.
        `slope_RV` (float32), where given, gets the cap's derivative 1 − (logits / c)², for `pull_back`.
        """
        self.fill_product(self.scale_states(states_RH), low_RV)
        wide_RV.copy_(low_RV)  # nothing is copied where both are the same float32 buffer
        if self.softcap is not None:
            wide_RV.div_(self.softcap).tanh_()
            if slope_RV is not None:
                torch.mul(wide_RV, wide_RV, out=slope_RV).neg_().add_(1.0)
            wide_RV.mul_(self.softcap)

    @torch.no_grad()
    def pull_back(self, gradient_RV: Tensor, low_RV: Tensor, slope_RV: Tensor | None = None) -> Tensor:
        """The gradient (R, H) by the states, in the head's dtype, of what has `gradient_RV` (float32) by the logits.

        `gradient_RV` and `low_RV` are overwritten; `slope_RV`: from `fill_logits`, needed where there is a cap.
        """
        if self.softcap is not None:
            assert slope_RV is not None
            gradient_RV.mul_(slope_RV)
        low_RV.copy_(gradient_RV)
        gradient_RH = low_RV @ self.weight_VH
        return gradient_RH if self.scale == 1.0 else gradient_RH.mul_(self.scale)


def transform_logits(product: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Logits (…, V) from what the head's matrix and bias give, in its dtype: scaled, then capped."""
    scaled = product if scale == 1.0 else product * scale
    return scaled if softcap is None else softcap * torch.tanh(scaled / softcap)
