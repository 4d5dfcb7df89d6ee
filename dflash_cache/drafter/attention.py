"""Attention of draft blocks: each slot sees the context before its block's anchor, and its own block.

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

from typing import Any

import torch
from torch import Tensor

_MASK_NUMBERS = 1 << 23  # of the context's mask at once: more anchors are taken in turns
_HIDDEN = -1e30  # finite, so that a block that sees nothing gets no weight instead of NaN

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_blocks(
    query_SACKGD: Tensor,
    context: tuple[Tensor, Tensor],
    block: tuple[Tensor, Tensor],
    visible_SA: Tensor,
) -> Tensor:
    """Softmax attention over [visible context ; own block], without a causal mask inside the block.

    `context` holds keys and values (S, T, K, D), `block` keys and values (S, A, B, K, D); `visible_SA` counts
    the context positions that a block sees, from the first one on. Returns (S, A, C, K, G, D).
    """
    S, A, C, _, G, _ = query_SACKGD.shape
    if query_SACKGD.device.type != "cpu" or A == 1:  # one block, as in decoding, has no weights worth saving
        return attend_densely(query_SACKGD, context, block, visible_SA)
    at_once = max(1, _MASK_NUMBERS // (S * C * G * context[0].shape[1]))
    parts = [
        _FlashAttention.apply(  # type: ignore[no-untyped-call]
            query_SACKGD[:, part], *context, block[0][:, part], block[1][:, part], visible_SA[:, part]
        )
        for part in (slice(begin, begin + at_once) for begin in range(0, A, at_once))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def attend_densely(
    query_SACKGD: Tensor, context: tuple[Tensor, Tensor], block: tuple[Tensor, Tensor], visible_SA: Tensor
) -> Tensor:
    """The same with all weights in memory: for other devices, for one block, and to compare with."""
    S, A, C, K, G, D = query_SACKGD.shape
    context_key_SKDT = context[0].permute(0, 2, 3, 1)
    context_value_SKTD = context[1].transpose(1, 2)
    block_key_SKADB = block[0].permute(0, 3, 1, 4, 2)
    block_value_SKABD = block[1].permute(0, 3, 1, 2, 4)
    T = context_key_SKDT.shape[-1]

    query_SKAQD = (query_SACKGD * D**-0.5).permute(0, 3, 1, 2, 4, 5).reshape(S, K, A, C * G, D)
    over_context = (query_SKAQD.reshape(S, K, A * C * G, D) @ context_key_SKDT).view(S, K, A, C * G, T)
    hidden_SAT = torch.arange(T, device=visible_SA.device) >= visible_SA[..., None]
    over_context = over_context.masked_fill(hidden_SAT[:, None, :, None, :], float("-inf"))
    over_block = query_SKAQD @ block_key_SKADB

    weights = torch.softmax(torch.cat([over_context, over_block], dim=-1), dim=-1, dtype=torch.float32)
    weights = weights.to(context_value_SKTD.dtype)
    from_context = weights[..., :T].reshape(S, K, A * C * G, T) @ context_value_SKTD
    from_block = weights[..., T:] @ block_value_SKABD
    mixed = from_context.view(S, K, A, C, G, D) + from_block.view(S, K, A, C, G, D)
    return mixed.permute(0, 2, 3, 1, 4, 5)


class _FlashAttention(torch.autograd.Function):
    """N = S · K · A blocks of R = C · G queries where it is about the block's own part."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        query, context_key, context_value, key, value, visible = tensors
        S, A, C, K, G, D = ctx.shape = query.shape
        query_SKQD = query.permute(0, 3, 1, 2, 4, 5).contiguous().view(S, K, A * C * G, D)
        context = (context_key.transpose(1, 2), context_value.transpose(1, 2))
        key_NBD, value_NBD = (x.permute(0, 3, 1, 2, 4).reshape(S * K * A, -1, D) for x in (key, value))
        mask = _hide(visible, C * G, context_key.shape[1], query.dtype)
        over_context, log_SKQ = _flash(query_SKQD, *context, 0.0, False, attn_mask=mask, scale=D**-0.5)

        query_NRD = query_SKQD.view(-1, C * G, D)
        scores_NRB = torch.bmm(query_NRD, key_NBD.transpose(1, 2)).float().mul_(D**-0.5)
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
        return to_query, to_context_key.transpose(1, 2), to_context_value.transpose(1, 2), to_key, to_value, None


def _hide(visible_SA: Tensor, queries: int, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """What is added to the context's scores (S, 1, Q, T): 0 where a block's queries see a position."""
    S, A = visible_SA.shape
    hidden_SAT = torch.arange(num_tokens) >= visible_SA[..., None]
    mask_SAT = torch.zeros(hidden_SAT.shape, dtype=dtype).masked_fill_(hidden_SAT, _HIDDEN)
    return mask_SAT[:, :, None].expand(S, A, queries, num_tokens).reshape(S, 1, A * queries, num_tokens)
