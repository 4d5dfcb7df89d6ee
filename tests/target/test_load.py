import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from dflash_cache.config.settings import TargetSettings
from dflash_cache.errors import ConfigError, DFlashError, TargetError
from dflash_cache.target.capture import capture_states
from dflash_cache.target.load import (
    find_decoder_layers,
    find_entry_device,
    load_target,
    load_target_config,
    load_tokenizer,
    stop_tokens,
    target_fingerprint,
)


def settings(folder: Path | str, **changes: object) -> TargetSettings:
    return TargetSettings.model_validate({"model": str(folder), "dtype": "float32", "device": "cpu", **changes})


def refusal(action: Callable[[], object], kind: type[DFlashError] = TargetError) -> str:
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


@pytest.fixture
def copy(llama_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_folder, tmp_path / "copy"))


def test_a_target_is_frozen_and_says_what_it_is(family_folder: Path) -> None:
    target = load_target(settings(family_folder, dtype="bfloat16", num_layers=3))
    assert not target.model.training
    assert {parameter.dtype for parameter in target.model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert (target.dtype, target.device) == (torch.bfloat16, torch.device("cpu"))
    assert target.layer_ids == (1, 2, 3)
    assert len(target.layers) == target.config.num_hidden_layers == 6
    assert target.fingerprint == target_fingerprint(settings(family_folder))


def test_the_config_and_the_tokenizer_are_had_without_the_weights(llama_folder: Path) -> None:
    assert load_target_config(settings(llama_folder)).hidden_size == 32
    tokenizer = load_tokenizer(settings(llama_folder))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "w1 w2"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|> user w1 w2 <|im_end|> <|im_start|> assistant "
    assert len(tokenizer(text)["input_ids"]) == 7


def test_stop_tokens_are_the_generation_configs_and_the_tokenizers(llama_folder: Path, copy: Path) -> None:
    assert stop_tokens(load_target(settings(llama_folder, num_layers=1))) == {2}
    path = copy / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [7, 9]}))
    assert stop_tokens(load_target(settings(copy, num_layers=1))) == {2, 7, 9}


def test_loading_draws_nothing_on_the_console(llama_folder: Path) -> None:
    code = (
        "from dflash_cache.target.load import load_target; from dflash_cache.config.settings import TargetSettings; "
        f"load_target(TargetSettings(model={str(llama_folder)!r}, device='cpu', num_layers=3))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout + result.stderr == ""


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "nothing" / "here"
    assert refusal(lambda: load_target(settings(folder))) == (
        f"There is no target at {folder} (no config.json): name the folder of a transformers checkpoint, or a model on "
        "the Hub that can be reached."
    )


def test_a_folder_without_a_tokenizer_is_refused(copy: Path) -> None:
    for path in copy.glob("tokenizer*"):
        path.unlink()
    message = refusal(lambda: load_tokenizer(settings(copy)))
    assert message.startswith(f"The tokenizer of the target {copy} cannot be used (")
    assert message.endswith("): put the tokenizer's files beside config.json.")
    assert "\n" not in message


def test_a_model_that_is_no_causal_lm_is_refused(copy: Path) -> None:
    config = T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=32, num_layers=6, num_heads=4)
    T5ForConditionalGeneration(config).save_pretrained(copy)
    assert refusal(lambda: load_target(settings(copy, num_layers=1))) == (
        "The target (t5) is an encoder-decoder, and a DFlash drafter drafts for causal language models: use a "
        "decoder-only target."
    )


def test_weights_that_do_not_fit_the_config_are_refused(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text()) | {"intermediate_size": 40}
    (copy / "config.json").write_text(json.dumps(config))
    message = refusal(lambda: load_target(settings(copy, num_layers=1)))
    assert message.startswith(f"The target {copy} cannot be loaded as a causal language model (")
    assert message.endswith("): use a complete checkpoint of a family that transformers knows.")
    assert "\n" not in message


def test_an_unknown_family_is_refused_and_its_code_is_not_run(copy: Path) -> None:
    (copy / "config.json").write_text(
        json.dumps({"model_type": "surprise", "auto_map": {"AutoConfig": "surprise.Surprise"}})
    )
    (copy / "surprise.py").write_text("raise SystemExit('this code was run')")
    message = refusal(lambda: load_target(settings(copy)))
    assert message.startswith(f"The config of the target {copy} cannot be used (")
    assert "\n" not in message


def test_a_checkpoint_that_lacks_tensors_is_refused_instead_of_filled_at_random(copy: Path) -> None:
    weights = copy / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, weights, {"format": "pt"})
    assert refusal(lambda: load_target(settings(copy, num_layers=1))) == (
        f"The target {copy} lacks 1 of its tensors (the first is model.layers.3.mlp.up_proj.weight): "
        "fetch the checkpoint again."
    )


def test_a_layer_that_does_not_exist_is_refused(llama_folder: Path) -> None:
    assert refusal(lambda: load_target(settings(llama_folder, layer_ids=(1, 6))), ConfigError) == (
        f"target.layer_ids names layer 6, but the target {llama_folder} has 6 layers: use ids from 0 to 5."
    )


def test_the_fingerprint_changes_with_one_bit_of_the_weights_or_one_entry_of_the_config(copy: Path) -> None:
    before = target_fingerprint(settings(copy))
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    after_bit = target_fingerprint(settings(copy))
    config = copy / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-3}))
    assert len({before, after_bit, target_fingerprint(settings(copy))}) == 3


