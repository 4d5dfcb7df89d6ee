"""Attention of draft blocks by torch's FlexAttention, for CUDA: tiles that no slot sees are never computed.

All blocks are one sequence of queries, over one of keys: [context | all blocks]. Which tiles are computed says a block
mask, made once a step for all layers of a kind; inside a tile the mask is looked up from tables of what each query and
each key is. Sizes and anchors are thus tensors and not constants of the kernel, and lengths are padded to whole tiles:
it is compiled for full and for sliding layers, for one sample and for several, at most four times whatever the sizes.

Not yet seen on a GPU: the compiled kernel, its backward pass and its speed (`train.attention: dense` is the way around
it). The mask and the uncompiled forward pass run anywhere. Axes as in `attention`, Q queries and N keys, padded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dflash_cache.drafter.sight import Sight

TILE = 128
_CONTEXT, _PADDING = -1, -2  # instead of a block's number

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of one layer: A blocks a sample, the C first of whose B slots ask, and T tokens of context."""

    A: int
    B: int
    C: int
    T: int

    @property
    def num_queries(self) -> int:
        """Queries, in whole tiles."""
        return _pad(self.A * self.C)

    @property
    def num_keys(self) -> int:
        """Keys, in whole tiles."""
        return _pad(self.T + self.A * self.B)


def attend_flex(
    query_SACKGD: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], sight: Sight
) -> Tensor:
    """As `attention.attend_blocks`, which chooses it; on a CPU without gradients, and slow."""
    S, A, C, K, G, D = query_SACKGD.shape
    sizes = Sizes(A, block[0].shape[2], C, context[0].shape[1])
    mask = sight.once(("flex", sizes), partial(make_block_mask, sight, sizes))
    query = query_SACKGD.permute(0, 3, 4, 1, 2, 5).reshape(S, K * G, A * C, D)
    key, value = (
        torch.cat([one, other.flatten(1, 2)], dim=1).transpose(1, 2) for one, other in zip(context, block, strict=True)
    )
    query = F.pad(query, (0, 0, 0, sizes.num_queries - query.shape[2]))
    key, value = (F.pad(each, (0, 0, 0, sizes.num_keys - each.shape[2])) for each in (key, value))
    out: Tensor = _kernel(query.is_cuda)(query, key, value, block_mask=mask, scale=D**-0.5, enable_gqa=True)
    return out[:, :, : A * C].view(S, K, G, A, C, D).permute(0, 3, 4, 1, 2, 5)


def make_block_mask(sight: Sight, sizes: Sizes) -> BlockMask:
    """The tiles to compute; compiled on CUDA, where it is never there as a whole (S, Q, N)."""
    device = sight.anchors_SA.device
    S = len(sight.anchors_SA)
    compiled = device.type == "cuda"
    return create_block_mask(
        make_mask(sight, sizes), S, None, sizes.num_queries, sizes.num_keys, device, TILE, _compile=compiled
    )


def make_mask(sight: Sight, sizes: Sizes) -> MaskMod:
    """FlexAttention's mask_mod: whether query q of sample s sees key n (`sight`)."""
    device, window = sight.anchors_SA.device, sight.window
    A, B, C, T = sizes.A, sizes.B, sizes.C, sizes.T
    # A query that pads is one more of the last block: it sees something, so it is never divided by nothing
    block_Q = (torch.arange(sizes.num_queries, device=device) // C).clamp(max=A - 1)
    slot_Q = torch.arange(sizes.num_queries, device=device) % C
    anchor_SQ = sight.anchors_SA[:, block_Q]
    number_N = torch.arange(sizes.num_keys, device=device) - T
    block_N = torch.where(number_N < 0, _CONTEXT, number_N // B)
    block_N = torch.where(block_N < A, block_N, _PADDING)
    place_N = torch.where(number_N < 0, number_N + T + sight.first, number_N % B)  # a position, or a slot

    def sees(s: Tensor, _: Tensor, q: Tensor, n: Tensor) -> Tensor:
        place, anchor = place_N[n], anchor_SQ[s, q]
        context, own = (block_N[n] == _CONTEXT) & (place < anchor), block_N[n] == block_Q[q]
        if window is not None:
            context &= anchor + slot_Q[q] - place < window
            own &= place <= slot_Q[q]
        return context | own

    return sees


def _pad(length: int) -> int:
    """In tiles, two at least: for an axis of one, torch would compile another kernel."""
    return max(2, -(-length // TILE)) * TILE


@lru_cache(maxsize=2)
def _kernel(compiled: bool) -> Any:
    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
