"""The supervised rows of a few blocks at once: their losses from their logits, and the gradient by their states.

Rows with hard labels alone take the short way: the gradient, softmax − one-hot times the head, is the head's mean under
the row's distribution less the label's row of it, so that logits exist a piece of the vocabulary at a time (`pieces`).
Soft labels, a right slot's entropy and a capped head need the probabilities themselves, and take the long way: all
logits of a chunk of rows, in float32, until the next chunk is read.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dflash_cache.drafter.head import Head
from dflash_cache.drafter.pieces import count_parts, read_head
from dflash_cache.drafter.teacher import Teacher

LONG_LOGITS = 6_000_000  # of one chunk: 24 MB in float32
LOWEST_LOGIT = -60.0  # below the highest; e^-60 is nothing in float32, and no product of it is denormal, which is slow


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


HARD_LABELS = Extra()


@dataclass(frozen=True)
class RowTerms:
    """Of each row: ce_R, the label's cross-entropy; loss_R, what is weighted; correct_R, argmax is the label.

    unweighted: a scalar that is added to the loss as it is.
    """

    ce_R: Tensor
    loss_R: Tensor
    correct_R: Tensor
    unweighted: Tensor | float


def open_chunk(head: Head, mask_NK: Tensor, slots: int, extra: Extra, wants_gradient: bool) -> "ShortWay | LongWay":
    """A way to read the supervised rows of N blocks, of whose K slots the first `slots` may be supervised."""
    if extra.cap_weight or extra.soft is not None or head.softcap is not None:
        return LongWay(head, slots, extra, wants_gradient)
    return ShortWay(head, mask_NK, wants_gradient)


class ShortWay:
    """Hard labels under a head without a cap."""

    def __init__(self, head: Head, mask_NK: Tensor, wants_gradient: bool) -> None:
        self.num_blocks = max(1, -(-len(mask_NK) // count_parts(int(mask_NK.sum()))))
        self._head, self._wants_gradient = head, wants_gradient

    def read(self, states_RH: Tensor, labels_R: Tensor, before_R: Tensor) -> RowTerms:
        """Terms of rows (R, H); their means of the head stay for `pull_back`."""
        found = read_head(self._head, states_RH, labels_R, self._wants_gradient)
        self._labels_R, self._mean_RH = labels_R, found.mean_RH
        ce_R = found.log_total_R - found.logit_R
        return RowTerms(ce_R, ce_R, found.chosen_R, 0.0)

    def pull_back(self, weights_R: Tensor) -> Tensor:
        """The gradient (R, H), float32, of Σ weight · loss of the rows that were read last."""
        assert self._mean_RH is not None
        gradient_RH = self._mean_RH.sub_(self._head.weight_VH[self._labels_R])
        return gradient_RH.mul_((weights_R * self._head.scale)[:, None])


class LongWay:
    """All terms, by any head."""

    def __init__(self, head: Head, slots: int, extra: Extra, wants_gradient: bool) -> None:
        weight_VH = head.weight_VH
        self.num_blocks = max(1, LONG_LOGITS // (len(weight_VH) * slots))
        self._head, self._extra, rows = head, extra, self.num_blocks * slots
        self._low = _take_room(rows, weight_VH, weight_VH.dtype, "drafter")
        self._wide = _take_wide(self._low, weight_VH, "drafter")
        self._slope = None
        if head.softcap is not None and wants_gradient:
            self._slope = _take_room(rows, weight_VH, torch.float32, "slope")
        if extra.soft is not None:
            self._teacher_low = _take_room(rows, weight_VH, weight_VH.dtype, "teacher")
            self._teacher_wide = _take_wide(self._teacher_low, weight_VH, "teacher")

    def read(self, states_RH: Tensor, labels_R: Tensor, before_R: Tensor) -> RowTerms:
        """Terms of rows (R, H); `before_R`: where in (S, T), flattened, the token before each label lies."""
        R, soft, cap_weight = len(labels_R), self._extra.soft, self._extra.cap_weight
        logits_RV = self._wide[:R]
        self._head.fill_logits(states_RH, self._low[:R], logits_RV, None if self._slope is None else self._slope[:R])
        highest_R = logits_RV.amax(dim=1)
        label_logit_R = logits_RV.gather(1, labels_R[:, None])[:, 0]
        correct_R = _labels_chosen(logits_RV, labels_R, label_logit_R == highest_R)
        if soft is not None:
            self._q_RV, entropy_R = self._read_soft_labels(soft, before_R)
            cross_R = torch.linalg.vecdot(self._q_RV, logits_RV)
        exponentials_RV = logits_RV.sub_(highest_R[:, None]).clamp_(min=LOWEST_LOGIT).exp_()
        total_R = exponentials_RV.sum(dim=1)
        log_total_R = total_R.log() + highest_R
        loss_R = ce_R = log_total_R - label_logit_R
        if soft is not None:
            loss_R = torch.lerp(ce_R, log_total_R - cross_R - entropy_R, soft.share)
        unweighted: Tensor | float = 0.0
        if cap_weight:
            self._right_C = correct_R.nonzero()[:, 0]
            entropy_C, self._slope_CV = _entropy_of(exponentials_RV[self._right_C], total_R[self._right_C])
            unweighted = cap_weight * entropy_C.sum()
        self._labels_R, self._total_R = labels_R, total_R
        return RowTerms(ce_R, loss_R, correct_R, unweighted)

    def pull_back(self, weights_R: Tensor) -> Tensor:
        """The gradient (R, H), in the head's dtype, of Σ weight · loss + unweighted of the rows that were read last."""
        R, soft, cap_weight = len(weights_R), self._extra.soft, self._extra.cap_weight
        gradient_RV = self._wide[:R].mul_((weights_R / self._total_R)[:, None])
        hard_R = weights_R if soft is None else (1 - soft.share) * weights_R
        gradient_RV.scatter_add_(1, self._labels_R[:, None], -hard_R[:, None])
        if soft is not None:
            gradient_RV.addcmul_(self._q_RV, weights_R[:, None], value=-soft.share)
        if cap_weight:
            gradient_RV.index_add_(0, self._right_C, self._slope_CV, alpha=cap_weight)
        return self._head.pull_back(gradient_RV, self._low[:R], None if self._slope is None else self._slope[:R])

    def _read_soft_labels(self, soft: SoftLabels, before_R: Tensor) -> tuple[Tensor, Tensor]:
        """The target's probabilities (R, V), float32, and their entropies (R,), from the states at `before_R`."""
        R = len(before_R)
        log_RV = self._teacher_wide[:R]
        normed_RH = soft.teacher.normalize(soft.last_STH.flatten(0, 1)[before_R])
        self._head.fill_logits(normed_RH, self._teacher_low[:R], log_RV)
        log_RV.sub_(log_RV.logsumexp(dim=1, keepdim=True)).clamp_(min=LOWEST_LOGIT)
        q_RV = log_RV.exp()
        return q_RV, -torch.linalg.vecdot(q_RV, log_RV)


def _take_room(rows: int, weight_VH: Tensor, dtype: torch.dtype, whose: str) -> Tensor:
    return _room(rows, len(weight_VH), dtype, weight_VH.device, whose)


def _take_wide(low: Tensor, weight_VH: Tensor, whose: str) -> Tensor:
    """Room in float32 of the same shape: `low` itself if that is float32."""
    return low if low.dtype == torch.float32 else _take_room(len(low), weight_VH, torch.float32, whose)


@lru_cache(maxsize=5)
def _room(rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device, whose: str) -> Tensor:
    """Memory for the logits of a chunk; `whose` tells apart those that are needed at the same time.

    Kept from call to call: fresh memory of this size comes from the system page by page, and touching it first
    costs more than all passes over it (measured: 17 ms against 1 ms a pass).
    """
    return torch.empty(rows, vocab_size, dtype=dtype, device=device)


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
