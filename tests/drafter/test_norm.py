import pytest
import torch
from torch.nn import functional as F

from dflash_cache.drafter.norm import RMSNorm


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(1, 8), (3, 5, 24), (2, 3, 4, 64)])
def test_values_and_gradients_are_those_of_torchs_norm_in_double(dtype, tolerance, shape):
    torch.manual_seed(len(shape))
    norm = RMSNorm(shape[-1], 1e-5)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
    states = (3 * torch.randn(shape)).to(dtype).requires_grad_()
    gradient = torch.randn(shape).to(dtype)
    normed = norm(states)
    normed.backward(gradient)

    exact_states = states.detach().double().requires_grad_()
    exact_weight = norm.weight.detach().double().requires_grad_()
    exact = F.rms_norm(exact_states, shape[-1:], exact_weight, 1e-5)
    exact.backward(gradient.double())

    assert normed.dtype == dtype
    for found, expected in (
        (normed, exact),
        (states.grad, exact_states.grad),
        (norm.weight.grad, exact_weight.grad),
    ):
        assert float((found - expected).norm() / expected.norm()) < tolerance


def test_states_of_zero_stay_zero_and_finite():
    states = torch.zeros(2, 8, requires_grad=True)
    normed = RMSNorm(8, 1e-5)(states)
    normed.sum().backward()
    assert torch.equal(normed, torch.zeros(2, 8))
    # at zero the norm is x / sqrt(eps)
    torch.testing.assert_close(states.grad, torch.full((2, 8), 1e-5**-0.5))
