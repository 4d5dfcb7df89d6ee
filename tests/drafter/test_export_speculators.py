"""What we export for vLLM's speculators: keys and tensors here, and what that library itself makes of them.

The library lives in an environment of its own (`make speculators`, or SPECULATORS_PYTHON names its interpreter).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_cache.config.settings import DrafterSettings, TargetSettings
from dflash_cache.drafter.export import expected_tensors, export_zlab, read_export
from dflash_cache.drafter.export_speculators import export_speculators
from dflash_cache.drafter.frozen import load_frozen
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.shape import shape_from_target
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.errors import RunError

PYTHON = Path(os.environ.get("SPECULATORS_PYTHON", Path(sys.prefix) / ".speculators" / "bin" / "python"))
CLIENT = Path(__file__).with_name("speculators_client.py")
LAYER_IDS = (0, 2, 4)


def make_drafter(folder: Path, layer_ids: tuple[int, ...] = LAYER_IDS, **settings: object) -> Drafter:
    """Random, no norm all ones, block size 5, mask token 127."""
    config = TargetFiles(TargetSettings(model=str(folder))).load_config()
    wanted = DrafterSettings.model_validate({"num_layers": 2, "block_size": 5, **settings})
    drafter = Drafter(shape_from_target(config, wanted, layer_ids, 127))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.dim() == 1))
    return drafter.eval()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_tensors_are_the_drafters_alone_in_the_dtype_that_was_asked_for(llama_folder, dtype, tmp_path) -> None:
    drafter = make_drafter(llama_folder)
    export_speculators(drafter, TargetSettings(model=str(llama_folder)), tmp_path / "out", dtype)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected_tensors(drafter.shape)
    for name, tensor in drafter.state_dict().items():
        assert found[name].dtype == getattr(torch, dtype), name
        assert torch.equal(found[name], tensor.to(getattr(torch, dtype))), name


def test_reading_it_back_is_refused_by_the_formats_name(llama_folder: Path, tmp_path: Path) -> None:
    export_speculators(make_drafter(llama_folder), TargetSettings(model=str(llama_folder)), tmp_path / "out", "float32")
    with pytest.raises(RunError, match=r"in speculators' format, which is written and not read"):
        read_export(tmp_path / "out")


def test_the_config_counts_layers_from_one_and_names_the_target(llama_folder: Path, tmp_path: Path) -> None:
    export_speculators(
        make_drafter(llama_folder), TargetSettings(model=str(llama_folder)), tmp_path / "out", "bfloat16"
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    layers = config.pop("transformer_layer_config")
    assert config.pop("speculators_config") == {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        ],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": str(llama_folder.resolve())},
    }
    assert config == {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [1, 3, 5],
        "block_size": 5,
        "draft_vocab_size": 128,
        "dtype": "bfloat16",
        "mask_token_id": 127,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,  # vLLM would make full layers causal
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
    }
    assert (layers["model_type"], layers["layer_types"]) == ("qwen3", ["full_attention"] * 2)
    assert (layers["hidden_size"], layers["head_dim"], layers["num_hidden_layers"]) == (32, 8, 2)
    assert not layers.keys() & {"dflash_config", "block_size", "auto_map", "num_target_layers"}


def refusal(drafter: Drafter, target: Path, out: Path) -> str:
    """What is said to an export that writes nothing."""
    with pytest.raises(RunError) as caught:
        export_speculators(drafter, TargetSettings(model=str(target)), out, "float32")
    assert not out.exists()
    return str(caught.value)


def test_a_drafter_that_reads_the_targets_last_layer_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    drafter = make_drafter(llama_folder, layer_ids=(0, 5))
    assert refusal(drafter, llama_folder, tmp_path / "out") == (
        "speculators' format cannot name the target's last layer (5), which this drafter reads: export it with "
        "--format zlab."
    )


def test_a_drafter_of_a_target_that_scales_its_embeddings_is_refused(save_family, tmp_path: Path) -> None:
    folder = save_family("gemma3")
    assert refusal(make_drafter(folder), folder, tmp_path / "out") == (
        "speculators does not scale embeddings, and this drafter's target does (by 5.65685): export it with "
        "--format zlab."
    )


def alter(folder: Path, copy: Path, config: dict[str, object], **tensors: torch.Tensor) -> Path:
    """A copy of the target with more in its config, and more tensors."""
    shutil.copytree(folder, copy)
    written = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(written | config))
    save_file(load_file(copy / "model.safetensors") | tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize(
    ("config", "has_bias", "what"),
    [
        ({"logits_scaling": 8.0}, False, "multiplies by 0.125"),
        ({"final_logit_softcapping": 30.0}, False, "caps at 30"),
        ({}, True, "adds a bias"),
        (
            {"logit_scale": 0.3, "final_logit_softcapping": 15.0},
            True,
            "adds a bias and multiplies by 0.3 and caps at 15",
        ),
    ],
)
def test_a_drafter_whose_targets_head_is_more_than_a_matrix_is_refused(
    llama_folder: Path, tmp_path: Path, config: dict[str, object], has_bias: bool, what: str
) -> None:
    tensors = {"lm_head.bias": torch.ones(128)} if has_bias else {}
    folder = alter(llama_folder, tmp_path / "target", config, **tensors)
    assert refusal(make_drafter(llama_folder), folder, tmp_path / "out") == (  # whatever the drafter recorded
        "speculators takes a target's logits for its states times a matrix, and the head of this drafter's target "
        f"{what}: export it with --format zlab."
    )


def test_a_drafter_whose_target_names_its_embedding_and_head_otherwise_is_refused(save_family, tmp_path: Path) -> None:
    folder = save_family("gpt_neox")
    assert refusal(make_drafter(folder), folder, tmp_path / "out") == (
        "speculators looks for a target's embedding and head under names that end in embed_tokens.weight and "
        "lm_head.weight, and this drafter's target has them as gpt_neox.embed_in.weight and embed_out.weight: export "
        "it with --format zlab."
    )


def test_a_drafter_with_sliding_and_full_layers_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    drafter = make_drafter(llama_folder, layer_types=["sliding_attention", "full_attention"], sliding_window=9)
    assert refusal(drafter, llama_folder, tmp_path / "out") == (
        "vLLM takes all layers of speculators' format for causal if one is, and this drafter has sliding layers beside "
        "full ones: export it with --format zlab, which it serves as well."
    )


@pytest.mark.skipif(
    not PYTHON.exists(),
    reason="vLLM's speculators is missing, whose packages are not ours: `make speculators` gives it an environment",
)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("qwen3", {}),
        # so long that it cuts nothing, for its far end is another there (`sight`): the block is causal, alike
        ("llama", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 14}),
    ],
)
def test_speculators_gives_our_draft_logits_and_converts_zlabs_form_into_ours(
    save_family, family, settings, tmp_path
) -> None:
    folder = save_family(family)
    drafter = make_drafter(folder, **settings)
    ours, zlab, converted = tmp_path / "ours", tmp_path / "zlab", tmp_path / "converted"
    export_speculators(drafter, TargetSettings(model=str(folder)), ours, "float32")
    export_zlab(drafter, zlab, "float32")
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 120, (1, 20), generator=generator)
    states = torch.randn(1, 20, len(LAYER_IDS), 32, generator=generator)
    torch.save({"ids": ids, "states": states, "anchor": 9}, tmp_path / "inputs.pt")
    paths = [ours, tmp_path / "inputs.pt", tmp_path / "outputs.pt", zlab, folder, converted]
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([PYTHON, CLIENT, *paths], capture_output=True, text=True, check=False, env=clean)
    assert done.returncode == 0, done.stderr

    frozen = load_frozen(TargetFiles(TargetSettings(model=str(folder))), 1.0, torch.float32, torch.device("cpu"))
    anchors = torch.tensor([[9]])
    with torch.inference_mode():
        embedded = frozen.embed_blocks(ids[:, 9:10], drafter.shape)
        normed = drafter(embedded, drafter.read_context(states), anchors)
        logits = normed[0, 0] @ frozen.head_VH.T
    assert logits.std() > 0.1
    torch.testing.assert_close(torch.load(tmp_path / "outputs.pt")["logits"], logits, rtol=1e-4, atol=1e-4)

    one, other = load_file(ours / "model.safetensors"), load_file(converted / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    config, theirs = (json.loads((path / "config.json").read_text()) for path in (ours, converted))
    for tree in (config, theirs):
        tree.pop("transformer_layer_config")  # theirs leaves out what is transformers' default
        tree["speculators_config"]["verifier"].pop("name_or_path")  # ours is made absolute
    assert config.pop("sliding_window_non_causal") == (not settings)  # theirs is always false
    assert config == {key: theirs[key] for key in config}
