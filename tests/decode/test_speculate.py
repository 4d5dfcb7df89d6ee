"""Speculative decoding gives the target's own answer, whatever the drafter says."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_cache.config.settings import DrafterSettings, EvalSettings, TargetSettings
from dflash_cache.decode.choice import Greedy, count_agreeing
from dflash_cache.decode.evaluate import answer_plainly, compare, evaluate
from dflash_cache.decode.prompts import Question
from dflash_cache.decode.speculate import Decoded, Drafting, Limits, decode_plainly, decode_speculatively
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.shape import shape_from_target
from dflash_cache.errors import ConfigError, RunError
from dflash_cache.target.load import Target, load_target

PROMPTS = [[5, 9, 11], [7, 7, 8, 30, 41, 2, 9, 10], [99]]


def make_drafter(target: Target, block_size: int = 5, seed: int = 0) -> Drafter:
    settings = DrafterSettings(num_layers=2, block_size=block_size)
    drafter = Drafter(shape_from_target(target.config, settings, target.layer_ids, 127))
    drafter.initialize(torch.Generator().manual_seed(seed))
    return drafter.eval()


def decode_one(target: Target, drafter: Drafter, prompt: list[int], limits: Limits, block_size: int = 0) -> Decoded:
    return decode_speculatively(target, [prompt], limits, Greedy(), drafter, block_size)[0]


def greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    """One token at a time, without any cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def make_oracle(answer: list[int]):
    """Drafts what the target will answer to the first prompt."""

    def draft(drafting: Drafting, anchors: list[int], slots: list[int]) -> torch.Tensor:
        begin = drafting._context.lengths[0] - len(PROMPTS[0]) + 1
        wanted = torch.tensor([answer[begin : begin + slots[0] - 1]])
        return torch.nn.functional.one_hot(wanted, 128).float()

    return draft


@pytest.mark.parametrize("prompt", PROMPTS)
def test_both_decodings_give_the_answer_of_a_loop_without_caches(llama: Target, prompt: list[int]) -> None:
    expected = greedy(llama, prompt, 24)
    assert decode_plainly(llama, [prompt], Limits(24, frozenset()), Greedy())[0].tokens == expected
    for seed in range(3):
        found = decode_one(llama, make_drafter(llama, seed=seed), prompt, Limits(24, frozenset()))
        assert found.tokens == expected
        assert sum(found.accepted) == 23  # the prefill yields the first one


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_stop_token_ends_both(llama: Target, prompt: list[int]) -> None:
    expected = greedy(llama, prompt, 24)
    stop = expected[9]
    end = expected.index(stop) + 1
    assert decode_plainly(llama, [prompt], Limits(24, frozenset([stop])), Greedy())[0].tokens == expected[:end]
    found = decode_one(llama, make_drafter(llama), prompt, Limits(24, frozenset([stop])))
    assert found.tokens == expected[:end]
    assert sum(found.accepted) == end - 1


