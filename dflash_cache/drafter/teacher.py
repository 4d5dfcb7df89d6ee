"""The target's own distribution, from its last hidden state: what distillation compares the drafter's with.

The cache may hold the output of the target's last decoder layer (`target.store_last_hidden`). The final norm and the
head (`head`) turn it into the target's logits. The norm is transformers' own module of the target's family, without the
rest of the model: families differ in it (Gemma's weight counts from one, GPT-NeoX subtracts a mean), and a norm that is
nearly right would teach the wrong distribution without a sign.
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
    "model.final_layernorm",
    "model.embedding_norm",
)


@dataclass(frozen=True)
class Teacher:
    """norm: the target's final norm, on the head's device and in its dtype."""

    norm: nn.Module

    def normalize(self, last_RH: Tensor) -> Tensor:
        """What the target's head is given, in the head's dtype, from outputs (R, H) of its last decoder layer."""
        weight = next(self.norm.parameters(), last_RH)
        normed: Tensor = self.norm(last_RH.to(weight.dtype))
        return normed


def load_teacher(files: TargetFiles, dtype: torch.dtype, device: torch.device) -> Teacher:
    """Read the final norm. Raises TargetError if it is not found by name."""
    config = files.load_config()
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
    return Teacher(norm.to(device, dtype).eval().requires_grad_(False))
