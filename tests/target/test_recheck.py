"""Caches with the faults that peers' users met, made on purpose; and honest caches that must pass."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dflash_cache.cache.index import commit_fragment
from dflash_cache.cache.layout import Manifest, shard_name, shard_path, write_manifest
from dflash_cache.cache.reader import CacheReader
from dflash_cache.cache.shards import ShardWriter
from dflash_cache.config.dtypes import Codec, Dtype
from dflash_cache.config.settings import TargetSettings
from dflash_cache.errors import TargetError
from dflash_cache.target.capture import capture_states
from dflash_cache.target.load import Target, load_target
from dflash_cache.target.recheck import TOLERANCES, Recheck, recheck

LAYERS = (0, 2, 5)
LENGTHS = (7, 19, 12, 30, 3)


def load(folder: Path, dtype: Dtype = "float32") -> Target:
    return load_target(TargetSettings(model=str(folder), dtype=dtype, device="cpu", layer_ids=LAYERS))


def make_ids() -> Tensor:
    """(S, T) int64, padded with 0."""
    ids = torch.randint(4, 120, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    for s, length in enumerate(LENGTHS):
        ids[s, length:] = 0
    return ids


def write_cache(
    folder: Path, target: Target, states_STLH: Tensor, dtype: Dtype = "float32", codec: Codec = "raw"
) -> Path:
    """A cache of these states, its manifest that of `target`."""
    H = target.config.hidden_size
    names = ("tokenizer_fingerprint", "template_fingerprint", "mask_rule", "data_fingerprint", "tool_version")
    manifest = Manifest(
        target_model="-", target_revision=None, target_fingerprint=target.fingerprint, layer_ids=LAYERS,
        target_num_layers=len(target.layers), hidden_size=H, vocab_size=128, dtype=dtype, codec=codec,
        bucket_bounds=(64,), max_length=64, num_samples=len(LENGTHS), order_seed=0, **dict.fromkeys(names, "-"),
    )  # fmt: skip
    write_manifest(folder, manifest)
    with ShardWriter(shard_path(folder, 0, 0), 0, manifest.states) as writer:
        placed = [
            writer.append(ids[:n], torch.ones(n, dtype=torch.bool), states[:n])
            for ids, states, n in zip(make_ids(), states_STLH, LENGTHS, strict=True)
        ]
        writer.commit()
    count = len(LENGTHS)
    table = {
        "sample": range(count), "bucket": [0] * count, "shard": [shard_name(0, 0)] * count,
        "row": [row for row, _ in placed], "length": LENGTHS, "loss_tokens": LENGTHS,
        "checksum": pa.array([checksum for _, checksum in placed], pa.uint64()), "job": [0] * count,
    }  # fmt: skip
    commit_fragment(folder, pa.table({name: pa.array(column) for name, column in table.items()}), "a")
    return folder


def states_of(target: Target, layer_ids: tuple[int, ...] = LAYERS) -> Tensor:
    """States of all samples, as one padded batch gives them."""
    return capture_states(replace(target, layer_ids=layer_ids), make_ids(), torch.tensor(LENGTHS)).clone()


def run(cache: Path, target: Target, count: int = len(LENGTHS)) -> Recheck:
    with CacheReader(cache) as reader:
        return recheck(reader, target, count, 0, lambda done, total: None)


def reasons(found: Recheck, layer_id: int) -> set[str]:
    return {fault.reason for fault in found.faults if fault.layer_id == layer_id}


def test_states_of_a_padded_batch_pass_in_every_family(tmp_path: Path, family_folder: Path) -> None:
    target = load(family_folder)
    found = run(write_cache(tmp_path, target, states_of(target)), target)
    assert found.is_right
    assert found.head_agreement == 1.0
    assert found.num_tokens == sum(LENGTHS)
    assert [layer.layer_id for layer in found.layers] == list(LAYERS)
    assert all(layer.least_cosine > 0.99999 and layer.largest_difference < 1e-3 for layer in found.layers)


@pytest.mark.parametrize("other", ["float32", "bfloat16"])
def test_bfloat16_states_pass_though_their_rounding_is_another(
    tmp_path: Path, llama_folder: Path, other: Dtype
) -> None:
    target = load(llama_folder, "bfloat16")
    states = states_of(load(llama_folder, other)).bfloat16()
    found = run(write_cache(tmp_path, target, states, "bfloat16"), target)
    assert found.is_right
    assert all(layer.mean_cosine > 0.999 for layer in found.layers)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("other", ["float32", "bfloat16"])
def test_coded_states_pass_and_their_figures_show_what_the_codec_costs(
    tmp_path: Path, llama_folder: Path, other: Dtype, codec: Codec
) -> None:
    target = load(llama_folder, "bfloat16")
    states = states_of(load(llama_folder, other)).bfloat16()
    found = run(write_cache(tmp_path, target, states, "bfloat16", codec), target)
    assert found.is_right
    coded = [layer.relative_difference for layer in found.layers]
    assert all(difference < (0.03 if codec == "int8" else 0.2) for difference in coded)
    if codec == "int4":
        assert all(difference > 0.04 for difference in coded)  # more than the dtype's own rounding may be


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_faults_of_coded_states_are_found_too(tmp_path: Path, llama_folder: Path, codec: Codec) -> None:
    target = load(llama_folder)
    states = states_of(target)
    shifted = run(write_cache(tmp_path / "layer", target, states_of(target, (1, 3, 4)), codec=codec), target)
    assert reasons(shifted, 2) == {"they are the output of layer 3: shifted by 1 layer"}
    zeroed = states.clone()
    zeroed[:, :, 1] = 0
    found = run(write_cache(tmp_path / "zero", target, zeroed, codec=codec), target)
    assert reasons(found, 2) == {f"{length} of {length} tokens are zero" for length in LENGTHS}
    for s, length in enumerate(LENGTHS):
        states[s, :length] = states[s, :length].roll(1, 0)
    rolled = run(write_cache(tmp_path / "token", target, states, codec=codec), target)
    assert "each token has the states of the one 1 token before it" in reasons(rolled, 5)


def test_the_figures_are_those_of_the_plain_formulas(tmp_path: Path, llama_folder: Path) -> None:
    target = load(llama_folder)
    own = states_of(target)
    noise = 3e-4 * torch.randn(own.shape, generator=torch.Generator().manual_seed(2))
    found = run(write_cache(tmp_path, target, own + noise), target)
    assert found.is_right
    valid = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    for place, layer in enumerate(found.layers):
        a, b = (own + noise)[valid][:, place].double(), own[valid][:, place].double()
        cosine = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
        assert layer.mean_cosine == pytest.approx(float(cosine.mean()), abs=1e-6)
        assert layer.least_cosine == pytest.approx(float(cosine.min()), abs=1e-6)
        assert layer.largest_difference == pytest.approx(float((a - b).abs().max()), rel=1e-2)
        relative = (a - b).norm(dim=-1) / b.norm(dim=-1)
        assert layer.relative_difference == pytest.approx(float(relative.median()), rel=0.02)


@pytest.mark.parametrize("shift", [1, -1])
def test_layers_shifted_by_one_are_named(tmp_path: Path, llama_folder: Path, shift: int) -> None:
    target = load(llama_folder)
    wrong = tuple(max(0, min(5, layer + shift)) for layer in LAYERS)
    found = run(write_cache(tmp_path, target, states_of(target, wrong)), target)
    assert reasons(found, 2) == {f"they are the output of layer {2 + shift}: shifted by 1 layer"}
    assert {fault.sample for fault in found.faults} == set(range(len(LENGTHS)))


def test_a_shift_is_found_where_a_layer_changes_less_than_the_tolerance(tmp_path: Path, llama_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(0.005)
    shutil.copytree(llama_folder, tmp_path / "calm")
    model.save_pretrained(tmp_path / "calm")
    target = load(tmp_path / "calm", "bfloat16")
    shifted = run(write_cache(tmp_path / "shifted", target, states_of(target, (1, 3, 4)), "bfloat16"), target)
    assert max(layer.relative_difference for layer in shifted.layers) < TOLERANCES["bfloat16"]
    assert reasons(shifted, 2) == {"they are the output of layer 3: shifted by 1 layer"}
    assert reasons(shifted, 5) == {"they are the output of layer 4: shifted by 1 layer"}
    assert run(write_cache(tmp_path / "honest", target, states_of(target), "bfloat16"), target).is_right


def test_a_target_of_another_shape_is_refused(tmp_path: Path, llama_folder: Path) -> None:
    target = load(llama_folder)
    cache = write_cache(tmp_path, target, states_of(target))
    with CacheReader(cache) as reader:
        other = replace(reader.manifest, target_num_layers=9)
    write_manifest(cache, other)
    with pytest.raises(TargetError, match="a target of 9 layers of 32, this one has 6 of 32"):
        run(cache, target)


def test_the_usual_shift_of_hidden_states_by_the_embeddings_is_named(tmp_path: Path, llama_folder: Path) -> None:
    target = load(llama_folder)
    output = target.model(make_ids(), output_hidden_states=True)
    states = torch.stack([output.hidden_states[layer] for layer in LAYERS], dim=2)  # entry k is before layer k
    found = run(write_cache(tmp_path, target, states), target)
    assert reasons(found, 0) == {"they are the embeddings, before layer 0: shifted by 1 layer"}
    assert reasons(found, 5) == {"they are the output of layer 4: shifted by 1 layer"}


@pytest.mark.parametrize(("shift", "where"), [(1, "before"), (-1, "after"), (2, "before")])
def test_tokens_that_are_shifted_are_named(tmp_path: Path, llama_folder: Path, shift: int, where: str) -> None:
    target = load(llama_folder)
    states = states_of(target)
    for s, length in enumerate(LENGTHS):
        states[s, :length] = states[s, :length].roll(shift, 0)
    found = run(write_cache(tmp_path, target, states), target)
    tokens = "1 token" if abs(shift) == 1 else "2 tokens"
    for layer_id in LAYERS:
        assert f"each token has the states of the one {tokens} {where} it" in reasons(found, layer_id)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_neox"])
def test_the_last_state_after_the_final_norm_is_named(
    tmp_path: Path, save_family: Callable[[str], Path], family: str
) -> None:
    target = load(save_family(family))
    states = states_of(target)
    for s, length in enumerate(LENGTHS):
        states[s, :length, 2] = target.model.get_decoder()(make_ids()[s : s + 1, :length]).last_hidden_state[0]
    found = run(write_cache(tmp_path, target, states), target)
    assert reasons(found, 5) == {"they are after the final norm instead of before it"}
    assert {fault.layer_id for fault in found.faults} == {5}


def test_a_zeroed_layer_and_zeroed_tokens_are_named(tmp_path: Path, llama_folder: Path) -> None:
    target = load(llama_folder)
    states = states_of(target)
    states[:, :, 1] = 0
    states[3, 25:30, 0] = 0
    found = run(write_cache(tmp_path, target, states), target)
    assert reasons(found, 2) == {f"{length} of {length} tokens are zero" for length in LENGTHS}
    assert reasons(found, 0) == {"5 of 30 tokens are zero"}


def test_a_few_tokens_of_something_else_are_counted(tmp_path: Path, llama_folder: Path) -> None:
    target = load(llama_folder)
    states = states_of(target)
    states[3, 4:7, 1] *= -1
    found = run(write_cache(tmp_path, target, states), target)
    assert [(fault.sample, fault.layer_id, fault.reason) for fault in found.faults] == [
        (3, 2, "3 of 30 tokens are not the target's")
    ]


def test_another_revision_is_found_by_its_states_and_by_its_fingerprint(tmp_path: Path, llama_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():  # a mild fine-tuning: one in a hundred
            size = 0.01 * weight.norm() / weight.numel() ** 0.5
            weight.add_(size * torch.randn(weight.shape, generator=generator))
    shutil.copytree(llama_folder, tmp_path / "revision")
    model.save_pretrained(tmp_path / "revision")
    target, revision = load(llama_folder), load(tmp_path / "revision")
    cache = write_cache(tmp_path / "cache", target, states_of(revision))
    found = run(cache, target)
    assert found.other_target is None
    assert not found.is_right
    assert {fault.layer_id for fault in found.faults} == set(LAYERS)
    assert all("another target or another revision" in fault.reason for fault in found.faults)
    honest = run(cache, revision)
    assert honest.faults == []
    assert not honest.is_right
    assert honest.other_target is not None
    assert "fingerprint" in honest.other_target


def test_a_random_part_is_taken_without_repeats(tmp_path: Path, llama_folder: Path) -> None:
    target = load(llama_folder)
    found = run(write_cache(tmp_path, target, states_of(target)), target, 3)
    assert len(set(found.samples)) == 3
    assert found.num_tokens == sum(np.array(LENGTHS)[found.samples])
