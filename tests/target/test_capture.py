from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_cache.config.dtypes import Dtype
from dflash_cache.config.settings import TargetSettings
from dflash_cache.errors import TargetError
from dflash_cache.target.capture import capture_states
from dflash_cache.target.load import Target, load_target, text_model

LAYER_IDS = (0, 2, 4)
DEEPEST = 5


def load(folder: Path, layer_ids: tuple[int, ...] = LAYER_IDS, dtype: Dtype = "float32") -> Target:
    return load_target(TargetSettings(model=str(folder), dtype=dtype, device="cpu", layer_ids=layer_ids))


def draw_ids(*shape: int) -> Tensor:
    return torch.randint(4, 128, shape, generator=torch.Generator().manual_seed(1))


def forward_plainly(target: Target, ids_1T: Tensor) -> tuple[Tensor, ...]:
    with torch.inference_mode():
        states: tuple[Tensor, ...] = target.model(input_ids=ids_1T, output_hidden_states=True).hidden_states
        return states


def expected_states(target: Target, ids_1T: Tensor) -> Tensor:
    states = forward_plainly(target, ids_1T)
    return torch.stack([states[k + 1] for k in target.layer_ids], dim=2)


def test_one_sample_equals_a_plain_forward_to_the_bit(family_folder: Path) -> None:
    target = load(family_folder)
    ids_1T = draw_ids(1, 23)
    states_1TLH = capture_states(target, ids_1T, torch.tensor([23]))
    assert states_1TLH.shape == (1, 23, 3, 32)
    assert states_1TLH.dtype == torch.float32
    assert torch.equal(states_1TLH, expected_states(target, ids_1T))


def test_the_last_layer_is_captured_before_the_final_norm(family_folder: Path) -> None:
    target = load(family_folder, (1, DEEPEST))
    ids_1T = draw_ids(1, 17)
    states_1TLH = capture_states(target, ids_1T, torch.tensor([17]))
    body = text_model(target.model)
    norm = body.final_layer_norm if hasattr(body, "final_layer_norm") else body.norm
    normed_last = forward_plainly(target, ids_1T)[-1]
    assert not torch.equal(states_1TLH[:, :, 1], normed_last)
    assert torch.equal(norm(states_1TLH[:, :, 1]), normed_last)


def test_padded_samples_equal_their_own_forward_and_padding_is_zero(family_folder: Path) -> None:
    target = load(family_folder)
    lengths = [19, 1, 26, 8]
    ids_ST = draw_ids(4, 26)
    states_STLH = capture_states(target, ids_ST, torch.tensor(lengths))
    for sample, length in enumerate(lengths):
        expected_TLH = expected_states(target, ids_ST[sample : sample + 1, :length])[0]
        torch.testing.assert_close(states_STLH[sample, :length], expected_TLH, rtol=1e-5, atol=1e-5)
        assert not states_STLH[sample, length:].any()


def test_what_the_padding_holds_does_not_matter(family_folder: Path) -> None:
    target = load(family_folder)
    lengths_S = torch.tensor([20, 11])
    ids_ST = draw_ids(2, 20)
    other_ST = ids_ST.clone()
    other_ST[1, 11:] = 0
    assert torch.equal(capture_states(target, ids_ST, lengths_S), capture_states(target, other_ST, lengths_S))


def test_nothing_above_the_deepest_captured_layer_runs_and_no_hook_stays(family_folder: Path) -> None:
    target = load(family_folder, (1, 3))
    ran: list[str] = []
    names = {module: name for name, module in target.model.named_modules()}
    probes = [
        module.register_forward_pre_hook(lambda module, inputs: ran.append(names[module]))
        for module in [*target.layers, target.model.get_output_embeddings()]
    ]
    capture_states(target, draw_ids(2, 9), torch.tensor([9, 9]))
    assert ran == [names[layer] for layer in target.layers[:4]]
    for probe in probes:
        probe.remove()
    assert not any(layer._forward_hooks for layer in target.layers)
    forward_plainly(target, draw_ids(1, 9))  # the next forward goes through


def test_a_forward_that_fails_leaves_no_hook(llama: Target) -> None:
    with pytest.raises(IndexError):
        capture_states(llama, torch.full((1, 4), 10_000), torch.tensor([4]))
    assert not any(layer._forward_hooks for layer in llama.layers)


def test_bfloat16_states_are_the_plain_forwards_to_the_bit(family_folder: Path) -> None:
    target = load(family_folder, dtype="bfloat16")
    ids_1T = draw_ids(1, 23)
    states_1TLH = capture_states(target, ids_1T, torch.tensor([23]))
    assert states_1TLH.dtype == torch.bfloat16
    assert torch.equal(states_1TLH, expected_states(target, ids_1T))


def test_states_of_another_length_than_the_tokens_are_refused(llama: Target) -> None:
    hook = llama.layers[2].register_forward_hook(lambda layer, inputs, output: output[:, :1])
    try:
        with pytest.raises(TargetError, match=r"gave states of shape \(2, 1, 32\) for \(2, 9, 32\)"):
            capture_states(llama, draw_ids(2, 9), torch.tensor([9, 9]))
    finally:
        hook.remove()
    assert not any(layer._forward_hooks for layer in llama.layers)


def test_a_layer_that_does_not_run_is_refused(llama: Target) -> None:
    layers = torch.nn.ModuleList([llama.layers[0], torch.nn.Linear(1, 1), *llama.layers[2:]])
    target = replace(llama, layers=layers, layer_ids=(0, 1, 4))
    with pytest.raises(TargetError, match=r"Layers \[1\] of the target did not run in its forward"):
        capture_states(target, draw_ids(2, 9), torch.tensor([9, 9]))
