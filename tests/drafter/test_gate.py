import pytest
import torch

from dflash_cache.drafter.gate import gate


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_values_and_gradients_are_those_of_the_formula(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(2)
    gates, states, gradient = (3 * torch.randn(3, 5, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    low_gates, low_states = (x.to(dtype).requires_grad_() for x in (gates, states))
    gated = gate(low_gates, low_states)
    gated.backward(gradient.to(dtype))

    exact_gates, exact_states = (x.detach().double().requires_grad_() for x in (low_gates, low_states))
    exact = exact_gates / (1 + torch.exp(-exact_gates)) * exact_states
    exact.backward(gradient.to(dtype).double())
    pairs = [(gated, exact), (low_gates.grad, exact_gates.grad), (low_states.grad, exact_states.grad)]
    for found, expected in pairs:
        assert found.dtype == dtype
        assert float((found.double() - expected).norm() / expected.norm()) < tolerance
