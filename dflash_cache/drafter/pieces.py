"""What rows of states get from the head, a piece of the vocabulary at a time: their logits never exist all at once.

Of a row's logits z hard labels need log Σ e^z, the label's own logit, whether that is the highest, and for the gradient
the mean Σ p_v · weight_v under the row's distribution p. As in flash attention (arXiv 2205.14135), with the head as
keys and values, each piece gives a softmax, a sum and a mean of its own, and the pieces are joined by their sums.

On a CPU a product's speed depends on its shape more than on anything else: bfloat16 products of 600 to 1,500 rows with
a long inner axis run at half the speed of those of fewer or more (two cores with AMX), so rows are read in parts that
are few or many.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_cache.drafter.head import Head

FEW_ROWS, FEW_PIECE = 560, 8192
MANY_ROWS, MANY_PIECE = 1536, 2048
MOST_ROWS = 2 * MANY_ROWS  # one row more makes two parts that are still many
ROW_STEP = 40  # rows are filled up to a multiple: a CPU builds a bfloat16 product anew for each size, in milliseconds


@dataclass(frozen=True)
class HeadReading:
    """Of R rows, in float32: log_total_R, log Σ e^z; mean_RH, Σ p_v · weight_v, or None if not asked for.

    Of each row's label: logit_R, its logit; chosen_R: it is the argmax, the first of several equal ones.
    """

    log_total_R: Tensor
    mean_RH: Tensor | None
    logit_R: Tensor
    chosen_R: Tensor


def count_parts(num_rows: int) -> int:
    """In how many parts of about one size so many rows are best read."""
    return max(1, -(-num_rows // (FEW_ROWS if num_rows < MANY_ROWS else MOST_ROWS)))


@torch.no_grad()
def read_head(head: Head, states_RH: Tensor, labels_R: Tensor, wants_mean: bool) -> HeadReading:
    """Read all of a head without a cap for states (R, H) of any dtype.

    Products and each piece's softmax are computed in the head's dtype, sums over pieces in float32.
    """
    R, vocab_size = len(labels_R), len(head.weight_VH)
    rows_RH = F.pad(head.scale_states(states_RH), (0, 0, 0, -R % ROW_STEP))
    width = MANY_PIECE if R >= MANY_ROWS else FEW_PIECE
    labels = _Labels(labels_R, vocab_size, width)
    lead_R = torch.full((len(rows_RH),), -torch.inf, device=rows_RH.device)  # the highest logit so far
    total_R = torch.zeros_like(lead_R)  # Σ e^(z − lead): logarithms would be rounded at the logits' size once a piece
    mean_RH = torch.zeros(rows_RH.shape, device=rows_RH.device) if wants_mean else None
    piece_mean_RH = _room("mean", len(rows_RH), rows_RH.shape[1], rows_RH)
    wide_RH = _room("wide", len(rows_RH), rows_RH.shape[1], lead_R)
    for begin in range(0, vocab_size, width):
        piece = head.cut(begin, begin + width)
        logits_RP = _room("logits", len(rows_RH), len(piece.weight_VH), rows_RH)
        piece.fill_product(rows_RH, logits_RP)
        highest_R = _highest(logits_RP)
        labels.look_at(logits_RP, highest_R, begin)
        p_RP = torch.softmax(logits_RP, dim=1, out=logits_RP)
        before_R, lead_R = lead_R, torch.maximum(lead_R, highest_R)
        piece_total_R = (highest_R - lead_R).exp_().div_(_highest(p_RP))  # the highest's p is e^0 / its piece's total
        total_R = torch.addcmul(piece_total_R, total_R, (before_R - lead_R).exp_())
        if mean_RH is not None:
            share_R = piece_total_R.div_(total_R)
            wide_RH.copy_(torch.mm(p_RP, piece.weight_VH, out=piece_mean_RH))
            mean_RH.lerp_(wide_RH, share_R[:, None])
    log_total_R = total_R.log_().add_(lead_R)
    return HeadReading(log_total_R[:R], None if mean_RH is None else mean_RH[:R], labels.logit_R, labels.are_chosen())


def _highest(values_RP: Tensor) -> Tensor:
    """The highest of each row, float32.

    A CPU has no fast maximum of bfloat16. Of positive ones the bits, as a whole number, are in the same order; of
    negative ones, which are lower as whole numbers too, in the reverse.
    """
    if values_RP.dtype != torch.bfloat16 or values_RP.device.type != "cpu":
        return values_RP.amax(dim=1).float()
    bits_RP = values_RP.view(torch.int16)
    highest_R = bits_RP.amax(dim=1)
    if (highest_R < 0).any():
        highest_R = torch.where(highest_R < 0, bits_RP.amin(dim=1), highest_R)
    return highest_R.view(torch.bfloat16).float()


class _Labels:
    """Looks at each row's label in the one piece that holds it, and keeps whether anything is higher."""

    def __init__(self, labels_R: Tensor, vocab_size: int, width: int) -> None:
        sorted_R, order_R = labels_R.sort()
        edges = torch.arange(width, max(width, vocab_size), width, device=labels_R.device)
        self._labels_R = labels_R
        self._rows_by_piece = iter(order_R.tensor_split(torch.searchsorted(sorted_R, edges).cpu()))
        self._leads_R = torch.zeros_like(labels_R, dtype=torch.bool)  # the first of the highest, up to its piece's end
        self.logit_R = torch.zeros(len(labels_R), device=labels_R.device)
        self._highest_R = torch.full_like(self.logit_R, -torch.inf)

    def look_at(self, logits_RP: Tensor, highest_R: Tensor, begin: int) -> None:
        """Take the next piece's logits and their highest; rows beyond the labels' are ignored."""
        rows = next(self._rows_by_piece)
        columns = self._labels_R[rows] - begin
        self.logit_R[rows] = own = logits_RP[rows, columns].float()
        leads = (own == highest_R[rows]) & (own > self._highest_R[rows])
        rows, columns = rows[leads], columns[leads]
        self._leads_R[rows] = logits_RP[rows].argmax(dim=1) == columns
        torch.maximum(self._highest_R, highest_R[: len(self._highest_R)], out=self._highest_R)

    def are_chosen(self) -> Tensor:
        """(R,): the label is the argmax; to be asked after the last piece."""
        return self._leads_R & (self.logit_R == self._highest_R)


def _room(whose: str, rows: int, width: int, like: Tensor) -> Tensor:
    return _keep_room(whose, rows, width, like.dtype, like.device)


@lru_cache(maxsize=8)
def _keep_room(whose: str, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory kept from call to call: touching fresh memory of this size costs more than a pass over it."""
    return torch.empty(rows, width, dtype=dtype, device=device)
