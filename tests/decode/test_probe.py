"""A target whose cache does not take back rejected drafts, or is not known to, is refused before it is measured."""

from pathlib import Path

import pytest
from conftest import save_tokenizer
from decode.families import PROMPTS, build_family
from transformers import AutoModelForCausalLM, LlamaConfig, cache_utils

from dflash_cache.config.settings import EvalSettings, TargetSettings
from dflash_cache.decode.evaluate import answer_plainly, evaluate
from dflash_cache.decode.past import Past, check_layers
from dflash_cache.decode.probe import Probe, check_probe, probe_target
from dflash_cache.decode.prompts import Question
from dflash_cache.errors import TargetError
from dflash_cache.target.load import Target, load_target

QUESTIONS = [Question(prompt, "any", number) for number, prompt in enumerate(PROMPTS)]


def load_as(dtype: str, folder: Path) -> Target:
    return load_target(TargetSettings(model=str(folder), dtype=dtype, device="cpu", layer_ids=(0, 2, 4)))


@pytest.mark.parametrize("name", ["qwen3.5", "mixtral"])
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.03), ("float16", 0.005)])
def test_rounding_to_16_bits_is_no_fault_and_a_fault_is_found_in_spite_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, most: float
) -> None:
    target = load_as(dtype, build_family(name, tmp_path).folder)
    found = probe_target(target, QUESTIONS, 1)
    assert max(found.difference, found.rounding) < most
    monkeypatch.setattr(Past, "go_back", Past.cut)
    if name == "mixtral":
        monkeypatch.setattr(Past, "cut", lambda *_: None)
    with pytest.raises(TargetError, match=f"and more than rounding in {dtype} does"):
        probe_target(target, QUESTIONS, 1)


def test_what_rounding_does_not_explain_is_refused_with_the_figures(llama: Target) -> None:
    check_probe(Probe(9e-5, 0.0, 26), llama)
    check_probe(Probe(3e-3, 1e-3, 26), llama)
    with pytest.raises(TargetError, match=r"rejected drafts .*\(0.005 of their size .* not 0.001\): drafts would"):
        check_probe(Probe(5e-3, 1e-3, 26), llama)
    with pytest.raises(TargetError, match=r"\(llama\) gives other logits with a cache than without \(0.38 of"):
        check_probe(Probe(0.3, 0.38, 26), llama)


class StrangeLayer(cache_utils.DynamicLayer):
    """A layer of a kind that a model may bring along."""


def test_a_cache_layer_of_an_unknown_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", StrangeLayer)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    target = load_as("float32", tmp_path)
    for refuse in (check_layers, lambda target: probe_target(target, QUESTIONS, 1)):
        with pytest.raises(
            TargetError, match=r"\(llama\) has layers from whose cache .* \(StrangeLayer\): use another"
        ):
            refuse(target)


def test_an_evaluation_counts_what_was_read_again_in_each_category(tmp_path: Path) -> None:
    family = build_family("qwen3.5", tmp_path)
    settings = EvalSettings(max_new_tokens=10)
    questions = [Question(prompt, name, 0) for prompt, name in zip(PROMPTS, "aabb", strict=True)]
    plain = answer_plainly(family.target, questions, settings, lambda _: None)
    decoded = []
    result = evaluate(family.target, family.drafter, questions, plain, settings, decoded.append)
    assert (result.overall.lossless, result.probe) == (True, None)
    assert result.overall.reread_tokens == sum(one.reread_tokens for one in decoded) > 0
    for name in ("reread_tokens", "extra_passes"):
        assert getattr(result.overall, name) == sum(getattr(one, name) for one in result.categories.values())
    assert not any(one.reread_tokens or one.extra_passes for one in plain)
