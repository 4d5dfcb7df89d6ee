"""The target's own distribution, from its last hidden state: what distillation compares the drafter's with.

The cache may hold the output of the target's last decoder layer (`target.store_last_hidden`). The final norm and the
head turn it into the target's logits. The norm is transformers' own module of the target's family, without the rest of
the model: families differ in it (Gemma's weight counts from one, GPT-NeoX subtracts a mean), and a norm that is nearly
right would teach the wrong distribution without a sign.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModel

from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.errors import TargetError

NORM_NAMES = (
    "model.norm",
    "model.language_model.norm",
    "language_model.model.norm",
    "gpt_neox.final_layer_norm",
    "transformer.ln_f",
)
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")  # of the logits, in some families' configs


@dataclass(frozen=True)
class Teacher:
    """norm: the target's final norm, on the head's device and in its dtype; softcap: of its logits, if it has one."""

    norm: nn.Module
    softcap: float | None

    def read_logits(self, last_RH: Tensor, head_VH: Tensor, low_RV: Tensor, wide_RV: Tensor) -> None:
        """Fill `wide_RV` (float32) with the target's logits; `low_RV`, in the head's dtype, is overwritten too.

        `last_RH`: outputs of the last decoder layer. Both may be the same memory where the head is float32.
        """
        torch.mm(self.norm(last_RH.to(head_VH.dtype)), head_VH.T, out=low_RV)
        wide_RV.copy_(low_RV)
        if self.softcap is not None:
            wide_RV.div_(self.softcap).tanh_().mul_(self.softcap)


def load_teacher(files: TargetFiles, dtype: torch.dtype, device: torch.device) -> Teacher:
    """Read the final norm. Raises TargetError if it is not found by name or the logits are scaled behind the head."""
    config = files.load_config()
    scaled = next((name for name in SCALES if getattr(config, name, None) not in (None, 1, 1.0)), None)
    if scaled is not None:
        raise TargetError(
            f"The target's config has {scaled}, which distillation does not reproduce yet: set objective.distill to 0."
        )
    name = next((name for name in NORM_NAMES if f"{name}.weight" in files.names), None)
    with torch.device("meta"):  # shapes alone: nothing is allocated
        model = AutoModel.from_config(config)  # type: ignore[no-untyped-call]
    norm = getattr(model, name.rpartition(".")[2], None) if name else None
    if not isinstance(norm, nn.Module):
        raise TargetError(
            f"The target's final norm is not found by name (looked for {', '.join(NORM_NAMES)}): set objective.distill "
            "to 0."
        )
    stored = files.read(f"{name}.{key}" for key in norm.state_dict())
    norm = norm.to_empty(device="cpu")
    norm.load_state_dict({key.removeprefix(f"{name}."): tensor for key, tensor in stored.items()})
    return Teacher(
        norm.to(device, dtype).eval().requires_grad_(False), getattr(config, "final_logit_softcapping", None)
    )
