"""The head read in pieces of the vocabulary, against all logits at once in float64."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_cache.drafter import pieces
from dflash_cache.drafter.head import Head


@settings(max_examples=80)
@given(
    num_rows=st.integers(0, 90),
    vocab_size=st.integers(2, 70),
    width=st.integers(1, 80),
    shift=st.sampled_from((None, 0, -40, 40)),
    scale=st.sampled_from((1.0, 0.5)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    seed=st.integers(0, 1000),
)
@example(num_rows=15, vocab_size=24, width=1, shift=40, scale=1.0, dtype=torch.float32, seed=0)  # 24 logarithms of ~48
def test_sum_mean_and_argmax_are_those_of_all_logits(*, num_rows, vocab_size, width, shift, scale, dtype, seed) -> None:
    generator = torch.Generator().manual_seed(seed)

    def small(*shape: int) -> Tensor:  # whole numbers: equal logits are common, and exact in bfloat16 too
        return torch.randint(-2, 3, shape, generator=generator).double()

    states_RH, weight_VH, bias_V = small(num_rows, 5), small(vocab_size, 5), small(vocab_size)
    labels_R = torch.randint(vocab_size, (num_rows,), generator=generator)
    bias_V = None if shift is None else bias_V + shift
    head = Head(weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype), scale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "FEW_PIECE", width)
        found = pieces.read_head(head, states_RH.to(dtype), labels_R, wants_mean=True)
    logits_RV = scale * (states_RH @ weight_VH.T + (0 if bias_V is None else bias_V))
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.log_total_R.double(), logits_RV.logsumexp(1), rtol=0, atol=tolerance)
    torch.testing.assert_close(found.logit_R.double(), logits_RV.gather(1, labels_R[:, None])[:, 0])
    assert found.chosen_R.tolist() == (logits_RV.argmax(1) == labels_R).tolist()
    mean_RH = logits_RV.softmax(1) @ weight_VH
    torch.testing.assert_close(found.mean_RH.double(), mean_RH, rtol=0, atol=4 * tolerance)


def test_logits_far_apart_neither_overflow_nor_vanish() -> None:
    weight_VH = torch.tensor([[-300.0], [200.0], [199.0], [-1.0]])
    for width in (1, 2, 4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pieces, "FEW_PIECE", width)
            found = pieces.read_head(Head(weight_VH), torch.ones(1, 1), torch.tensor([2]), wants_mean=True)
        e = 2.718281828
        assert float(found.log_total_R) == pytest.approx(200 + 0.313262, rel=1e-6)  # ln(1 + 1/e) = 0.313262
        assert float(found.mean_RH) == pytest.approx((200 * e + 199) / (e + 1), rel=1e-6)
        assert not found.chosen_R


def test_rows_are_read_in_parts_that_are_few_or_many() -> None:
    for num_rows in range(0, 12_000, 13):
        rows = -(-num_rows // pieces.count_parts(num_rows))
        assert rows <= pieces.FEW_ROWS or pieces.MANY_ROWS <= rows <= pieces.MOST_ROWS
