"""cap_lambda's term: the entropy of the slots that are right already, and its gradient, against autograd."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_cache.config.settings import ObjectiveSettings
from dflash_cache.drafter import chunk as chunk_module
from dflash_cache.drafter.anchors import Blocks
from dflash_cache.drafter.chunk import Extra
from dflash_cache.drafter.loss import block_loss
from dflash_cache.drafter.objective import weigh_slots

UNIFORM = partial(weigh_slots, settings=ObjectiveSettings(weights="uniform"))


def random_blocks(seed: int, num_blocks: int = 5, num_slots: int = 3, vocab_size: int = 9) -> Blocks:
    """One sample's blocks, each supervised up to a slot of its own; the first one is whole."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, vocab_size, (1, num_blocks, num_slots), generator=generator)
    ends = torch.randint(0, num_slots + 1, (1, num_blocks, 1), generator=generator)
    ends[0, 0] = num_slots
    zeros = torch.zeros(1, num_blocks, dtype=torch.int64)
    return Blocks(zeros, zeros, labels, torch.arange(num_slots) < ends)


def slow_entropies(states_SABH: Tensor, blocks: Blocks, head_VH: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Cross-entropies of all supervised slots, and entropies of those whose argmax is the label, one at a time."""
    terms, entropies = [], []
    for a, mask in enumerate(blocks.mask_SAK[0].tolist()):
        for k, supervised in enumerate(mask):
            if not supervised:
                continue
            logits = head_VH @ states_SABH[0, a, k + 1]
            label = int(blocks.labels_SAK[0, a, k])
            p = torch.softmax(logits, 0)
            terms.append(-torch.log(p[label]))
            if int(logits.argmax()) == label:
                entropies.append(-(p * torch.log(p)).sum())
    return terms, entropies


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000), cap_weight=st.sampled_from([0.25, 1.0, 3.0]), scale=st.sampled_from([0.3, 1.0, 3.0])
)
def test_the_term_and_its_gradient_equal_autograd_through_the_formula(seed, cap_weight, scale) -> None:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(1, 5, 4, 6, generator=generator) * scale
    head = torch.randn(9, 6, generator=generator)
    blocks = random_blocks(seed)
    fast, slow = states.clone().requires_grad_(), states.double().requires_grad_()
    found = block_loss(fast, blocks, head, UNIFORM, extra=Extra(cap_weight=cap_weight))
    terms, entropies = slow_entropies(slow, blocks, head.double())
    expected = torch.stack(terms).sum() + cap_weight * sum(entropies)
    assert float(found.loss_sum.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert int(found.correct_NK.sum()) == len(entropies)
    found.loss_sum.backward()
    expected.backward()
    torch.testing.assert_close(fast.grad.double(), slow.grad, rtol=1e-4, atol=1e-5)


def test_some_of_these_slots_are_right_and_a_weight_of_zero_adds_nothing() -> None:
    generator = torch.Generator().manual_seed(2)
    states, head = torch.randn(1, 5, 4, 6, generator=generator), torch.randn(9, 6, generator=generator)
    blocks = random_blocks(2)
    blocks.labels_SAK[0, :, 0] = (states[0, :, 1] @ head.T).argmax(1)  # the first slots are right
    plain = block_loss(states, blocks, head, UNIFORM)
    terms, entropies = slow_entropies(states, blocks, head)
    assert len(terms) > len(entropies) > 0
    assert float(plain.loss_sum) == pytest.approx(float(sum(terms)), rel=1e-5)
    with_term = block_loss(states, blocks, head, UNIFORM, extra=Extra(cap_weight=2.0))
    assert float(with_term.loss_sum - plain.loss_sum) == pytest.approx(2.0 * float(sum(entropies)), rel=1e-4)


def test_a_token_without_any_probability_adds_neither_entropy_nor_a_bad_gradient() -> None:
    states = torch.tensor([[[[0.0], [1.0]]]]).requires_grad_()
    head = torch.tensor([[1000.0], [0.0], [-1000.0]])
    blocks = Blocks(*(torch.zeros(1, 1, dtype=torch.int64),) * 2, torch.tensor([[[0]]]), torch.ones(1, 1, 1).bool())
    found = block_loss(states, blocks, head, UNIFORM, extra=Extra(cap_weight=1.0))
    found.loss_sum.backward()
    assert float(found.loss_sum.detach()) == pytest.approx(0.0, abs=1e-20)
    assert states.grad.flatten().tolist() == pytest.approx([0.0, 0.0], abs=1e-20)


def test_chunks_of_the_head_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(4)
    states, head = torch.randn(1, 5, 4, 6, generator=generator), torch.randn(9, 6, generator=generator)
    blocks = random_blocks(4)
    blocks.labels_SAK[0, :, 0] = (states[0, :, 1] @ head.T).argmax(1)
    results = []
    for chunk in (10**9, 1):
        monkeypatch.setattr(chunk_module, "LONG_LOGITS", chunk)
        leaf = states.clone().requires_grad_()
        loss = block_loss(leaf, blocks, head, UNIFORM, extra=Extra(cap_weight=0.7)).loss_sum
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(results[0], results[1])
