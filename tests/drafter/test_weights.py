"""A target's files: read by name, fingerprinted, and told apart from what is missing or damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_cache.config.settings import TargetSettings
from dflash_cache.drafter.weights import INDEX, SINGLE, TargetFiles
from dflash_cache.errors import TargetError


def open_files(folder: Path) -> TargetFiles:
    return TargetFiles(TargetSettings(model=str(folder)))


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(TargetError) as caught:
        action()
    return str(caught.value)


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


@pytest.fixture
def copy(llama_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_folder, tmp_path / "copy"))


@pytest.fixture
def sharded(llama_folder: Path, tmp_path: Path) -> Path:
    """The same target in several files and an index, as transformers saves a large one."""
    folder = tmp_path / "sharded"
    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


def test_the_names_and_tensors_are_those_of_the_model(llama_folder: Path) -> None:
    files = open_files(llama_folder)
    expected = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32).state_dict()
    assert files.names == expected.keys()
    for name, tensor in files.read(files.names).items():
        assert torch.equal(tensor, expected[name]), name


def test_only_what_is_asked_for_is_read_and_in_the_files_dtype(copy: Path) -> None:
    tensors = load_file(copy / SINGLE)
    save(copy, {**tensors, "lm_head.weight": tensors["lm_head.weight"].bfloat16()})
    found = open_files(copy).read(["lm_head.weight"])
    assert list(found) == ["lm_head.weight"]
    assert found["lm_head.weight"].dtype == torch.bfloat16


def test_a_sharded_checkpoint_gives_the_tensors_of_the_single_file(llama_folder: Path, sharded: Path) -> None:
    one, other = open_files(llama_folder), open_files(sharded)
    assert one.names == other.names
    found = other.read(other.names)
    for name, tensor in one.read(one.names).items():
        assert torch.equal(found[name], tensor), name


def test_a_missing_shard_is_told_by_name_when_it_is_needed(sharded: Path) -> None:
    files = open_files(sharded)
    last = json.loads((sharded / INDEX).read_text())["weight_map"]["lm_head.weight"]
    (sharded / last).unlink()
    expected = f"The target {sharded} lacks its file {last}: fetch it again."
    assert refusal(lambda: files.read(["lm_head.weight"])) == expected
    assert refusal(files.fingerprint) == expected


def test_a_tensor_that_is_not_there_is_told(llama_folder: Path) -> None:
    assert refusal(lambda: open_files(llama_folder).read(["model.words.weight"])) == (
        f"The target {llama_folder} has no tensor model.words.weight; its family is not supported yet."
    )


def test_a_missing_folder_and_an_empty_one_are_no_target(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere" / "at" / "all"):
        assert refusal(lambda folder=folder: open_files(folder)) == (
            f"There is no target at {folder} (no config.json): name the folder of a transformers checkpoint, or a "
            "model on the Hub that can be reached."
        )


def test_a_target_without_safetensors_is_told_how_to_make_them(copy: Path) -> None:
    (copy / SINGLE).rename(copy / "pytorch_model.bin")
    assert refusal(lambda: open_files(copy)) == (
        f"The target {copy} has no weights in safetensors ({SINGLE} or {INDEX}): save it with `save_pretrained` first, "
        "or set target.allow_pickle if it has a pytorch_model.bin that you trust."
    )


@pytest.mark.parametrize("damage", ["empty", "half", "garbage"])
def test_damaged_weights_are_told(copy: Path, damage: str) -> None:
    data = (copy / SINGLE).read_bytes()
    (copy / SINGLE).write_bytes({"empty": b"", "half": data[: len(data) // 2], "garbage": b"\xff" * 500}[damage])
    told = refusal(lambda: open_files(copy))
    assert told.startswith(f"The weights {copy / SINGLE} are damaged (")
    assert told.endswith("): fetch them again.")


def test_a_config_that_transformers_does_not_know_is_told(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "never-heard-of"}))
    told = refusal(open_files(copy).load_config)
    assert told.startswith(f"The config of the target {copy} cannot be used (")
    assert "never-heard-of" in told
    assert "\n" not in told


def test_the_config_is_that_of_the_model(llama_folder: Path) -> None:
    config = open_files(llama_folder).load_config()
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("llama", 32, 6)


def test_the_fingerprint_is_the_same_for_a_copy_elsewhere(llama_folder: Path, copy: Path) -> None:
    fingerprint = open_files(llama_folder).fingerprint()
    assert fingerprint == open_files(copy).fingerprint()
    assert len(bytes.fromhex(fingerprint)) == 8


def test_the_fingerprint_does_not_see_the_configs_layout_the_tokenizer_or_other_files(copy: Path) -> None:
    before = open_files(copy).fingerprint()
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    (copy / "tokenizer.json").unlink()
    (copy / "README.md").write_text("words")
    (copy / SINGLE).touch()
    assert open_files(copy).fingerprint() == before


def test_the_fingerprint_sees_a_changed_config(copy: Path) -> None:
    before = open_files(copy).fingerprint()
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 2e-6}))
    assert open_files(copy).fingerprint() != before


@pytest.mark.parametrize("place", ["first byte", "middle", "last byte"])
def test_the_fingerprint_sees_a_flipped_bit_at_the_begin_the_middle_and_the_end(copy: Path, place: str) -> None:
    before = open_files(copy).fingerprint()
    data = bytearray((copy / SINGLE).read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    data[{"first byte": begin, "middle": len(data) // 2, "last byte": len(data) - 1}[place]] ^= 1
    (copy / SINGLE).write_bytes(data)
    assert open_files(copy).fingerprint() != before


def test_the_fingerprint_sees_another_training_of_the_same_model(copy: Path) -> None:
    before = open_files(copy).fingerprint()
    save(copy, {name: tensor * 1.001 for name, tensor in load_file(copy / SINGLE).items()})
    assert open_files(copy).fingerprint() != before


def test_the_fingerprint_sees_a_renamed_an_added_and_a_removed_tensor(copy: Path) -> None:
    tensors = load_file(copy / SINGLE)
    found = {open_files(copy).fingerprint()}
    renamed = {name.replace("layers.0.mlp.up_proj", "layers.0.mlp.up_prox"): t for name, t in tensors.items()}
    added = {**tensors, "extra": torch.zeros(3)}
    removed = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    for changed in (renamed, added, removed):
        save(copy, changed)
        found.add(open_files(copy).fingerprint())
    assert len(found) == 4


def test_the_fingerprint_sees_a_change_in_any_shard(sharded: Path) -> None:
    found = {open_files(sharded).fingerprint()}
    shards = sorted(sharded.glob("model-*.safetensors"))
    for shard in shards:
        data = shard.read_bytes()
        shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        found.add(open_files(sharded).fingerprint())
    assert len(found) == 1 + len(shards)


@pytest.mark.parametrize("victim", ["model-00001-of-", INDEX, "config.json"])
def test_damaged_files_of_a_sharded_target_are_told(sharded: Path, victim: str) -> None:
    (path,) = (path for path in sharded.iterdir() if path.name.startswith(victim))
    path.write_bytes(path.read_bytes()[:50])

    def use() -> None:
        files = open_files(sharded)
        files.fingerprint()
        files.read(files.names)

    assert "damaged" in refusal(use)
