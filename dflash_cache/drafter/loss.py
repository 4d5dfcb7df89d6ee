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
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dflash_cache.drafter.anchors import Blocks
from dflash_cache.drafter.head import Head
from dflash_cache.drafter.teacher import Teacher

CHUNK_LOGITS = 6_000_000  # logits of one chunk: 24 MB in float32, so that its passes stay in a CPU's caches

LOWEST_LOGIT = -60.0  # below the highest; e^-60 is nothing in float32, and no product of it is denormal, which is slow

Weigh = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class SoftLabels:
    """The target's own distributions: `last_STH` are its last layer's outputs; `share`: how much of the loss is KL."""

    last_STH: Tensor
    teacher: Teacher
    share: float


@dataclass(frozen=True)
class Extra:
    """What the loss may have beside hard labels' cross-entropy; `cap_weight`: what a right slot's entropy weighs."""

    cap_weight: float = 0.0
    soft: SoftLabels | None = None


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
    extra: Extra = Extra(),
) -> BlockLoss:
    """Weighted cross-entropy of the labels under the head's distribution, slots 1…B−1.

    `states_SABH` are the drafter's normalised slots; `head`: the target's, or a plain one's matrix (V, H); `weigh` maps
    (ce_NK, mask_NK) to weights (see `objective`).
    Slots after the first `max_slots` count as unsupervised, and are not computed. Soft labels cost a second product
    with the head, a right slot's entropy two more passes over its logits.
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
        N, K, _ = states_NKH.shape
        device = states_NKH.device
        wants_gradient = ctx.needs_input_grad[0]
        gradient_NKH = torch.zeros_like(states_NKH) if wants_gradient else None
        ce_NK = torch.zeros(N, K, device=device)
        correct_NK = torch.zeros(N, K, dtype=torch.bool, device=device)
        loss_sum = torch.zeros((), device=device)
        weight_sum = torch.zeros((), device=device)
        cap_weight, soft = terms.extra.cap_weight, terms.extra.soft
        vocab_size = len(head.weight_VH)
        blocks_per_chunk = max(1, CHUNK_LOGITS // (vocab_size * K))
        buffers = _chunk_buffers(blocks_per_chunk * K, vocab_size, head.weight_VH.dtype, device, "drafter")
        slopes = None
        if head.softcap is not None and wants_gradient:
            slopes = _chunk_buffers(blocks_per_chunk * K, vocab_size, torch.float32, device, "slope")[1]
        for begin in range(0, N, blocks_per_chunk):
            part = slice(begin, begin + blocks_per_chunk)
            mask = mask_NK[part]
            labels_R = labels_NK[part][mask]
            low_RV, logits_RV = (buffer[: len(labels_R)] for buffer in buffers)
            slope_RV = None if slopes is None else slopes[: len(labels_R)]
            head.fill_logits(states_NKH[part][mask], low_RV, logits_RV, slope_RV)
            highest_R = logits_RV.amax(dim=1)
            label_logit_R = logits_RV.gather(1, labels_R[:, None])[:, 0]
            correct_R = _labels_chosen(logits_RV, labels_R, label_logit_R == highest_R)
            if soft is not None:
                q_RV, entropy_R = _read_soft_labels(soft, terms.before_NK[part][mask], head, blocks_per_chunk * K)
                cross_R = torch.linalg.vecdot(q_RV, logits_RV)
            exponentials_RV = logits_RV.sub_(highest_R[:, None]).clamp_(min=LOWEST_LOGIT).exp_()
            total_R = exponentials_RV.sum(dim=1)
            log_total_R = total_R.log() + highest_R
            loss_R = ce_R = log_total_R - label_logit_R
            if soft is not None:
                loss_R = torch.lerp(ce_R, log_total_R - cross_R - entropy_R, soft.share)

            ce_NK[part][mask] = ce_R
            correct_NK[part][mask] = correct_R
            weights_NK = terms.weigh(ce_NK[part], mask)
            weights_R = weights_NK[mask]
            loss_sum += torch.dot(weights_R, loss_R)
            weight_sum += weights_R.sum()
            right_C = correct_R.nonzero()[:, 0] if cap_weight else None
            if right_C is not None:
                entropy_C, slope_CV = _entropy_of(exponentials_RV[right_C], total_R[right_C])
                loss_sum += cap_weight * entropy_C.sum()
            if gradient_NKH is not None:
                gradient_RV = exponentials_RV.mul_((weights_R / total_R)[:, None])
                hard_R = weights_R if soft is None else (1 - soft.share) * weights_R
                gradient_RV.scatter_add_(1, labels_R[:, None], -hard_R[:, None])
                if soft is not None:
                    gradient_RV.addcmul_(q_RV, weights_R[:, None], value=-soft.share)
                if right_C is not None:
                    gradient_RV.index_add_(0, right_C, slope_CV, alpha=cap_weight)
                gradient_NKH[part][mask] = head.pull_back(gradient_RV, low_RV, slope_RV).to(gradient_NKH.dtype)
        if gradient_NKH is not None:
            ctx.save_for_backward(gradient_NKH)
        ctx.mark_non_differentiable(weight_sum, ce_NK, correct_NK)
        return loss_sum, weight_sum, ce_NK, correct_NK

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient_NKH,) = ctx.saved_tensors
        return gradient_NKH * gradients[0].to(gradient_NKH.dtype), None, None, None, None


def _read_soft_labels(soft: SoftLabels, before_R: Tensor, head: Head, max_rows: int) -> tuple[Tensor, Tensor]:
    """The target's probabilities (R, V), float32, and their entropies (R,), from the states at `before_R`."""
    weight_VH = head.weight_VH
    buffers = _chunk_buffers(max_rows, len(weight_VH), weight_VH.dtype, weight_VH.device, "teacher")
    low_RV, log_RV = (buffer[: len(before_R)] for buffer in buffers)
    head.fill_logits(soft.teacher.normalize(soft.last_STH.flatten(0, 1)[before_R]), low_RV, log_RV)
    log_RV.sub_(log_RV.logsumexp(dim=1, keepdim=True)).clamp_(min=LOWEST_LOGIT)
    q_RV = log_RV.exp()
    return q_RV, -torch.linalg.vecdot(q_RV, log_RV)


