"""Distillation: the teacher is the target itself, and the loss and its gradient are autograd's through the formula."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from drafter.test_confidence import UNIFORM, random_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dflash_cache.config.settings import TargetSettings
from dflash_cache.drafter import chunk as chunk_module
from dflash_cache.drafter.anchors import Blocks, make_blocks, pad_anchors
from dflash_cache.drafter.chunk import Extra, SoftLabels
from dflash_cache.drafter.frozen import load_frozen
from dflash_cache.drafter.head import Head
from dflash_cache.drafter.loss import block_loss
from dflash_cache.drafter.teacher import Teacher, load_teacher
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.target.capture import capture_states
from dflash_cache.target.load import load_target

CPU = torch.device("cpu")


def edit_config(folder: Path, tmp_path: Path, **changes: object) -> Path:
    copy = tmp_path / "edited"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def read_teacher(folder: Path) -> tuple[Tensor, Tensor]:
    """Logits of the target's own forward, and of the teacher from the last layer's cached output."""
    settings = TargetSettings(model=str(folder), dtype="float32", device="cpu", layer_ids=(1,), store_last_hidden=True)
    target, files = load_target(settings), TargetFiles(settings)
    ids = torch.randint(4, 100, (1, 12), generator=torch.Generator().manual_seed(0))
    last_TH = capture_states(target, ids, torch.tensor([12]))[0, :, -1].clone()
    head = load_frozen(files, 1.0, torch.float32, CPU).head
    logits_TV = torch.empty(12, len(head.weight_VH))
    head.fill_logits(load_teacher(files, torch.float32, CPU).normalize(last_TH), logits_TV, logits_TV)
    return target.model(input_ids=ids).logits[0].detach(), logits_TV


def test_the_teachers_logits_are_the_targets_own_in_every_family(family_folder: Path) -> None:
    own, found = read_teacher(family_folder)
    torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)


def test_a_softcap_of_the_targets_logits_is_the_teachers_too(save_family, tmp_path: Path) -> None:
    plain, _ = read_teacher(save_family("gemma3"))
    own, found = read_teacher(edit_config(save_family("gemma3"), tmp_path, final_logit_softcapping=0.5))
    torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)
    assert float(own.abs().max()) <= 0.5 < float(plain.abs().max())


def test_a_factor_of_the_targets_logits_is_the_teachers_too(save_family, tmp_path: Path) -> None:
    plain, _ = read_teacher(save_family("cohere2"))
    own, found = read_teacher(edit_config(save_family("cohere2"), tmp_path, logit_scale=3.0))
    torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own, plain * 3.0 / 0.0625)


def random_teacher(seed: int) -> Teacher:
    norm = nn.RMSNorm(6, eps=1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(6, generator=torch.Generator().manual_seed(seed)) + 0.5)
    return Teacher(norm.requires_grad_(False))


def placed_blocks(seed: int) -> tuple[Blocks, Tensor]:
    """Blocks of two samples of nine tokens, at anchors of their own, and last states (S, T, H)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 9, (2, 9), generator=generator)
    mask = torch.rand(2, 9, generator=generator) > 0.15
    mask[:, :4] = True
    anchors = [torch.tensor(row).numpy() for row in ([0, 2, 5], [1, 7])]
    return make_blocks(ids, mask, pad_anchors(anchors), 4), torch.randn(2, 9, 6, generator=generator)


