"""The frozen embedding and head, read by name, against those of the model that transformers builds."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafter.tiny_drafter import TINY
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from dflash_cache.config.settings import TargetSettings
from dflash_cache.drafter.family import embedding_scale_of
from dflash_cache.drafter.frozen import FrozenTarget, load_frozen
from dflash_cache.drafter.head import Head
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.errors import TargetError

CPU = torch.device("cpu")


def read(folder: Path, dtype: torch.dtype = torch.float32) -> FrozenTarget:
    files = TargetFiles(TargetSettings(model=str(folder)))
    return load_frozen(files, embedding_scale_of(files.load_config()), dtype, CPU)


def build(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def altered(folder: Path, copy: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """A copy of the target whose tensors went through `change`."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    save_file(change(tensors), copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def refusal(folder: Path) -> str:
    with pytest.raises(TargetError) as caught:
        read(folder)
    return str(caught.value)


def test_embedding_and_head_of_every_family_are_the_models_own(family_folder: Path) -> None:
    frozen, model = read(family_folder), build(family_folder)
    assert torch.equal(frozen.embedding_VH, model.get_input_embeddings().weight)
    assert torch.equal(frozen.head_VH, model.get_output_embeddings().weight)


def test_an_untied_targets_head_is_another_tensor_than_its_embedding(llama_folder: Path) -> None:
    frozen = read(llama_folder)
    assert not torch.equal(frozen.head_VH, frozen.embedding_VH)


def test_a_tied_targets_head_is_its_embedding_and_takes_no_memory_of_its_own(
    save_family: Callable[[str], Path],
) -> None:
    frozen = read(save_family("qwen3"))
    assert frozen.head_VH.data_ptr() == frozen.embedding_VH.data_ptr()


def test_a_tied_target_whose_file_repeats_the_embedding_as_head_is_read_as_tied(
    save_family: Callable[[str], Path], tmp_path: Path
) -> None:
    def repeat(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    folder = altered(save_family("qwen3"), tmp_path / "copy", repeat)
    assert torch.equal(read(folder).head_VH, build(folder).get_output_embeddings().weight)


def test_a_target_that_says_tied_but_has_a_head_of_its_own_has_the_models_head(
    save_family: Callable[[str], Path], tmp_path: Path
) -> None:
    def untie(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**tensors, "lm_head.weight": torch.ones(128, 32)}

    folder = altered(save_family("qwen3"), tmp_path / "copy", untie)
    assert torch.equal(read(folder).head_VH, build(folder).get_output_embeddings().weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedded_tokens_equal_the_output_of_the_models_embedding(family_folder: Path, dtype: torch.dtype) -> None:
    ids = torch.arange(128).view(4, 32)
    with torch.no_grad():
        expected = build(family_folder, dtype).get_input_embeddings()(ids)
    embedded = read(family_folder, dtype).embed(ids)
    assert embedded.dtype == dtype
    assert torch.equal(embedded, expected)


def test_gemma_scales_its_embeddings_by_the_root_of_the_hidden_size(save_family: Callable[[str], Path]) -> None:
    frozen = read(save_family("gemma3"))
    assert frozen.embedding_scale == pytest.approx(32**0.5)
    ids = torch.tensor([3, 60])
    torch.testing.assert_close(frozen.embed(ids), frozen.embedding_VH[ids] * 32**0.5)


def test_head_times_final_state_are_the_models_logits(llama_folder: Path) -> None:
    frozen, model = read(llama_folder), build(llama_folder)
    with torch.no_grad():
        ids = torch.tensor([[1, 9, 30, 77]])
        normed = model.model(ids).last_hidden_state
        assert torch.equal(normed @ frozen.head_VH.T, model(ids).logits)


def test_a_bias_of_the_head_is_read_and_its_matrix_alone_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    folder = altered(llama_folder, tmp_path / "copy", lambda t: {**t, "lm_head.bias": torch.arange(128.0)})
    frozen = read(folder)
    assert torch.equal(frozen.head.bias_V, torch.arange(128.0))
    with pytest.raises(TargetError) as caught:
        _ = frozen.head_VH
    assert str(caught.value) == (
        "The target's head is more than a matrix (scale 1, softcap None, a bias), which is not reproduced here: use "
        "another target."
    )


def test_an_embedding_of_an_unknown_name_is_told_with_the_names_looked_for(llama_folder: Path, tmp_path: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.replace("embed_tokens", "words"): tensor for name, tensor in tensors.items()}

    told = refusal(altered(llama_folder, tmp_path / "copy", rename))
    assert told.startswith("The target's embedding is not found by name (looked for model.embed_tokens.weight, ")


def test_slots_are_the_anchors_token_then_masks() -> None:
    table = torch.arange(80.0).view(40, 2)
    frozen = FrozenTarget(table, Head(table), embedding_scale=1.0)
    slots = frozen.embed_blocks(torch.tensor([[7, 0, 39]]), TINY)
    assert slots.shape == (1, 3, 4, 2)
    for a, token in enumerate((7, 0, 39)):
        assert slots[0, a].tolist() == [table[i].tolist() for i in (token, 39, 39, 39)]
