"""Gradient checkpointing: the same bits, with less kept for the backward pass."""

import pytest
import torch
from drafter.tiny_drafter import make_drafter

from dflash_cache.drafter.shape import FULL, SLIDING


def run(recomputes: bool, dtype: torch.dtype) -> tuple[list[torch.Tensor], int]:
    """Output and all gradients of a pass in `dtype`, and the bytes that it kept for its backward pass."""
    drafter = make_drafter(num_layers=4, layer_types=(SLIDING, FULL) * 2, sliding_window=6)
    drafter.recomputes = recomputes
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, 40, 3, 16, generator=generator)
    slots = torch.randn(3, 9, 4, 16, generator=generator, requires_grad=True)
    anchors = torch.randint(40, (3, 9), generator=generator)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32),
    ):
        out = drafter(slots, drafter.read_context(states, anchors_SA=anchors), anchors, max_slots=2)
    out.float().square().sum().backward()
    return [out.detach(), slots.grad, *(each.grad for each in drafter.parameters())], sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_computed_twice_give_the_same_bits_and_keep_less(dtype: torch.dtype) -> None:
    (kept, kept_bytes), (recomputed, fewer_bytes) = run(False, dtype), run(True, dtype)
    assert all(torch.equal(one, other) for one, other in zip(kept, recomputed, strict=True))
    assert fewer_bytes < kept_bytes / 2


def test_a_pass_without_gradients_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter()
    drafter.recomputes = True
    monkeypatch.setattr("dflash_cache.drafter.model.checkpoint", None)  # is not even asked
    with torch.no_grad():
        drafter(torch.ones(1, 2, 4, 16), drafter.read_context(torch.ones(1, 5, 3, 16)), torch.tensor([[2, 3]]))