def slow_logits(state: Tensor, head: Head) -> Tensor:
    """The head's logits of one state, in float64."""
    logits = head.weight_VH.double() @ state + (0 if head.bias_V is None else head.bias_V.double())
    logits = logits * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def slow_loss(states: Tensor, blocks: Blocks, head: Head, last_STH: Tensor, teacher: Teacher, share: float) -> Tensor:
    """Σ (1 − share) · cross-entropy + share · Σ_v q_v · (log q_v − log p_v), slot by slot, with uniform weights."""
    eps, norm = teacher.norm.eps, teacher.norm.weight.double()
    total = torch.zeros((), dtype=torch.float64)
    for s, a, k in blocks.mask_SAK.nonzero().tolist():
        log_p = torch.log_softmax(slow_logits(states[s, a, k + 1], head), 0)
        last = last_STH[s, int(blocks.anchors_SA[s, a]) + k].double()  # the label is one token further
        q = torch.softmax(slow_logits(last / torch.sqrt((last * last).mean() + eps) * norm, head), 0)
        divergence = (q * (torch.log(q) - log_p)).sum()
        total = total + (1 - share) * -log_p[int(blocks.labels_SAK[s, a, k])] + share * divergence
    return total


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    biased=st.booleans(),
    scale=st.sampled_from([1.0, 0.0625, 3.0]),
    softcap=st.sampled_from([None, 2.0]),
)
def test_the_loss_and_its_gradient_equal_autograd_through_the_formula(seed, share, biased, scale, softcap) -> None:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(2, 3, 4, 6, generator=generator)
    weight, bias = torch.randn(9, 6, generator=generator), torch.randn(9, generator=generator)
    head = Head(weight, bias if biased else None, scale, softcap)
    (blocks, last_STH), teacher = placed_blocks(seed), random_teacher(seed)
    fast, slow = states.clone().requires_grad_(), states.double().requires_grad_()
    extra = Extra(soft=SoftLabels(last_STH, teacher, share))
    found = block_loss(fast, blocks, head, UNIFORM, extra=extra)
    expected = slow_loss(slow, blocks, head, last_STH, teacher, share)
    assert float(found.loss_sum.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    found.loss_sum.backward()
    expected.backward()
    torch.testing.assert_close(fast.grad.double(), slow.grad, rtol=1e-4, atol=1e-5)
    plain = block_loss(states, blocks, head, UNIFORM)
    torch.testing.assert_close(found.ce_NK, plain.ce_NK)  # what is reported, and what weighs slots, are hard labels
    assert torch.equal(found.correct_NK, plain.correct_NK)


def test_a_drafter_that_has_the_targets_distribution_has_no_divergence_and_no_gradient() -> None:
    blocks, last_STH = placed_blocks(3)
    teacher, head = random_teacher(3), torch.randn(9, 6, generator=torch.Generator().manual_seed(3))
    own_STH = teacher.norm(last_STH)
    states = torch.zeros(2, 3, 4, 6)
    for s, a, k in blocks.mask_SAK.nonzero().tolist():
        states[s, a, k + 1] = own_STH[s, int(blocks.anchors_SA[s, a]) + k]
    states.requires_grad_()
    found = block_loss(states, blocks, head, UNIFORM, extra=Extra(soft=SoftLabels(last_STH, teacher, 1.0)))
    found.loss_sum.backward()
    assert float(found.loss_sum.detach()) == pytest.approx(0.0, abs=1e-5)
    assert float(states.grad.abs().max()) < 1e-6


def test_chunks_of_the_head_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, last_STH = placed_blocks(5)
    generator = torch.Generator().manual_seed(5)
    states, head = torch.randn(2, 3, 4, 6, generator=generator), torch.randn(9, 6, generator=generator)
    results = []
    for chunk in (10**9, 1):
        monkeypatch.setattr(chunk_module, "LONG_LOGITS", chunk)
        leaf = states.clone().requires_grad_()
        extra = Extra(cap_weight=0.5, soft=SoftLabels(last_STH, random_teacher(5), 0.4))
        loss = block_loss(leaf, blocks, head, UNIFORM, extra=extra).loss_sum
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(results[0], results[1])


def test_nothing_of_positions_times_vocabulary_outlives_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    V = 50_000
    monkeypatch.setattr(chunk_module, "LONG_LOGITS", 3 * V)  # one block a chunk
    blocks = random_blocks(1, num_blocks=40, vocab_size=9)
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(tensor.numel() for tensor in (out if isinstance(out, tuple) else (out,)))
            return out

    generator = torch.Generator().manual_seed(1)
    states = torch.randn(1, 40, 4, 6, generator=generator, requires_grad=True)
    head, last_STH = torch.randn(V, 6, generator=generator), torch.randn(1, 4, 6, generator=generator)
    saved: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with Watch(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block_loss(states, blocks, head, UNIFORM, extra=Extra(1.0, SoftLabels(last_STH, random_teacher(1), 0.5)))
    assert int(blocks.mask_SAK.sum()) * V > 2_000_000
    others = [size for size in sizes if size != head.numel()]
    assert max(others) == 3 * V  # of one chunk, whatever the number of blocks
    assert max(saved) <= states.numel()
