"""Every family that is said to work is decoded as `generate` decodes it, however many drafts stand."""

import pytest
import torch
from decode.families import (
    ALONE,
    NUM_TOKENS,
    PROMPTS,
    RECURRENT,
    SCRIPTS,
    SLIDING,
    WINDOW,
    Family,
    Scripted,
    build_family,
    expect_accepted,
    generate,
)
from target.architectures import EXPORTED

from dflash_cache.config.settings import RespondSettings
from dflash_cache.decode import rows
from dflash_cache.decode.choice import Greedy
from dflash_cache.decode.past import Past
from dflash_cache.decode.probe import KEPT, probe_target
from dflash_cache.decode.prompts import Question
from dflash_cache.decode.speculate import Decoded, Limits, decode_plainly, decode_with
from dflash_cache.errors import ConfigError, TargetError
from dflash_cache.target.capture import capture_states
from dflash_cache.target.respond import answer_batch

QUESTIONS = [Question(prompt, "any", number) for number, prompt in enumerate(PROMPTS)]
WHOLE = Limits(NUM_TOKENS, frozenset())


@pytest.fixture(scope="module", params=list(EXPORTED))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return build_family(request.param, tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return build_family("qwen3.5", tmp_path_factory.mktemp("qwen"))


def decode_alone(family: Family, prompt: int, script: list[int], limits: Limits = WHOLE) -> tuple[Decoded, Scripted]:
    scripted = Scripted(family, [prompt], [script])
    return decode_with(family.target, [PROMPTS[prompt]], limits, Greedy(), scripted)[0], scripted


def test_a_prompt_is_answered_as_generate_answers_it_and_right_drafts_are_accepted(family: Family) -> None:
    for place, (prompt, answer, script) in enumerate(zip(PROMPTS, family.answers, SCRIPTS, strict=True)):
        found, scripted = decode_alone(family, place, script)
        assert found.tokens == answer
        assert found.accepted == expect_accepted(script, NUM_TOKENS)
        assert (found.reread_tokens > 0) == (family.name in RECURRENT)
        check_context(family, scripted, prompt + answer)
    assert decode_plainly(family.target, [PROMPTS[1]], WHOLE, Greedy())[0].tokens == family.answers[1]


def check_context(family: Family, scripted: Scripted, ids: list[int]) -> None:
    """Keys and values of the drafter are those that it makes of the states of one pass over the text."""
    [length] = scripted.context.lengths
    assert len(ids) - 1 <= length <= len(ids), "the last token is read if it was a draft"
    ids = ids[:length]
    states = capture_states(family.target, torch.tensor([ids]), torch.tensor([len(ids)]))[:, :, :3]
    with torch.inference_mode():
        expected = family.drafter.read_context(states)
    for found, wanted in zip(scripted.context.view(), expected, strict=True):
        for one, other in ((found.keys, wanted.keys), (found.values, wanted.values)):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


def test_several_prompts_at_once_are_answered_so_too_or_refused(family: Family) -> None:
    scripted = Scripted(family, range(4), SCRIPTS)
    if family.name in ALONE:
        with pytest.raises(ConfigError, match="layers that rows of different lengths cannot share"):
            decode_with(family.target, PROMPTS, WHOLE, Greedy(), scripted)
        return
    found = decode_with(family.target, PROMPTS, WHOLE, Greedy(), scripted)
    assert [one.tokens for one in found] == family.answers
    assert [one.accepted for one in found] == [expect_accepted(script, NUM_TOKENS) for script in SCRIPTS]


def test_answers_to_be_trained_on_are_those_of_generate_though_some_end_before_others(family: Family) -> None:
    """`respond` reads prompts as decoding does, but in batches of any family."""
    end = family.target.tokenizer.eos_token_id
    tries = ((stop, [cut_at(answer, {stop, end}) for answer in family.answers]) for stop in family.answers[0][4:])
    stop, expected = next((stop, answers) for stop, answers in tries if len({*map(len, answers)}) > 1)
    family.target.model.generation_config.eos_token_id = stop
    settings = RespondSettings(max_new_tokens=NUM_TOKENS, temperature=0)
    assert answer_batch(family.target, PROMPTS, settings, torch.Generator()) == expected


def cut_at(answer: list[int], ends: set[int]) -> list[int]:
    return answer[: next((place for place, token in enumerate(answer, 1) if token in ends), len(answer))]


def test_a_stop_token_ends_an_answer_where_generate_ends_it(family: Family) -> None:
    answer = family.answers[0]
    stop = next(token for token in answer[9:] if answer.index(token) > 8)
    expected, _ = generate(family.target.model, PROMPTS[0], NUM_TOKENS, stop)
    assert len(expected) < NUM_TOKENS
    found, _ = decode_alone(family, 0, SCRIPTS[0], Limits(NUM_TOKENS, frozenset([stop])))
    assert found.tokens == expected


def test_the_sliding_families_windows_are_shorter_than_the_text(family: Family) -> None:
    windows = {
        getattr(layer, "sliding_window", None) for layer in rows.DynamicCache(config=family.target.config).layers
    }
    assert (WINDOW in windows) == (family.name in SLIDING)


def test_what_is_not_taken_back_is_found_out(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    if family.name in RECURRENT:
        monkeypatch.setattr(Past, "go_back", Past.cut)
    else:
        monkeypatch.setattr(Past, "cut", lambda *_: None)
    assert decode_alone(family, 0, SCRIPTS[0])[0].tokens != family.answers[0]
    with pytest.raises(TargetError, match="gives other logits behind rejected drafts than without any"):
        probe_target(family.target, QUESTIONS, 1)


def test_rows_that_are_left_where_they_were_are_found_out(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    if family.name in SLIDING:
        monkeypatch.setattr(rows, "_move", lambda states, _: states)
        found = decode_with(family.target, PROMPTS, WHOLE, Greedy(), Scripted(family, range(4), SCRIPTS))
        assert [one.tokens for one in found] != family.answers
        with pytest.raises(TargetError, match="gives other logits behind rejected drafts than without any"):
            probe_target(family.target, QUESTIONS, 2)


def test_the_probe_finds_nothing_but_rounding(family: Family) -> None:
    for batch_size in (1,) if family.name in ALONE else (1, 4):
        probe = probe_target(family.target, QUESTIONS, batch_size)
        assert max(probe.difference, probe.rounding) < 5e-5
        assert probe.num_positions == sum(KEPT) * min(2, batch_size)


@pytest.mark.parametrize("widest", [0, 5, 8, 13, 64])
def test_the_answer_does_not_depend_on_how_the_accepted_tokens_are_read_again(qwen, monkeypatch, widest: int) -> None:
    monkeypatch.setattr(rows, "WIDEST", widest)
    for place, script in enumerate(SCRIPTS):
        found, scripted = decode_alone(qwen, place, script)
        assert found.tokens == qwen.answers[place]
        check_context(qwen, scripted, PROMPTS[place] + found.tokens)


@pytest.mark.parametrize(("widest", "cost"), [(64, (2 + 5 + 0 + 1, 0)), (9, (2 + 5 + 0 + 1, 1)), (0, (2 + 3 + 1, 3))])
def test_what_is_read_again_is_counted(qwen: Family, monkeypatch: pytest.MonkeyPatch, widest: int, cost) -> None:
    """By hand: blocks of 5, of which 2, 3, 5, 1 and the last 2 tokens stand.

    In passes of any width 2 tokens go in front of the second block, 5 of the third, which stands whole, none of the
    fourth and 1 of the fifth. Up to 9 wide the 5 are read in a pass of their own, and so are all where none may be.
    """
    monkeypatch.setattr(rows, "WIDEST", widest)
    found, _ = decode_alone(qwen, 0, [2, 3, 5, 1, 5], Limits(1 + 2 + 3 + 5 + 1 + 2, frozenset()))
    assert (found.reread_tokens, found.extra_passes) == cost
