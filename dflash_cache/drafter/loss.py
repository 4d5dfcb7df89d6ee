"""The loss through the target's frozen head, without ever holding logits for all positions.

The head has no gradient of its own, so the gradient of a chunk's loss with respect to its states is known as soon
as the chunk's logits are: softmax minus one-hot, times weight, times head. It is computed in the forward pass and
kept (positions × hidden); the (chunk × vocabulary) logits are gone before the next chunk. Positions without
supervision are never computed. Statistics come out of the same pass.

Distillation: a share of the loss may be KL(target ‖ drafter) in the place of the cross-entropy of the label, weighted
by the same slot weights. The target's distribution for the token at position p comes from its state at p − 1, and lives
as long as the chunk: ∂KL/∂z_v = p_v − q_v.

Confidence (CAP, LLaDA 2.0, arXiv 2512.15745, section 5.2): the entropy H of the slots that are right already, those
whose argmax is the label, may be added, which sharpens what the drafter knows. ∂H/∂z_v = −p_v · (log p_v + H).

A cap on the logits (Gemma 2; see `head`) bends them after the product: everything above is by the capped logits, and
the gradient takes the cap's slope on its way back to the states.

The loss is a *sum*; the trainer divides by the summed weights of the whole optimizer step, so that accumulation
over micro-batches and ranks gives the gradient of one large batch (FIELD.md: averaging per micro-batch weighs short
batches too high).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_cache.drafter.anchors import Blocks
from dflash_cache.drafter.chunk import HARD_LABELS, Extra, open_chunk
from dflash_cache.drafter.head import Head

Weigh = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class _Terms:
    """`before_NK`: of each slot the place of the token before its label, in S · T."""

    weigh: Weigh
    extra: Extra
    before_NK: Tensor


@dataclass(frozen=True)
class BlockLoss:
    """The summed loss of N blocks, and what each slot did; all but `loss_sum` are detached.

    loss_sum: Σ weight · ((1 − share) · cross-entropy + share · KL) + cap_weight · Σ entropy of the right slots, in
    nats, a scalar with a gradient; weight_sum: Σ weight.
    ce_NK: cross-entropies, correct_NK: argmax is the label, mask_NK: supervised; zeros where not supervised.
    """

    loss_sum: Tensor
    weight_sum: Tensor
    ce_NK: Tensor
    correct_NK: Tensor
    mask_NK: Tensor


def block_loss(
    states_SABH: Tensor,
    blocks: Blocks,
    head: Head | Tensor,
    weigh: Weigh,
    max_slots: int | None = None,
    extra: Extra = HARD_LABELS,
) -> BlockLoss:
    """Weighted cross-entropy of the labels under the head's distribution, slots 1…B−1.

    `states_SABH` are the drafter's normalised slots, those after the first `max_slots` present or not; `head`: the
    target's, or a plain one's matrix (V, H); `weigh` maps (ce_NK, mask_NK) to weights (see `objective`). Slots after
    the first `max_slots` count as unsupervised, and are not computed. Soft labels cost a second product with the head,
    a right slot's entropy two more passes over its logits.
    The product with the head is computed in the head's dtype, softmax and sums in float32.
    """
    mask_NK = blocks.mask_SAK.flatten(0, 1)
    kept_N = mask_NK[:, 0]  # a block without supervision has none in its first slot
    states_NKH = states_SABH[:, :, 1:].flatten(0, 1)[kept_N]
    mask_NK = mask_NK[kept_N]
    labels_NK = blocks.labels_SAK.flatten(0, 1)[kept_N]
    if max_slots is not None:
        mask_NK[:, max_slots:] = False  # a copy already: kept_N selected it
    before_NK = _places_before(blocks, extra.soft.last_STH.shape[1] if extra.soft else 0)[kept_N]
    loss_sum, weight_sum, ce_NK, correct_NK = _FrozenHeadLoss.apply(  # type: ignore[no-untyped-call]
        states_NKH,
        labels_NK,
        mask_NK,
        head if isinstance(head, Head) else Head(head),
        _Terms(weigh, extra, before_NK),
    )
    return BlockLoss(loss_sum, weight_sum, ce_NK, correct_NK, mask_NK)


def _places_before(blocks: Blocks, num_tokens: int) -> Tensor:
    """(S · A, K): where in (S, T), flattened, the token before each slot's label lies; anywhere if unsupervised."""
    S, _, K = blocks.labels_SAK.shape
    device = blocks.labels_SAK.device
    inside_SAK = (blocks.anchors_SA[..., None] + torch.arange(K, device=device)).clamp(max=max(0, num_tokens - 1))
    return (inside_SAK + num_tokens * torch.arange(S, device=device)[:, None, None]).flatten(0, 1)


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states_NKH: Tensor, labels_NK: Tensor, mask_NK: Tensor, head: Head, terms: _Terms
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        N, K = mask_NK.shape
        num_slots = states_NKH.shape[1]  # the first of K; the mask is False for all others
        device = states_NKH.device
        wants_gradient = ctx.needs_input_grad[0]
        gradient_NKH = torch.zeros_like(states_NKH) if wants_gradient else None
        ce_NK = torch.zeros(N, K, device=device)
        correct_NK = torch.zeros(N, K, dtype=torch.bool, device=device)
        loss_sum = torch.zeros((), device=device)
        weight_sum = torch.zeros((), device=device)
        chunk = open_chunk(head, mask_NK, num_slots, terms.extra, wants_gradient)
        for begin in range(0, N, chunk.num_blocks):
            part = slice(begin, begin + chunk.num_blocks)
            mask = mask_NK[part]
            found = chunk.read(
                states_NKH[part][mask[:, :num_slots]], labels_NK[part][mask], terms.before_NK[part][mask]
            )
            ce_NK[part][mask] = found.ce_R
            correct_NK[part][mask] = found.correct_R
            weights_R = terms.weigh(ce_NK[part], mask)[mask]
            loss_sum += torch.dot(weights_R, found.loss_R) + found.unweighted
            weight_sum += weights_R.sum()
            if gradient_NKH is not None:
                gradient_NKH[part][mask[:, :num_slots]] = chunk.pull_back(weights_R).to(gradient_NKH.dtype)
        if gradient_NKH is not None:
            ctx.save_for_backward(gradient_NKH)
        ctx.mark_non_differentiable(weight_sum, ce_NK, correct_NK)
        return loss_sum, weight_sum, ce_NK, correct_NK

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient_NKH,) = ctx.saved_tensors
        return gradient_NKH * gradients[0].to(gradient_NKH.dtype), None, None, None, None