def test_a_wrapped_models_text_layers_are_found_and_captured(llama_folder: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = Gemma3Config(
        text_config={**sizes, "vocab_size": 128, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
        vision_config={**sizes, "image_size": 32, "patch_size": 16},
        mm_tokens_per_image=4,
        image_token_id=127,
    )
    folder = Path(shutil.copytree(llama_folder, tmp_path / "wrapped"))
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    target = load_target(settings(folder, layer_ids=(0, 4)))
    assert isinstance(target.model, Gemma3ForConditionalGeneration)
    assert target.layers is target.model.model.language_model.layers
    ids_1T = torch.arange(5, 25)[None]
    with torch.inference_mode():
        states = target.model.model.language_model(ids_1T, output_hidden_states=True).hidden_states
    captured_1TLH = capture_states(target, ids_1T, torch.tensor([20]))
    assert torch.equal(captured_1TLH, torch.stack([states[1], states[5]], dim=2))


def fresh_model(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    return model


def test_lists_inside_a_layer_are_not_taken_for_the_layers(llama_folder: Path) -> None:
    model = fresh_model(llama_folder)
    layers = model.get_decoder().layers
    layers[2].experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(6))
    assert find_decoder_layers(model) is layers


def test_no_list_or_several_lists_of_layers_are_refused(llama_folder: Path) -> None:
    model = fresh_model(llama_folder)
    model.get_decoder().others = nn.ModuleList(nn.Linear(2, 2) for _ in range(6))
    assert refusal(lambda: find_decoder_layers(model)) == (
        "The target's model (LlamaForCausalLM) has 2 lists of 6 layers (layers, others) where its decoder layers "
        "should be: this family is not supported yet."
    )
    model = fresh_model(llama_folder)
    model.config.num_hidden_layers = 7
    assert refusal(lambda: find_decoder_layers(model)) == (
        "The target's model (LlamaForCausalLM) has no list of 7 layers where its decoder layers should be: "
        "this family is not supported yet."
    )


class LargestOperand(TorchDispatchMode):
    """Remembers how many elements the largest argument of any operation had, repeated ones counted."""

    num_elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        sizes = [argument.numel() for argument in args if isinstance(argument, torch.Tensor)]
        self.num_elements = max(self.num_elements, *sizes, 0)
        return function(*args, **(kwargs or {}))


def test_the_last_positions_logits_of_a_batch_cost_no_copy_of_the_head_a_row(llama_folder: Path) -> None:
    target = load_target(settings(llama_folder, num_layers=3))
    ids = torch.arange(16 * 6).reshape(16, 6) % 128
    with torch.no_grad(), LargestOperand() as largest:
        last = target.model(ids, logits_to_keep=1).logits
    every = target.model(ids).logits
    torch.testing.assert_close(last, every[:, -1:], rtol=0, atol=1e-5)
    assert 128 * 32 <= largest.num_elements < 16 * 128 * 32  # the head once, and not once a row


def test_a_target_with_a_device_map_gives_the_same_states(llama_folder: Path) -> None:
    ids_ST, lengths_S = torch.arange(4, 22).view(2, 9), torch.tensor([9, 6])
    plain, mapped = (
        load_target(settings(llama_folder, layer_ids=(0, 2, 4), device_map=name)) for name in (None, "auto")
    )
    assert mapped.device == mapped.layers[0].self_attn.q_proj.weight.device
    assert not any(parameter.requires_grad for parameter in mapped.model.parameters())
    assert torch.equal(capture_states(plain, ids_ST, lengths_S), capture_states(mapped, ids_ST, lengths_S))


def test_a_target_that_lies_partly_on_disk_gives_the_same_states_each_time(
    llama_folder: Path,
) -> None:
    ids_ST, lengths_S = torch.arange(4, 22).view(2, 9), torch.tensor([9, 6])
    plain, spread = (
        load_target(settings(llama_folder, layer_ids=(0, 2, 4), **spreading))
        for spreading in (
            {},
            {"device_map": "auto", "max_memory": {"cpu": "150KB"}},
        )
    )
    kinds = [next(layer.parameters()).device.type for layer in spread.layers]
    assert kinds[0] == "cpu"
    assert kinds[-1] == "meta"  # its weights come from the disk when it runs
    assert spread.device == torch.device("cpu")
    for _ in range(2):  # a forward ends by an exception after the deepest layer, and leaves nothing behind
        assert torch.equal(capture_states(plain, ids_ST, lengths_S), capture_states(spread, ids_ST, lengths_S))
        assert [next(layer.parameters()).device.type for layer in spread.layers] == kinds


def test_weights_that_lie_nowhere_are_no_device_to_gather_states_on(llama_folder: Path) -> None:
    model = load_target(settings(llama_folder, num_layers=3)).model
    model.get_decoder().layers[0].to("meta")
    model.get_decoder().embed_tokens.to("meta")
    assert model.device == torch.device("meta")
    assert find_entry_device(model) == torch.device("cpu")


def test_a_device_map_without_accelerate_is_refused_in_one_sentence(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_cache.target.load.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        load_target(settings(llama_folder, num_layers=3, device_map="auto"))
    assert str(caught.value) == (
        "target.device_map needs the package accelerate, which is not installed: run `pip install accelerate`, or set "
        "target.device_map to null."
    )
