"""The drafter's loss and gradients against the plain, slow reference."""

from functools import partial

import numpy as np
import pytest
import torch
from drafter.reference import block_terms, sample_logits, weights
from drafter.tiny_drafter import TINY, make_drafter
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cache.config.settings import ObjectiveSettings
from dflash_cache.drafter import model as model_module
from dflash_cache.drafter import pieces
from dflash_cache.drafter.anchors import draw_anchors, make_blocks, pad_anchors
from dflash_cache.drafter.chunk import Extra, LongWay, ShortWay
from dflash_cache.drafter.frozen import FrozenTarget
from dflash_cache.drafter.head import Head
from dflash_cache.drafter.loss import BlockLoss, block_loss
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.objective import gamma_of, weigh_slots
from dflash_cache.drafter.shape import FULL, SLIDING

KINDS = ("uniform", "decay", "streak", "dpace")


def make_samples(lengths: list[int], seed: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Ids, mask with holes, states of each sample."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in lengths:
        ids = torch.randint(0, 39, (length,), generator=generator)
        mask = torch.rand(length, generator=generator) > 0.2
        samples.append((ids, mask, torch.randn(length, 3, 16, generator=generator)))
    return samples


def frozen(seed: int = 5) -> FrozenTarget:
    generator = torch.Generator().manual_seed(seed)
    return FrozenTarget(
        torch.randn(40, 16, generator=generator), Head(torch.randn(40, 16, generator=generator)), embedding_scale=1.0
    )


def fast_loss(drafter: Drafter, samples, anchors: list[np.ndarray], objective: ObjectiveSettings) -> BlockLoss:
    S, T = len(samples), max(len(ids) for ids, _, _ in samples)
    ids_ST = torch.zeros(S, T, dtype=torch.int64)
    mask_ST = torch.zeros(S, T, dtype=torch.bool)
    states_STLH = torch.zeros(S, T, 3, 16)
    for s, (ids, mask, states) in enumerate(samples):
        ids_ST[s, : len(ids)], mask_ST[s, : len(ids)], states_STLH[s, : len(ids)] = ids, mask, states
    blocks = make_blocks(ids_ST, mask_ST, pad_anchors(anchors), drafter.shape.block_size)
    target = frozen()
    slots = target.embed_blocks(blocks.tokens_SA, drafter.shape)
    context = drafter.read_context(states_STLH, anchors_SA=blocks.anchors_SA)
    out = drafter(slots, context, blocks.anchors_SA, objective.max_slots)
    return block_loss(out, blocks, target.head_VH, partial(weigh_slots, settings=objective), objective.max_slots)


def slow_loss(drafter: Drafter, samples, anchors: list[np.ndarray], objective: ObjectiveSettings):
    """Weighted sum and weight sum, in float64."""
    w = dict(drafter.named_parameters())
    target = frozen()
    alpha = objective.streak_alpha if objective.weights == "streak" else objective.dpace_alpha
    gamma = gamma_of(objective, drafter.shape.block_size)
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for (ids, mask, states), positions in zip(samples, anchors, strict=True):
        if not len(positions):
            continue
        normed = sample_logits(w, drafter.shape, states.double(), ids, positions.tolist(), target.embedding_VH.double())
        logits = normed @ target.head_VH.double().T
        for a, anchor in enumerate(positions.tolist()):
            terms = block_terms(logits[a], ids.tolist(), mask.tolist(), anchor)[: objective.max_slots]
            factors = weights(objective.weights, [float(term) for term in terms], gamma, alpha)
            total = total + sum(f * term for f, term in zip(factors, terms, strict=True))
            weight += sum(factors)
    return total, weight


@st.composite
def changes_of_shape(draw: st.DrawFn) -> dict[str, object]:
    """A block size, and which of two layers slide."""
    block_size = draw(st.integers(2, 6))
    types = tuple(draw(st.sampled_from([FULL, SLIDING])) for _ in range(2))
    window = block_size + draw(st.integers(0, 6)) if SLIDING in types else None
    return {"block_size": block_size, "layer_types": types, "sliding_window": window}


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(2, 17), min_size=1, max_size=3),
    kind=st.sampled_from(KINDS),
    count=st.integers(1, 9),
    changes=changes_of_shape(),
    max_slots=st.none() | st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_loss_and_gradients_equal_the_slow_reference(lengths, kind, count, changes, max_slots, seed) -> None:
    objective = ObjectiveSettings(weights=kind, max_slots=max_slots)
    samples = make_samples(lengths, seed)
    anchors = [draw_anchors(mask.numpy(), count, (seed, 0, s)) for s, (_, mask, _) in enumerate(samples)]
    fast, slow = make_drafter(seed, **changes), make_drafter(seed, **changes).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "_WHOLE", (1, 4, 64)[seed % 3])
        found = fast_loss(fast, samples, anchors, objective)
    expected, weight = slow_loss(slow, samples, anchors, objective)
    assert float(found.weight_sum) == pytest.approx(weight, rel=1e-5, abs=1e-6)
    assert float(found.loss_sum) == pytest.approx(float(expected), rel=1e-5, abs=1e-5)
    if weight == 0:
        return
    (found.loss_sum / weight).backward()
    (expected / weight).backward()
    for (name, one), other in zip(fast.named_parameters(), slow.parameters(), strict=True):
        assert one.grad is not None, name
        scale = max(1.0, float(other.grad.abs().max()))
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-5, atol=1e-5 * scale, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_the_head_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = make_samples([17, 9], 3)
    anchors = [draw_anchors(mask.numpy(), 8, (0, 0, s)) for s, (_, mask, _) in enumerate(samples)]
    results = []
    for rows, piece in ((560, 8192), (1, 1), (10, 7)):
        monkeypatch.setattr(pieces, "FEW_ROWS", rows)
        monkeypatch.setattr(pieces, "FEW_PIECE", piece)
        drafter = make_drafter()
        loss = fast_loss(drafter, samples, anchors, ObjectiveSettings(weights=kind))
        loss.loss_sum.backward()
        results.append((loss, drafter.fc.weight.grad))
    (one, gradient), *others = results
    for other, other_gradient in others:
        torch.testing.assert_close(one.loss_sum, other.loss_sum)
        torch.testing.assert_close(gradient, other_gradient, rtol=1e-5, atol=1e-5)
        assert torch.equal(one.correct_NK, other.correct_NK)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
