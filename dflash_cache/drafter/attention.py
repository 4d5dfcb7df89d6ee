"""Attention of draft blocks: each slot sees the context before its block's anchor, and its own block.

The two parts are computed apart and joined in one softmax, so that a block never meets the keys of another
block: memory and work grow with slots × (context + block size) instead of slots × (context + all slots),
which is what a dense mask over [context | all blocks] costs (peers: FIELD.md, "How peers do it offline").

Axes: S samples, A anchors (blocks) of a sample, B slots of a block, T context tokens, K key-value heads,
G query heads that share one of them, D head size.
"""

import torch
from torch import Tensor


def attend_blocks(
    query_SABKGD: Tensor,
    context: tuple[Tensor, Tensor],
    block: tuple[Tensor, Tensor],
    visible_SA: Tensor,
) -> Tensor:
    """Softmax attention over [visible context ; own block], without a causal mask inside the block.

    `context` holds keys and values (S, T, K, D), `block` keys and values (S, A, B, K, D); `visible_SA` counts
    the context positions that a block sees, from the first one on. Returns (S, A, B, K, G, D).
    """
    S, A, B, K, G, D = query_SABKGD.shape
    context_key_SKDT = context[0].permute(0, 2, 3, 1)
    context_value_SKTD = context[1].transpose(1, 2)
    block_key_SKADB = block[0].permute(0, 3, 1, 4, 2)
    block_value_SKABD = block[1].permute(0, 3, 1, 2, 4)
    T = context_key_SKDT.shape[-1]

    query_SKAQD = (query_SABKGD * D**-0.5).permute(0, 3, 1, 2, 4, 5).reshape(S, K, A, B * G, D)
    over_context = (query_SKAQD.reshape(S, K, A * B * G, D) @ context_key_SKDT).view(S, K, A, B * G, T)
    hidden_SAT = torch.arange(T, device=visible_SA.device) >= visible_SA[..., None]
    over_context = over_context.masked_fill(hidden_SAT[:, None, :, None, :], float("-inf"))
    over_block = query_SKAQD @ block_key_SKADB

    weights = torch.softmax(torch.cat([over_context, over_block], dim=-1), dim=-1, dtype=torch.float32)
    weights = weights.to(context_value_SKTD.dtype)
    from_context = weights[..., :T].reshape(S, K, A * B * G, T) @ context_value_SKTD
    from_block = weights[..., T:] @ block_value_SKABD
    mixed = from_context.view(S, K, A, B, G, D) + from_block.view(S, K, A, B, G, D)
    return mixed.permute(0, 2, 3, 1, 4, 5)


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines (…, D) in float32 of the rotary embedding at integer `positions` (…)."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None].float() * theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(vectors: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate (…, heads, D) by a table (…, D): halves as pairs, as in Llama and Qwen."""
    cos, sin = (part[..., None, :].to(vectors.dtype) for part in table)
    first, second = vectors.chunk(2, dim=-1)
    return vectors * cos + torch.cat([-second, first], dim=-1) * sin
