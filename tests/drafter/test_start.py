"""How a drafter starts, against the tensors in the target's file and the layers that transformers runs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dflash_cache.config.settings import DrafterSettings, TargetSettings
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.shape import shape_from_target
from dflash_cache.drafter.start import start_drafter
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.errors import ConfigError

LAYER_IDS = (0, 2, 4)


def start(folder: Path, seed: int = 0, **settings: object) -> Drafter:
    options = DrafterSettings.model_validate({"num_layers": 2, "block_size": 4, **settings})
    files = TargetFiles(TargetSettings(model=str(folder)))
    drafter = Drafter(shape_from_target(files.load_config(), options, LAYER_IDS, mask_token_id=127))
    start_drafter(drafter, options, files, seed)
    return drafter


def equal(one: Drafter, other: Drafter) -> bool:
    return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("num_layers", [1, 2, 6])
def test_target_layers_copies_exactly_the_last_layers(
    save_family: Callable[[str], Path], family: str, num_layers: int
) -> None:
    folder = save_family(family)
    found = start(folder, init="target-layers", num_layers=num_layers).state_dict()
    target = load_file(folder / "model.safetensors")
    first = 6 - num_layers
    for i in range(num_layers):
        prefix = f"model.layers.{first + i}."
        names = [name.removeprefix(prefix) for name in target if name.startswith(prefix)]
        assert len(names) == (9 if family == "llama" else 11)
        for name in names:
            assert torch.equal(found[f"layers.{i}.{name}"], target[prefix + name]), name
    assert torch.equal(found["norm.weight"], target["model.norm.weight"])
    assert torch.equal(found["hidden_norm.weight"], target[f"model.layers.{first}.input_layernorm.weight"])


def test_head_norms_that_the_target_lacks_start_at_one(llama_folder: Path) -> None:
    drafter = start(llama_folder, init="target-layers")
    for layer in drafter.layers:
        assert layer.self_attn.q_norm.weight.tolist() == [1.0] * 8
        assert layer.self_attn.k_norm.weight.tolist() == [1.0] * 8


def test_fc_passes_the_deepest_captured_layer_through(llama_folder: Path) -> None:
    drafter = start(llama_folder, init="target-layers")
    states_TLH = torch.randn(7, 3, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drafter.fc(states_TLH.flatten(-2)), states_TLH[:, -1])


def test_a_copied_layers_keys_of_the_context_are_the_targets_before_rope_and_norm(
    save_family: Callable[[str], Path],
) -> None:
    folder = save_family("qwen3")
    drafter = start(folder, init="target-layers", num_layers=1)
    layer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model.layers[5]
    states = torch.randn(1, 5, 3, 32, generator=torch.Generator().manual_seed(1))
    normed = layer.input_layernorm(states[:, :, -1])
    values = drafter.read_context(states)[0].values
    torch.testing.assert_close(values.flatten(-2), layer.self_attn.v_proj(normed))
    torch.testing.assert_close(
        drafter.layers[0].self_attn.k_proj(drafter.hidden_norm(drafter.fc(states.flatten(-2)))),
        layer.self_attn.k_proj(normed),
    )


@pytest.mark.parametrize("init", ["random", "target-layers"])
def test_the_same_seed_gives_the_same_weights(llama_folder: Path, init: str) -> None:
    one = start(llama_folder, init=init, seed=3)
    torch.manual_seed(99)  # the global generator has no part in it
    assert equal(one, start(llama_folder, init=init, seed=3))


def test_another_seed_gives_other_random_weights_and_copied_layers_need_no_seed(llama_folder: Path) -> None:
    assert not equal(start(llama_folder, seed=0), start(llama_folder, seed=1))
    copied = [start(llama_folder, init="target-layers", seed=seed) for seed in (0, 1)]
    assert equal(*copied)


def test_random_matrices_are_normal_with_the_shapes_deviation_and_norms_are_one(llama_folder: Path) -> None:
    for name, parameter in start(llama_folder, intermediate_size=500).state_dict().items():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            n = parameter.numel()
            assert abs(float(parameter.mean())) < 5 * 0.02 / n**0.5, name
            assert float(parameter.std()) == pytest.approx(0.02, rel=5 / (2 * n) ** 0.5), name


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        (
            {"intermediate_size": 50},
            "model.layers.4.mlp.gate_proj.weight (48, 32) into layers.0.mlp.gate_proj.weight (50, 32)",
        ),
        (
            {"head_dim": 16},
            "model.layers.4.self_attn.q_proj.weight (32, 32) into layers.0.self_attn.q_proj.weight (64, 32)",
        ),
    ],
)
def test_other_sizes_than_the_targets_cannot_be_copied_and_the_first_is_told(
    llama_folder: Path, settings: dict[str, int], sizes: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        start(llama_folder, init="target-layers", **settings)
    assert str(caught.value) == (
        f"drafter.init: target-layers cannot copy {sizes}: leave the drafter's sizes at the target's, or set "
        "drafter.init to random."
    )


@pytest.mark.parametrize(
    ("family", "described"),
    [
        ("gpt_neox", "gpt_neox's (activation gelu) are not"),
        ("gemma3", "(activation gelu_pytorch_tanh) are not"),
        ("mixtral", "mixtral's lack model.layers.4.mlp.down_proj.weight"),
    ],
)
def test_a_target_whose_layers_compute_otherwise_is_refused(save_family, family: str, described: str) -> None:
    with pytest.raises(ConfigError) as caught:
        start(save_family(family), init="target-layers")
    assert described in str(caught.value)
    assert str(caught.value).endswith("; set it to random.")
    start(save_family(family), init="random")


@pytest.mark.parametrize(
    ("family", "settings", "way"),
    [
        ("llama", {}, "target-layers"),
        ("qwen3", {}, "target-layers"),
        ("llama", {"intermediate_size": 50}, "random"),
        ("gemma3", {}, "random"),
        ("mixtral", {}, "random"),
        ("gpt_neox", {}, "random"),
    ],
)
def test_auto_copies_the_targets_layers_where_that_can_be_done_and_is_random_elsewhere(
    save_family: Callable[[str], Path], family: str, settings: dict[str, int], way: str
) -> None:
    folder = save_family(family)
    assert equal(start(folder, init="auto", **settings), start(folder, init=way, **settings))


def test_a_drafter_deeper_than_the_target_cannot_copy_and_is_told_so(llama_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"drafter\.num_layers"):
        start(llama_folder, init="target-layers", num_layers=7)
