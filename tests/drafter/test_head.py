"""Heads with a bias, a scale and a cap: logits, loss, statistics and gradients against autograd through torch's own."""

from functools import partial

import pytest
import torch
from drafter.test_confidence import UNIFORM, random_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_cache.config.settings import ObjectiveSettings
from dflash_cache.drafter import chunk as chunk_module
from dflash_cache.drafter.chunk import Extra
from dflash_cache.drafter.head import Head, transform_logits
from dflash_cache.drafter.loss import block_loss
from dflash_cache.drafter.objective import weigh_slots

HEADS = st.fixed_dictionaries(
    {
        "biased": st.booleans(),
        "scale": st.sampled_from([1.0, 0.0625, 2.5]),
        "softcap": st.sampled_from([None, 6.0, 30.0]),
        "seed": st.integers(0, 10_000),
    }
)


def make_head(biased: bool, scale: float, softcap: float | None, seed: int) -> Head:
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(9, 6, generator=generator), torch.randn(9, generator=generator)
    return Head(weight, bias if biased else None, scale, softcap)


def slow_logits(states: Tensor, head: Head) -> Tensor:
    bias = None if head.bias_V is None else head.bias_V.double()
    logits = F.linear(states, head.weight_VH.double(), bias) * head.scale
    return logits if head.softcap is None else torch.tanh(logits / head.softcap) * head.softcap


@settings(max_examples=60)
@given(made=HEADS, cap_weight=st.sampled_from([0.0, 0.5]), size=st.sampled_from([0.3, 1.0, 2.0]))
def test_loss_and_gradient_equal_autograd_of_cross_entropy_and_entropy(made, cap_weight, size) -> None:
    head, blocks = make_head(**made), random_blocks(made["seed"])
    states = torch.randn(1, 5, 4, 6, generator=torch.Generator().manual_seed(made["seed"] + 1)) * size
    fast, slow = states.clone().requires_grad_(), states.double().requires_grad_()
    found = block_loss(fast, blocks, head, UNIFORM, extra=Extra(cap_weight=cap_weight))

    logits = slow_logits(slow[0, :, 1:][blocks.mask_SAK[0]], head)
    labels = blocks.labels_SAK[0][blocks.mask_SAK[0]]
    right = logits.argmax(-1) == labels
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    expected = F.cross_entropy(logits, labels, reduction="sum") + cap_weight * entropies[right].sum()
    assert float(found.loss_sum.detach()) == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-4)
    found.loss_sum.backward()
    expected.backward()
    scale = max(1.0, float(slow.grad.abs().max()))
    torch.testing.assert_close(fast.grad.double(), slow.grad, rtol=1e-4, atol=1e-5 * scale)
    assert int(found.correct_NK.sum()) == int(right.sum())
    ce = F.cross_entropy(logits, labels, reduction="none").detach()
    torch.testing.assert_close(found.ce_NK[found.mask_NK].double(), ce, rtol=1e-4, atol=1e-4)


@settings(max_examples=30)
@given(made=HEADS)
def test_filled_logits_are_the_formulas_and_have_the_plain_products_argmax(made) -> None:
    head = make_head(**made)
    states = torch.randn(11, 6, generator=torch.Generator().manual_seed(made["seed"] + 1))
    found = torch.empty(11, 9)
    head.fill_logits(states, found, found)
    torch.testing.assert_close(found.double(), slow_logits(states.double(), head), rtol=1e-5, atol=1e-5)
    product = F.linear(states, head.weight_VH, head.bias_V)
    torch.testing.assert_close(transform_logits(product, head.scale, head.softcap), found, rtol=1e-5, atol=1e-5)
    highest = product.argmax(-1, keepdim=True)
    assert bool((found.gather(1, highest)[:, 0] == found.amax(-1)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_and_the_heads_dtype_change_nothing_but_rounding(dtype: torch.dtype, monkeypatch) -> None:
    made = make_head(True, 2.5, 5.0, 7)
    head = Head(made.weight_VH.to(dtype), made.bias_V.to(dtype), made.scale, made.softcap)
    states, blocks = torch.randn(1, 5, 4, 6, generator=torch.Generator().manual_seed(8)), random_blocks(8)
    weigh = partial(weigh_slots, settings=ObjectiveSettings(weights="dpace"))
    results = []
    for chunk, each in ((10**9, head), (1, head), (10**9, made)):
        monkeypatch.setattr(chunk_module, "LONG_LOGITS", chunk)
        leaf = states.clone().requires_grad_()
        loss = block_loss(leaf, blocks, each, weigh).loss_sum
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2], rtol=0.05, atol=0.05)


def count_passes(head: Head) -> int:
    """Operations of a loss that give a tensor of at least the logits' size; a few rows more are computed at times."""
    states, blocks = torch.randn(1, 5, 4, 6).requires_grad_(), random_blocks(8)
    size = int(blocks.mask_SAK.sum()) * len(head.weight_VH)
    sizes: list[int] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            outs = out if isinstance(out, tuple) else (out,)
            sizes.extend(each.numel() for each in outs if isinstance(each, Tensor))
            return out

    block_loss(states, blocks, head, UNIFORM)  # what is kept from call to call is there
    with Count():
        block_loss(states, blocks, head, UNIFORM)
    return sum(each >= size for each in sizes)


def test_a_scale_and_a_bias_cost_no_pass_over_the_logits_and_a_cap_is_paid_for_where_there_is_one() -> None:
    weight, bias = torch.randn(31, 6), torch.randn(31)
    plain = count_passes(Head(weight))
    assert count_passes(Head(weight, bias, 0.5)) == plain
    assert count_passes(Head(weight, softcap=3.0)) > plain
