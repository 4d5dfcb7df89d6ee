"""What the drafter borrows from the target and never trains: its embedding and its head.

Both are read by name from the target's files. A tied target's head is its embedding (a randomly initialised head
on a tied target was a real fault of a peer: the loss looked fine, the acceptance was nil; FIELD.md).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_cache.drafter.shape import DrafterShape
from dflash_cache.drafter.teacher import Teacher
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.errors import TargetError

EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "gpt_neox.embed_in.weight",
    "transformer.wte.weight",
    "model.decoder.embed_tokens.weight",
)
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "embed_out.weight")
HEAD_BIASES = ("lm_head.bias", "language_model.lm_head.bias", "embed_out.bias")


@dataclass(frozen=True)
class FrozenTarget:
    """embedding_VH and head_VH in one dtype on one device; equal tensors if the target ties them.

    teacher: reads the target's own distribution, None where nothing is distilled.
    """

    embedding_VH: Tensor
    head_VH: Tensor
    embedding_scale: float
    teacher: Teacher | None = None

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings (…, H) of ids (…), scaled as the target scales them."""
        embedded = F.embedding(token_ids, self.embedding_VH)
        if self.embedding_scale == 1.0:
            return embedded
        return embedded * torch.tensor(self.embedding_scale, dtype=embedded.dtype)

    def embed_blocks(self, anchor_tokens_SA: Tensor, shape: DrafterShape) -> Tensor:
        """Slots (S, A, B, H): the anchor's token, then the mask token."""
        slots_SAB = anchor_tokens_SA.new_full((*anchor_tokens_SA.shape, shape.block_size), shape.mask_token_id)
        slots_SAB[..., 0] = anchor_tokens_SA
        return self.embed(slots_SAB)


def load_frozen(files: TargetFiles, embedding_scale: float, dtype: torch.dtype, device: torch.device) -> FrozenTarget:
    """Read embedding and head. Raises TargetError if either cannot be found or the head has a bias."""
    embedding_name = _only(files, EMBEDDING_NAMES, "embedding")
    bias = next((name for name in HEAD_BIASES if name in files.names), None)
    if bias is not None:
        raise TargetError(f"The target's head has a bias ({bias}), which this version does not reproduce in training.")
    # A head in the files is the one that transformers uses, whatever the config says about tying.
    has_head = any(name in files.names for name in HEAD_NAMES)
    head_name = _only(files, HEAD_NAMES, "head") if has_head else embedding_name
    tensors = {
        name: tensor.to(device, dtype)
        for name, tensor in files.read(dict.fromkeys((embedding_name, head_name))).items()
    }
    return FrozenTarget(tensors[embedding_name], tensors[head_name], embedding_scale)


def _only(files: TargetFiles, names: tuple[str, ...], what: str) -> str:
    found = [name for name in names if name in files.names]
    if len(found) != 1:
        raise TargetError(f"The target's {what} is not found by name (looked for {', '.join(names)}).")
    return found[0]