@lru_cache(maxsize=3)
def _chunk_buffers(
    rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device, whose: str
) -> tuple[Tensor, Tensor]:
    """Two buffers (rows, V) for a chunk's logits, in the head's dtype and in float32 (the same one if that is it).

    `whose` tells those of the drafter, of its teacher and of a cap's slopes apart, which are needed at the same time.

    Kept from call to call: fresh memory of this size comes from the system page by page, and touching it first
    costs more than all passes over it (measured: 17 ms against 1 ms a pass).
    """
    low = torch.empty(rows, vocab_size, dtype=dtype, device=device)
    return low, low if dtype == torch.float32 else torch.empty_like(low, dtype=torch.float32)


def _entropy_of(exponentials_CV: Tensor, total_C: Tensor) -> tuple[Tensor, Tensor]:
    """Entropies (C,) of the distributions exponentials / total, and their gradients (C, V) by the logits."""
    p_CV = exponentials_CV.div_(total_C[:, None])
    log_CV = p_CV.log()
    entropy_C = -torch.linalg.vecdot(p_CV, log_CV)
    return entropy_C, log_CV.add_(entropy_C[:, None]).mul_(p_CV).neg_()


def _labels_chosen(logits_RV: Tensor, labels_R: Tensor, highest_R: Tensor) -> Tensor:
    """Whether each row's argmax is its label; only rows whose label is among the `highest_R` are searched."""
    candidates = highest_R.nonzero()[:, 0]
    chosen_R = torch.zeros_like(highest_R)
    chosen_R[candidates] = logits_RV[candidates].argmax(dim=1) == labels_R[candidates]
    return chosen_R