def test_a_drafter_that_knows_the_answer_is_accepted_whole(llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = greedy(llama, PROMPTS[0], 31)
    drafter = make_drafter(llama, block_size=6)

    monkeypatch.setattr(Drafting, "draft", make_oracle(expected + [0] * 6))
    found = decode_one(llama, drafter, PROMPTS[0], Limits(31, frozenset()))
    assert found.tokens == expected
    assert found.accepted == [6] * 5


@pytest.mark.parametrize("limit", range(1, 13))
def test_an_answer_is_never_longer_than_asked_for(llama: Target, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    expected = greedy(llama, PROMPTS[0], 20)

    monkeypatch.setattr(Drafting, "draft", make_oracle(expected))
    found = decode_one(llama, make_drafter(llama, block_size=6), PROMPTS[0], Limits(limit, frozenset()))
    assert found.tokens == expected[:limit]
    assert sum(found.accepted) == limit - 1


def test_an_evaluation_counts_passes_and_compares_outputs(llama: Target) -> None:
    settings = EvalSettings(max_new_tokens=12)
    questions = [Question(prompt, name, 0) for prompt, name in zip(PROMPTS, "aab", strict=True)]
    plain = answer_plainly(llama, questions, settings, lambda _: None)
    result = evaluate(llama, make_drafter(llama), questions, plain, settings, lambda _: None)
    assert [(name, one.num_prompts, one.same) for name, one in result.categories.items()] == [("a", 2, 2), ("b", 1, 1)]
    overall = result.overall
    assert (overall.lossless, overall.same, overall.num_tokens) == (True, 3, sum(len(one.tokens) for one in plain))
    passes = sum(overall.histogram.values())
    assert sum(length * count for length, count in overall.histogram.items()) == overall.num_tokens - 3
    assert overall.histogram == {
        length: sum(one.histogram[length] for one in result.categories.values()) for length in range(1, 6)
    }
    # A pass yields one token, and one more for each slot that was accepted with all before it.
    assert 1 + sum(overall.position_acceptance) == pytest.approx((overall.num_tokens - 3) / passes)
    means = [one.acceptance_length * one.num_prompts for one in result.categories.values()]
    assert overall.acceptance_length == pytest.approx(sum(means) / 3)
    assert overall.tokens_per_pass == pytest.approx((overall.num_tokens - 3) / passes)
    assert overall.speed_up == pytest.approx(overall.tokens_per_second / overall.tokens_per_second_plain)
    assert {
        "acceptance_length",
        "tokens_per_pass",
        "histogram",
        "lossless",
        "categories",
        "block_size",
    } <= result.to_dict().keys()


@pytest.mark.parametrize("block_size", [2, 3, 5])
def test_shorter_blocks_give_the_same_answer_and_never_yield_more_than_their_slots(
    llama: Target, monkeypatch: pytest.MonkeyPatch, block_size: int
) -> None:
    expected = greedy(llama, PROMPTS[0], 25)
    found = decode_one(llama, make_drafter(llama), PROMPTS[0], Limits(25, frozenset()), block_size)
    assert found.tokens == expected
    monkeypatch.setattr(Drafting, "draft", make_oracle(expected + [0] * 5))
    found = decode_one(llama, make_drafter(llama), PROMPTS[0], Limits(25, frozenset()), block_size)
    whole, rest = divmod(24, block_size)
    assert found.accepted == [block_size] * whole + [rest] * (rest > 0)


def test_blocks_longer_than_trained_are_refused(llama: Target) -> None:
    with pytest.raises(ConfigError, match=r"eval\.block_size is 6, but .* blocks of 5 slots .*: take 2 to 5\."):
        evaluate(llama, make_drafter(llama), [], [], EvalSettings(block_size=6), lambda _: None)


def test_the_drafters_own_layers_are_captured_whatever_the_targets_settings_say(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states that the drafter is given are those of an unbatched forward, index k + 1 behind layer k."""
    settings = TargetSettings(model=str(llama_folder), dtype="float32", device="cpu", layer_ids=(0, 2, 4))
    llama = load_target(settings)  # one of its own: `output_hidden_states` leaves hooks behind
    layer_ids = tuple(k + 1 for k in llama.layer_ids[:2])
    drafter = make_drafter(replace(llama, layer_ids=layer_ids))
    assert layer_ids != llama.layer_ids
    given, read = [], drafter.read_context
    monkeypatch.setattr(drafter, "read_context", lambda states, offset: (given.append(states), read(states, offset))[1])
    found = decode_one(llama, drafter, PROMPTS[1], Limits(6, frozenset()))
    ids = torch.tensor([PROMPTS[1] + found.tokens[:-1]])
    with torch.no_grad():
        every = llama.model(ids, output_hidden_states=True).hidden_states
    expected = torch.stack([every[k + 1] for k in layer_ids], dim=2)
    torch.testing.assert_close(torch.cat(given, dim=1)[:, : expected.shape[1]], expected, rtol=0, atol=1e-5)


def test_the_drafter_of_another_target_is_refused(llama: Target) -> None:
    drafter = make_drafter(llama)
    drafter.shape = replace(drafter.shape, hidden_size=48, target_num_layers=9)
    with pytest.raises(
        RunError, match=r"another target \(hidden size 48, not 32; layers 9, not \d+\): set target.model"
    ):
        evaluate(llama, drafter, [], [], EvalSettings(), lambda _: None)


def test_a_difference_is_a_tie_only_within_rounding() -> None:
    plain = Decoded([1, 2, 3], [1, 1], [5.0, 0.25, 4.0], 1.0)
    other = Decoded([1, 9, 3], [3], [5.0, 0.25, 4.0], 1.0)
    assert compare(plain, plain, torch.float32) == "same"
    assert compare(plain, other, torch.bfloat16) == "tie"
    assert compare(plain, other, torch.float32) == "different"
    assert compare(plain, Decoded([1, 2], [2], [5.0, 0.25], 1.0), torch.bfloat16) == "different"


def test_agreement_is_the_longest_common_prefix() -> None:
    assert [count_agreeing([1, 2, 3], choices) for choices in ([1, 2, 3, 4], [1, 2, 9, 4], [9, 2, 3, 4])] == [3, 2, 0]
