"""Speculative decoding gives the target's own answer, whatever the drafter says."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_cache.config.settings import DrafterSettings, TargetSettings
from dflash_cache.decode.evaluate import Limits, answer_plainly, compare, evaluate
from dflash_cache.decode.speculate import Decoded, count_agreeing, decode_plainly, decode_speculatively
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.shape import shape_from_target
from dflash_cache.errors import RunError
from dflash_cache.target.load import Target, load_target

PROMPTS = [[5, 9, 11], [7, 7, 8, 30, 41, 2, 9, 10], [99]]


def make_drafter(target: Target, block_size: int = 5, seed: int = 0) -> Drafter:
    settings = DrafterSettings(num_layers=2, block_size=block_size)
    drafter = Drafter(shape_from_target(target.config, settings, target.layer_ids, 127))
    drafter.initialize(torch.Generator().manual_seed(seed))
    return drafter.eval()


def greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    """One token at a time, without any cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_both_decodings_give_the_answer_of_a_loop_without_caches(llama: Target, prompt: list[int]) -> None:
    expected = greedy(llama, prompt, 24)
    assert decode_plainly(llama, prompt, 24, frozenset()).tokens == expected
    for seed in range(3):
        found = decode_speculatively(llama, make_drafter(llama, seed=seed), prompt, 24, frozenset())
        assert found.tokens == expected
        assert sum(found.accepted) == 23  # the prefill yields the first one


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_stop_token_ends_both(llama: Target, prompt: list[int]) -> None:
    expected = greedy(llama, prompt, 24)
    stop = expected[9]
    end = expected.index(stop) + 1
    assert decode_plainly(llama, prompt, 24, frozenset([stop])).tokens == expected[:end]
    found = decode_speculatively(llama, make_drafter(llama), prompt, 24, frozenset([stop]))
    assert found.tokens == expected[:end]
    assert sum(found.accepted) == end - 1


def test_a_drafter_that_knows_the_answer_is_accepted_whole(llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = greedy(llama, PROMPTS[0], 31)
    drafter = make_drafter(llama, block_size=6)

    def oracle(target, drafter, context, anchor_token, num_slots):
        begin = context.length - len(PROMPTS[0]) + 1
        return (expected + [0] * 6)[begin : begin + num_slots - 1]

    monkeypatch.setattr("dflash_cache.decode.speculate.draft_block", oracle)
    found = decode_speculatively(llama, drafter, PROMPTS[0], 31, frozenset())
    assert found.tokens == expected
    assert found.accepted == [6] * 5


@pytest.mark.parametrize("limit", range(1, 13))
def test_an_answer_is_never_longer_than_asked_for(llama: Target, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    expected = greedy(llama, PROMPTS[0], 20)

    def oracle(target, drafter, context, anchor_token, num_slots):
        begin = context.length - len(PROMPTS[0]) + 1
        return expected[begin : begin + num_slots - 1]

    monkeypatch.setattr("dflash_cache.decode.speculate.draft_block", oracle)
    found = decode_speculatively(llama, make_drafter(llama, block_size=6), PROMPTS[0], limit, frozenset())
    assert found.tokens == expected[:limit]
    assert sum(found.accepted) == limit - 1


def test_an_evaluation_counts_passes_and_compares_outputs(llama: Target) -> None:
    limits = Limits(12, frozenset())
    plain = answer_plainly(llama, PROMPTS, limits, lambda decoded: None)
    result = evaluate(llama, make_drafter(llama), PROMPTS, plain, limits, lambda decoded: None)
    assert (result.lossless, result.same, result.num_tokens) == (True, 3, 36)
    assert sum(length * count for length, count in result.histogram.items()) == 33
    assert 1.0 <= result.acceptance_length <= 5.0


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
    found = decode_speculatively(llama, drafter, PROMPTS[1], 6, frozenset())
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
        evaluate(llama, drafter, [], [], Limits(1, frozenset()), lambda _: None)


def test_a_difference_is_a_tie_only_within_rounding() -> None:
    plain = Decoded([1, 2, 3], [1, 1], [5.0, 0.25, 4.0], 1.0)
    other = Decoded([1, 9, 3], [3], [5.0, 0.25, 4.0], 1.0)
    assert compare(plain, plain, torch.float32) == "same"
    assert compare(plain, other, torch.bfloat16) == "tie"
    assert compare(plain, other, torch.float32) == "different"
    assert compare(plain, Decoded([1, 2], [2], [5.0, 0.25], 1.0), torch.bfloat16) == "different"


def test_agreement_is_the_longest_common_prefix() -> None:
    assert [count_agreeing([1, 2, 3], choices) for choices in ([1, 2, 3, 4], [1, 2, 9, 4], [9, 2, 3, 4])] == [3, 2, 0]
