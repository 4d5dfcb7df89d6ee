"""What the drafter borrows from the target and never trains: its embedding and its head.

Both are read by name from the target's files. A tied target's head is its embedding (a randomly initialised head
on a tied target was a real fault of a peer: the loss looked fine, the acceptance was nil; FIELD.md).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_cache.drafter.family import embedding_factor, logit_scale_of, softcap_of
from dflash_cache.drafter.head import Head
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
    "transformer.word_embeddings.weight",
    "model.decoder.embed_tokens.weight",
)
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "embed_out.weight")


@dataclass(frozen=True)
class FrozenNames:
    """What the tensors are called in the target's files; a tied head has the embedding's name; bias: the head's."""

    embedding: str
    head: str
    bias: str | None


@dataclass(frozen=True)
class FrozenTarget:
    """embedding_VH and the head's matrix in one dtype on one device; equal tensors if the target ties them.

    embedding_scale: as it is multiplied in that dtype; teacher: reads the target's own distribution, None where nothing
    is distilled.
    """

    embedding_VH: Tensor
    head: Head
    embedding_scale: float
    teacher: Teacher | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What matrix products with the head are computed in."""
        return self.head.weight_VH.dtype

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.head.weight_VH.device

    @property
    def head_VH(self) -> Tensor:  # noqa: N802  # axes, not words
        """The matrix of a plain head. Raises TargetError if the head is more than that, which would go unseen."""
        if not self.head.is_plain:
            raise TargetError(
                f"The target's head is more than a matrix (scale {self.head.scale:g}, softcap {self.head.softcap}, "
                f"{'no' if self.head.bias_V is None else 'a'} bias), which is not reproduced here: use another target."
            )
        return self.head.weight_VH

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings (…, H) of ids (…), scaled as the target scales them."""
        embedded = F.embedding(token_ids, self.embedding_VH)
        return embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale

    def embed_blocks(self, anchor_tokens_SA: Tensor, shape: DrafterShape) -> Tensor:
        """Slots (S, A, B, H): the anchor's token, then the mask token."""
        slots_SAB = anchor_tokens_SA.new_full((*anchor_tokens_SA.shape, shape.block_size), shape.mask_token_id)
        slots_SAB[..., 0] = anchor_tokens_SA
        return self.embed(slots_SAB)


def load_frozen(files: TargetFiles, embedding_scale: float, dtype: torch.dtype, device: torch.device) -> FrozenTarget:
    """Read embedding and head. Raises TargetError if either cannot be found, or the head is of no known form."""
    config, names = files.load_config(), find_names(files)
    wanted = dict.fromkeys(name for name in (names.embedding, names.head, names.bias) if name is not None)
    tensors = {name: tensor.to(device, dtype) for name, tensor in files.read(wanted).items()}
    bias_V = None if names.bias is None else tensors[names.bias]
    head = Head(tensors[names.head], bias_V, logit_scale_of(config), softcap_of(config))
    return FrozenTarget(tensors[names.embedding], head, embedding_factor(config, embedding_scale, dtype))


def find_names(files: TargetFiles) -> FrozenNames:
    """The names of embedding and head. Raises TargetError if either cannot be found."""
    embedding = _only(files, EMBEDDING_NAMES, "embedding")
    # A head in the files is the one that transformers uses, whatever the config says about tying.
    has_head = any(name in files.names for name in HEAD_NAMES)
    head = _only(files, HEAD_NAMES, "head") if has_head else embedding
    bias = f"{head.removesuffix('.weight')}.bias"
    return FrozenNames(embedding, head, bias if bias in files.names else None)


def _only(files: TargetFiles, names: tuple[str, ...], what: str) -> str:
    found = [name for name in names if name in files.names]
    if len(found) != 1:
        raise TargetError(f"The target's {what} is not found by name (looked for {', '.join(names)}).")
    return found[0]