def test_the_short_way_gives_what_the_long_way_gives(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(5)
    states_RH, weight_VH, bias_V = (torch.randn(*shape, generator=generator) for shape in ((30, 16), (50, 16), (50,)))
    head = Head(weight_VH.to(dtype), bias_V.to(dtype), scale=0.7)
    labels_R, weights_R = torch.randint(50, (30,), generator=generator), torch.rand(30, generator=generator)
    everything = torch.ones(5, 6, dtype=torch.bool)
    short, long = ShortWay(head, everything, True), LongWay(head, 6, Extra(), True)
    one, other = (way.read(states_RH, labels_R, labels_R) for way in (short, long))
    torch.testing.assert_close(one.ce_R, other.ce_R, rtol=tolerance, atol=tolerance)
    assert torch.equal(one.correct_R, other.correct_R)
    gradients = [way.pull_back(weights_R).float() for way in (short, long)]
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=2 * tolerance)


def test_accumulated_micro_batches_have_the_gradient_of_one_large_batch() -> None:
    samples = make_samples([17, 5, 11, 3, 14], 4)
    anchors = [draw_anchors(mask.numpy(), 6, (0, 0, s)) for s, (_, mask, _) in enumerate(samples)]
    objective = ObjectiveSettings(weights="streak")
    whole, parts = make_drafter(), make_drafter()
    loss = fast_loss(whole, samples, anchors, objective)
    (loss.loss_sum / loss.weight_sum).backward()
    weight_sum = torch.zeros(())
    for part in (slice(0, 1), slice(1, 4), slice(4, 5)):
        loss = fast_loss(parts, samples[part], anchors[part], objective)
        loss.loss_sum.backward()
        weight_sum += loss.weight_sum
    for (name, one), other in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad / weight_sum, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["uniform", "decay", "streak"])
def test_slots_beyond_max_slots_add_nothing_and_the_others_are_unchanged(kind: str) -> None:
    drafter = make_drafter(block_size=6)
    samples = make_samples([30, 12], 3)
    anchors = [draw_anchors(mask.numpy(), 10, (0, 0, s)) for s, (_, mask, _) in enumerate(samples)]
    whole = fast_loss(drafter, samples, anchors, ObjectiveSettings(weights=kind))
    part = fast_loss(drafter, samples, anchors, ObjectiveSettings(weights=kind, max_slots=2))
    assert bool(whole.mask_NK[:, 2:].any())
    assert not bool(part.mask_NK[:, 2:].any())
    torch.testing.assert_close(part.ce_NK[:, :2], whole.ce_NK[:, :2])
    assert torch.equal(part.correct_NK[:, :2], whole.correct_NK[:, :2])
    weights_NK = weigh_slots(whole.ce_NK, whole.mask_NK, ObjectiveSettings(weights=kind))[:, :2]
    assert float(part.loss_sum) == pytest.approx(float((weights_NK * whole.ce_NK[:, :2]).sum()), rel=1e-5)
    assert float(part.weight_sum) == pytest.approx(float(weights_NK.sum()), rel=1e-5)


def test_statistics_name_the_argmax_and_leave_unsupervised_slots_at_zero() -> None:
    samples = make_samples([12], 8)
    anchors = [draw_anchors(samples[0][1].numpy(), 5, (1, 0, 0))]
    drafter = make_drafter()
    loss = fast_loss(drafter, samples, anchors, ObjectiveSettings())
    w = {name: p.detach().double() for name, p in drafter.named_parameters()}
    ids, mask, states = samples[0]
    target = frozen()
    normed = sample_logits(w, TINY, states.double(), ids, anchors[0].tolist(), target.embedding_VH.double())
    logits = normed @ target.head_VH.double().T
    for row, anchor in enumerate(anchors[0].tolist()):
        terms = block_terms(logits[row], ids.tolist(), mask.tolist(), anchor)
        n = len(terms)
        assert loss.mask_NK[row].tolist() == [True] * n + [False] * (3 - n)
        right = [int(logits[row, k].argmax()) == int(ids[anchor + k]) for k in range(1, n + 1)]
        assert loss.correct_NK[row].tolist() == right + [False] * (3 - n)
        assert loss.ce_NK[row].tolist() == pytest.approx([float(t) for t in terms] + [0.0] * (3 - n), rel=1e-4)
