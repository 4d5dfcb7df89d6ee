"""The head read in pieces of the vocabulary, against all logits at once in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cache.drafter import pieces
from dflash_cache.drafter.head import Head


@settings(max_examples=60)
@given(
    num_rows=st.integers(0, 90),
    vocab_size=st.integers(2, 70),
    width=st.integers(1, 80),
    has_bias=st.booleans(),
    scale=st.sampled_from((1.0, 0.5)),
    seed=st.integers(0, 1000),
)
def test_sum_mean_and_argmax_are_those_of_all_logits(num_rows, vocab_size, width, has_bias, scale, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    # small whole numbers: equal logits are common, and products exact
    states_RH, weight_VH, bias_V = (
        torch.randint(-2, 3, shape, generator=generator).float()
        for shape in ((num_rows, 5), (vocab_size, 5), (vocab_size,))
    )
    labels_R = torch.randint(vocab_size, (num_rows,), generator=generator)
    head = Head(weight_VH, bias_V if has_bias else None, scale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "FEW_PIECE", width)
        found = pieces.read_head(head, states_RH, labels_R, wants_mean=True)
    logits_RV = scale * (states_RH.double() @ weight_VH.double().T + has_bias * bias_V.double())
    torch.testing.assert_close(found.log_total_R.double(), logits_RV.logsumexp(1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.logit_R.double(), logits_RV.gather(1, labels_R[:, None])[:, 0])
    assert found.chosen_R.tolist() == (logits_RV.argmax(1) == labels_R).tolist()
    mean_RH = logits_RV.softmax(1) @ weight_VH.double()
    torch.testing.assert_close(found.mean_RH.double(), mean_RH, rtol=1e-5, atol=1e-5)


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
