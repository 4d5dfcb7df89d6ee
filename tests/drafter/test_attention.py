"""Attention of draft blocks against its formula, one query at a time in double; the rotary embedding too."""

import math
from collections.abc import Callable

import pytest
import torch
from drafter.tiny_drafter import make_drafter
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_cache.drafter import attention
from dflash_cache.drafter.attention import attend_blocks, attend_densely
from dflash_cache.drafter.rope import rotary_table, rotate
from dflash_cache.drafter.sight import Sight

Way = Callable[[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor], Sight], Tensor]
SIZES = st.fixed_dictionaries(
    {
        "S": st.integers(1, 3),
        "A": st.integers(1, 6),
        "B": st.integers(1, 5),
        "C": st.integers(1, 5),
        "K": st.integers(1, 3),
        "G": st.integers(1, 3),
        "D": st.sampled_from([2, 8, 64]),
        "T": st.integers(1, 40),
    }
)


def draw(sizes: dict[str, int], seed: int) -> tuple[list[Tensor], Tensor]:
    """Query, context's key and value, block's key and value (float32), anchors: at the context's ends and inside."""
    S, A, B, K, G, D, T = (sizes[name] for name in "SABKGDT")
    C = min(B, sizes["C"])  # the slots that ask
    generator = torch.Generator().manual_seed(seed)
    shapes = [(S, A, C, K, G, D), (S, T, K, D), (S, T, K, D), (S, A, B, K, D), (S, A, B, K, D)]
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    anchors_SA = torch.randint(T + 1, (S, A), generator=generator)
    anchors_SA[0, 0], anchors_SA[-1, -1] = 0, T
    return tensors, anchors_SA


def attend_slowly(tensors: list[Tensor], anchors_SA: Tensor, window: int | None = None, first: int = 0) -> Tensor:
    """A query at a time, whatever lies `window` or more positions before it left out, and what follows it."""
    query, context_key, context_value, key, value = tensors
    S, A, C, K, G, D = query.shape
    out = []
    for s in range(S):
        for a in range(A):
            anchor = int(anchors_SA[s, a])
            for c in range(C):
                begin = 0 if window is None else max(0, anchor + c - window + 1 - first)
                seen = slice(begin, max(begin, anchor - first))
                own = slice(None) if window is None else slice(c + 1)
                for k in range(K):
                    keys = torch.cat([context_key[s, seen, k], key[s, a, own, k]])
                    values = torch.cat([context_value[s, seen, k], value[s, a, own, k]])
                    for g in range(G):
                        weights = (keys @ query[s, a, c, k, g] / math.sqrt(D)).exp()
                        out.append(weights @ values / weights.sum())
    return torch.stack(out).view(S, A, C, K, G, D)


def attend(tensors: list[Tensor], sight: Sight) -> Tensor:
    return attend_blocks(tensors[0], (tensors[1], tensors[2]), (tensors[3], tensors[4]), sight)


def check_against_formula(sizes: dict[str, int], seed: int, window: int | None, first: int, way: Way) -> None:
    tensors, anchors_SA = draw(sizes, seed)
    anchors_SA += first
    exact_tensors = [tensor.detach().double().requires_grad_() for tensor in tensors]
    exact = attend_slowly(exact_tensors, anchors_SA, window, first)
    gradient = torch.randn(exact.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = torch.autograd.grad(exact, exact_tensors, gradient, materialize_grads=True)

    found = way(tensors[0], (tensors[1], tensors[2]), (tensors[3], tensors[4]), Sight(anchors_SA, window, first))
    gradients = torch.autograd.grad(found, tensors, gradient.float(), materialize_grads=True)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize("way", [attend_blocks, attend_densely])
@settings(max_examples=25)
@given(sizes=SIZES, seed=st.integers(0, 2**31))
def test_output_and_gradients_are_those_of_the_formula(way: Way, sizes: dict[str, int], seed: int) -> None:
    check_against_formula(sizes, seed, None, 0, way)


@pytest.mark.parametrize("way", [attend_blocks, attend_densely])
@settings(max_examples=40)
@given(sizes=SIZES, seed=st.integers(0, 2**31), longer=st.integers(0, 40), first=st.integers(0, 30))
def test_so_they_are_with_a_window_from_a_blocks_length_on_wherever_the_context_begins(
    way: Way, sizes: dict[str, int], seed: int, longer: int, first: int
) -> None:
    check_against_formula(sizes, seed, sizes["B"] + longer, first, way)


def test_the_masks_of_a_step_are_made_once_for_all_layers_that_see_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], Sight.hidden_context
    monkeypatch.setattr(Sight, "hidden_context", lambda self, *sizes: (made.append(sizes), make(self, *sizes))[1])
    drafter = make_drafter(num_layers=5)
    generator = torch.Generator().manual_seed(0)
    states, slots = torch.randn(2, 9, 3, 16, generator=generator), torch.randn(2, 3, 4, 16, generator=generator)
    drafter(slots, drafter.read_context(states), torch.tensor([[0, 3, 8], [5, 6, 9]]), max_slots=2)
    assert made == [(4, 9), (3, 9)]  # the last layer computes three slots


def test_a_drafter_told_to_attend_densely_does_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter(layer_types=("sliding_attention", "full_attention"), sliding_window=6)
    generator = torch.Generator().manual_seed(0)
    states, slots = torch.randn(2, 9, 3, 16, generator=generator), torch.randn(2, 3, 4, 16, generator=generator)
    anchors = torch.tensor([[0, 3, 8], [5, 6, 9]])
    expected = drafter(slots, drafter.read_context(states), anchors)
    monkeypatch.setattr(attention, "_FlashAttention", None)
    drafter.attention = "dense"
    found = drafter(slots, drafter.read_context(states), anchors)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_right_within_its_rounding() -> None:
    sizes = {"S": 2, "A": 9, "B": 8, "C": 8, "K": 3, "G": 3, "D": 64, "T": 70}
    tensors, anchors_SA = draw(sizes, 3)
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in tensors]
    exact_tensors = [tensor.detach().double().requires_grad_() for tensor in low]
    exact, found = attend_slowly(exact_tensors, anchors_SA), attend(low, Sight(anchors_SA))
    gradient = torch.randn(exact.shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    expected = torch.autograd.grad(exact, exact_tensors, gradient.double())
    gradients = torch.autograd.grad(found, low, gradient)
    for one, other in zip((found, *gradients), (exact, *expected), strict=True):
        assert float(((one.double() - other).norm() / other.norm()).detach()) < 0.01


@settings(max_examples=30)
@given(half=st.integers(1, 8), heads=st.integers(1, 3), position=st.integers(0, 5000), seed=st.integers(0, 2**31))
def test_pairs_turn_by_the_formulas_angles_and_their_gradients_turn_back(
    half: int, heads: int, position: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    vectors, gradient = (torch.randn(2, heads, 2 * half, generator=generator) for _ in range(2))
    vectors.requires_grad_()
    positions = torch.tensor([position, position + 1])
    rotated = rotate(vectors, rotary_table(positions, 2 * half, 10_000.0))
    rotated.backward(gradient)
    assert vectors.grad is not None
    for p in range(2):
        for i in range(half):
            angle = float(positions[p]) * 10_000.0 ** (-i / half)
            turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
            pair = vectors.detach()[p, :, [i, i + half]] @ turn.T
            back = gradient[p, :, [i, i + half]] @ turn
            torch.testing.assert_close(rotated.detach()[p, :, [i, i + half]], pair, rtol=1e-3, atol=2e-3)
            torch.testing.assert_close(vectors.grad[p, :, [i, i + half]], back, rtol=1e-3, atol=2e-3)
