"""Several prompts at once are answered as each would be by itself, whatever their lengths and paces."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from conftest import save_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from target.architectures import FAMILIES
from transformers import AutoModelForCausalLM, Llama4TextConfig

from dflash_cache.config.settings import DrafterSettings, EvalSettings, TargetSettings
from dflash_cache.decode.choice import Choice, Greedy, Sampling
from dflash_cache.decode.evaluate import answer_plainly, evaluate, plan_batches
from dflash_cache.decode.prompts import Question
from dflash_cache.decode.rows import check_batches
from dflash_cache.decode.speculate import Decoded, Limits, decode_plainly, decode_speculatively
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.shape import shape_from_target
from dflash_cache.drafter.start import start_drafter
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.errors import ConfigError
from dflash_cache.target.load import Target, load_target

PROMPTS = [[5, 9, 11], [*range(20, 57)], [99], [7, 7, 8, 30, 41, 2, 9, 10], [64, 12]]


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral"])
def pair(request: pytest.FixtureRequest, save_family) -> tuple[Target, Drafter]:
    """A target, and a drafter begun from its layers: right often enough that rows go on at different paces."""
    folder = save_family(request.param)
    return load(folder), begin_drafter(load(folder), folder)


def load(folder: Path) -> Target:
    return load_target(TargetSettings(model=str(folder), dtype="float32", device="cpu", layer_ids=(0, 2, 4)))


def begin_drafter(target: Target, folder: Path) -> Drafter:
    settings = DrafterSettings(num_layers=2, block_size=5, init="target-layers")
    drafter = Drafter(shape_from_target(target.config, settings, target.layer_ids, 127))
    start_drafter(drafter, settings, TargetFiles(TargetSettings(model=str(folder))), 0)
    return drafter.eval()


def facts(decoded: list[Decoded]) -> list[tuple[list[int], list[int]]]:
    return [(one.tokens, one.accepted) for one in decoded]


def alone(pair: tuple[Target, Drafter], limits: Limits, choices: list[Choice]) -> list[Decoded]:
    target, drafter = pair
    return [
        decode_speculatively(target, [prompt], limits, choice, drafter)[0]
        for prompt, choice in zip(PROMPTS, choices, strict=True)
    ]


def make_limits(target: Target) -> Limits:
    """Stop tokens that end some answers early: what two of them say in their middle."""
    plain = decode_plainly(target, PROMPTS, Limits(40, frozenset()), Greedy())
    return Limits(40, frozenset([plain[1].tokens[9], plain[3].tokens[17]]))


def test_a_batch_is_answered_and_accepted_as_its_prompts_are_alone(pair: tuple[Target, Drafter]) -> None:
    limits = make_limits(pair[0])
    expected = alone(pair, limits, [Greedy()] * 5)
    paces = {sum(one.accepted) / len(one.accepted) for one in expected if one.accepted}
    assert len(paces) > 2, "the prompts must differ in pace, or this tests nothing"
    assert len({len(one.tokens) for one in expected}) > 2
    found = decode_speculatively(pair[0], PROMPTS, limits, Greedy(), pair[1])
    assert facts(found) == facts(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.margins == pytest.approx(other.margins, abs=1e-4)


def test_a_batch_without_the_drafter_gives_what_its_prompts_get_alone(pair: tuple[Target, Drafter]) -> None:
    limits = Limits(30, frozenset([2, 17]))
    expected = [decode_plainly(pair[0], [prompt], limits, Greedy())[0] for prompt in PROMPTS]
    assert facts(decode_plainly(pair[0], PROMPTS, limits, Greedy())) == facts(expected)


def test_drawn_answers_do_not_depend_on_the_batch_either(pair: tuple[Target, Drafter]) -> None:
    limits = Limits(40, frozenset([2, 17, 55]))
    expected = alone(pair, limits, [Sampling(0.8, [seed]) for seed in range(5)])
    assert facts(decode_speculatively(pair[0], PROMPTS, limits, Sampling(0.8, range(5)), pair[1])) == facts(expected)
    assert facts(alone(pair, limits, [Sampling(0.8, [seed + 9]) for seed in range(5)])) != facts(expected)


def test_the_batch_size_changes_no_figure_but_the_speeds(pair: tuple[Target, Drafter]) -> None:
    questions = [Question(prompt, "ab"[place % 2], place // 2) for place, prompt in enumerate(PROMPTS)]
    results = []
    for batch_size in (1, 2, 8):
        settings = EvalSettings(max_new_tokens=20, batch_size=batch_size)
        plain = answer_plainly(pair[0], questions, settings, lambda _: None)
        result = evaluate(pair[0], pair[1], questions, plain, settings, lambda _: None).to_dict()
        for figures in (result, *result["categories"].values()):
            assert (figures["same"], figures["lossless"]) == (figures["num_prompts"], True)
            for name in ("tokens_per_second", "tokens_per_second_plain", "speed_up"):
                assert figures.pop(name) > 0
        assert result.pop("batch_size") == batch_size
        results.append(result)
    assert results[0] == results[1] == results[2]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40))), st.integers(1, 9))
def test_batches_hold_every_question_once_and_one_category_each(shape, batch_size) -> None:
    questions = [Question([1] * length, category, 0) for category, length in shape]
    batches = plan_batches(questions, batch_size)
    assert sorted(place for batch in batches for place in batch) == [*range(len(questions))]
    assert all(len({questions[place].category for place in batch}) == 1 for batch in batches)
    assert all(len(batch) <= batch_size for batch in batches)


def test_a_target_whose_layers_rows_cannot_share_is_refused_in_batches(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(FAMILIES["lfm2"]()).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(
        ConfigError, match=r"batch_size .* \(lfm2\) has layers that rows .* \(LinearAttentionLayer\): set it to 1"
    ):
        check_batches(load(tmp_path))


def test_chunks_that_begin_at_columns_are_refused_in_batches() -> None:
    config = Llama4TextConfig(num_hidden_layers=4, attention_chunk_size=8)
    target = SimpleNamespace(model=SimpleNamespace(config=config), config=config)  # no more of it is looked at
    with pytest.raises(
        ConfigError, match=r"\(llama4_text\) has layers .* cannot share \(chunked attention\): set it to"
    ):
        check_batches(cast(Target, target))
