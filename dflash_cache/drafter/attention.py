"""Attention of draft blocks: each slot sees the context before its block's anchor, and its own block (`sight`).

The two parts are computed apart and joined in one softmax, so that a block never meets the keys of another
block: memory and work grow with slots × (context + block size) instead of slots × (context + all slots),
which is what a dense mask over [context | all blocks] costs (peers: FIELD.md, "How peers do it offline").

On a CPU the context's part is torch's flash kernel, which keeps no weights. Its output o with log-sum-exp l and the
block's joined: with L = log(e^l + Σ e^score) over the block's own scores,

    out = e^(l − L) · o + Σ e^(score − L) · value

and its backward, given `out` and L in the place of o and l, yields the context's share of the gradients of the joined
softmax, for there each weight is e^(score − L) (as in ring attention, arXiv 2310.01889).

Axes: S samples, A anchors (blocks) of a sample, B slots of a block, T context tokens, K key-value heads,
G query heads that share one of them, D head size; C slots of a block that ask, the first of its B: Q = A · C · G
queries of a key-value head.
"""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from dflash_cache.drafter.flex import attend_flex
from dflash_cache.drafter.sight import Sight

Way = Literal["auto", "dense"]

_HIDDEN = -1e30  # finite, so that a block that sees nothing gets no weight instead of NaN

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_blocks(
    query_SACKGD: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], sight: Sight, way: Way = "auto"
) -> Tensor:
    """Softmax attention over [context ; own block], of what `sight` lets each slot see.

    `context` holds keys and values (S, T, K, D), `block` keys and values (S, A, B, K, D). Returns (S, A, C, K, G, D).
    """
    _, A, C, _, G, _ = query_SACKGD.shape
    device = query_SACKGD.device.type
    if way == "auto" and device == "cuda" and A > 1:
        return attend_flex(query_SACKGD, context, block, sight)
    if way == "dense" or device != "cpu" or A == 1:  # one block, as in decoding, has no weights worth saving
        return attend_densely(query_SACKGD, context, block, sight)
    mask, hidden_RB = sight.once(
        (C, G, query_SACKGD.dtype), partial(_make_masks, sight, query_SACKGD, context[0].shape[1], block[0].shape[2])
    )
    attended: Tensor = _FlashAttention.apply(  # type: ignore[no-untyped-call]
        query_SACKGD, *context, *block, mask, hidden_RB
    )
    return attended


def attend_densely(
    query_SACKGD: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], sight: Sight
) -> Tensor:
    """The same with all weights in memory: for other devices, for one block, and to compare with."""
    S, A, C, K, G, D = query_SACKGD.shape
    context_key_SKDT = context[0].permute(0, 2, 3, 1)
    context_value_SKTD = context[1].transpose(1, 2)
    block_key_SKADB = block[0].permute(0, 3, 1, 4, 2)
    block_value_SKABD = block[1].permute(0, 3, 1, 2, 4)
    T, B = context_key_SKDT.shape[-1], block[0].shape[2]

    query_SKAQD = (query_SACKGD * D**-0.5).permute(0, 3, 1, 2, 4, 5).reshape(S, K, A, C * G, D)
    over_context = (query_SKAQD.reshape(S, K, A * C * G, D) @ context_key_SKDT).view(S, K, A, C, G, T)
    hidden_SACT = sight.hidden_context(C, T)
    over_context = over_context.masked_fill(hidden_SACT[:, None, :, :, None], float("-inf"))
    over_block = (query_SKAQD @ block_key_SKADB).view(S, K, A, C, G, B)
    hidden_CB = sight.hidden_block(C, B)
    if hidden_CB is not None:
        over_block = over_block.masked_fill(hidden_CB[:, None], float("-inf"))

    weights = torch.softmax(torch.cat([over_context, over_block], dim=-1), dim=-1, dtype=torch.float32)
    weights = weights.to(context_value_SKTD.dtype)
    from_context = weights[..., :T].reshape(S, K, A * C * G, T) @ context_value_SKTD
    from_block = weights[..., T:].reshape(S, K, A, C * G, B) @ block_value_SKABD
    mixed = from_context.view(S, K, A, C, G, D) + from_block.view(S, K, A, C, G, D)
    return mixed.permute(0, 2, 3, 1, 4, 5)


class _FlashAttention(torch.autograd.Function):
    """N = S · K · A blocks of R = C · G queries where it is about the block's own part."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        query, context_key, context_value, key, value, mask, hidden_RB = tensors
        S, A, C, K, G, D = ctx.shape = query.shape
        query_SKQD = query.permute(0, 3, 1, 2, 4, 5).contiguous().view(S, K, A * C * G, D)
        context = (context_key.transpose(1, 2), context_value.transpose(1, 2))
        key_NBD, value_NBD = (x.permute(0, 3, 1, 2, 4).reshape(S * K * A, -1, D) for x in (key, value))
        over_context, log_SKQ = _flash(query_SKQD, *context, 0.0, False, attn_mask=mask, scale=D**-0.5)

        query_NRD = query_SKQD.view(-1, C * G, D)
        scores_NRB = torch.bmm(query_NRD, key_NBD.transpose(1, 2)).float().mul_(D**-0.5)
        if hidden_RB is not None:
            scores_NRB.masked_fill_(hidden_RB, float("-inf"))
        log_NR1 = log_SKQ.reshape(-1, C * G, 1)
        joint_NR1 = torch.logaddexp(log_NR1, scores_NRB.logsumexp(-1, keepdim=True))
        weights_NRB = scores_NRB.sub_(joint_NR1).exp_()
        share_NR1 = log_NR1.sub(joint_NR1).exp_().to(query.dtype)
        out_NRD = torch.baddbmm(over_context.reshape(-1, C * G, D) * share_NR1, weights_NRB.to(query.dtype), value_NBD)
        ctx.save_for_backward(query_SKQD, *context, key_NBD, value_NBD, mask, out_NRD, joint_NR1, weights_NRB)
        return out_NRD.view(S, K, A, C, G, D).permute(0, 2, 3, 1, 4, 5)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        S, A, C, K, G, D = ctx.shape
        query_SKQD, *context, key_NBD, value_NBD, mask, out_NRD, joint_NR1, weights_NRB = ctx.saved_tensors
        gradient_SKQD = gradients[0].permute(0, 3, 1, 2, 4, 5).contiguous().view(query_SKQD.shape)
        to_query, to_context_key, to_context_value = _flash_backward(
            gradient_SKQD, query_SKQD, *context, out_NRD.view(query_SKQD.shape), joint_NR1.view(S, K, -1), 0.0, False,
            attn_mask=mask, scale=D**-0.5,
        )  # fmt: skip

        gradient_NRD, query_NRD = gradient_SKQD.view(out_NRD.shape), query_SKQD.view(out_NRD.shape)
        to_value = torch.bmm(weights_NRB.to(query_SKQD.dtype).transpose(1, 2), gradient_NRD)
        # d/dscore = weight · (gradient · value − gradient · out)
        level_NR1 = (gradient_NRD * out_NRD).sum(-1, keepdim=True, dtype=torch.float32)
        to_scores = torch.bmm(gradient_NRD, value_NBD.transpose(1, 2)).float().sub_(level_NR1).mul_(weights_NRB)
        to_scores = to_scores.mul_(D**-0.5).to(query_SKQD.dtype)
        to_key = torch.bmm(to_scores.transpose(1, 2), query_NRD)
        to_query = torch.baddbmm(to_query.reshape(out_NRD.shape), to_scores, key_NBD)
        to_query = to_query.view(S, K, A, C, G, D).permute(0, 2, 3, 1, 4, 5)
        to_key, to_value = (x.view(S, K, A, -1, D).permute(0, 2, 3, 1, 4) for x in (to_key, to_value))
        return to_query, to_context_key.transpose(1, 2), to_context_value.transpose(1, 2), to_key, to_value, None, None


def _make_masks(sight: Sight, query_SACKGD: Tensor, num_tokens: int, block_size: int) -> tuple[Tensor, Tensor | None]:
    """What is added to the context's scores (S, 1, Q, T), 0 where it is seen; what is hidden of the block (R, B)."""
    S, A, C, _, G, _ = query_SACKGD.shape
    hidden_SACT = sight.hidden_context(C, num_tokens)
    mask_SACT = torch.zeros(hidden_SACT.shape, dtype=query_SACKGD.dtype).masked_fill_(hidden_SACT, _HIDDEN)
    mask_SACGT = mask_SACT[:, :, :, None].expand(S, A, C, G, num_tokens)
    hidden_CB = sight.hidden_block(C, block_size)
    hidden_RB = None if hidden_CB is None else hidden_CB.repeat_interleave(G, dim=0)
    return mask_SACGT.reshape(S, 1, A * C * G, num_tokens), hidden_RB
