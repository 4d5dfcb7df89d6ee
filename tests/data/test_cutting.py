"""What is left of an over-long conversation, against a linear search over its turns."""

import numpy as np
import pytest
from data.families import FAMILIES, Family
from data.test_families import make_tokenizer, show
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cache.data.cutting import cut_at_turn
from dflash_cache.data.records import Conversation, Message
from dflash_cache.data.templates import tokenize_conversation

QWEN3 = next(family for family in FAMILIES if family.name.startswith("Qwen3"))
LLAMA3 = next(family for family in FAMILIES if family.name.startswith("Llama 3"))


def stops_of(family: Family) -> frozenset[int]:
    return frozenset(make_tokenizer(family).get_vocab()[stop] for stop in family.stops)


def talk(words: list[str]) -> Conversation:
    messages = tuple(Message(("user", "assistant")[i % 2], word) for i, word in enumerate(words))
    return Conversation((Message("system", "Be brief."), *messages), "a:1")


@pytest.mark.parametrize("family", [QWEN3, LLAMA3], ids=["qwen3", "llama3"])
@settings(max_examples=25)  # tokenizing takes what the machine gives
@given(words=st.lists(st.text("abc", min_size=1, max_size=12), min_size=2, max_size=9), limit=st.integers(1, 400))
def test_as_many_whole_turns_are_left_as_fit(family: Family, words: list[str], limit: int) -> None:
    tokenizer, stops = make_tokenizer(family), stops_of(family)
    cut = cut_at_turn(tokenizer, talk(words), limit, stops)
    begun = [tokenize_conversation(tokenizer, talk(words[:n]), stops) for n in range(2, len(words) + 1, 2)]
    fitting = [tokens for tokens in begun if len(tokens.input_ids) <= limit]
    if not fitting:
        assert cut is None
        return
    assert cut is not None
    assert cut.is_cut
    assert cut.input_ids.tolist() == fitting[-1].input_ids.tolist()
    assert cut.loss_mask.tolist() == fitting[-1].loss_mask.tolist()


def test_what_is_left_ends_with_an_answer_that_is_trained_on_even_if_the_last_one_alone_is() -> None:
    tokenizer, conversation = make_tokenizer(QWEN3), talk(["Hi?", "Hi.", "You?", "Fine.", "Bye?", "Bye. " * 9])
    whole = len(tokenize_conversation(tokenizer, conversation, stops_of(QWEN3)).input_ids)
    tokens = cut_at_turn(tokenizer, conversation, whole - 1, stops_of(QWEN3), last_only=True)
    assert tokens is not None
    assert show(tokenizer, tokens) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nYou?<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nFine.<|im_end|>⟧\n"
    )


def test_plain_text_has_no_turns_to_cut_at() -> None:
    assert cut_at_turn(make_tokenizer(QWEN3), Conversation((), "a:1", text="word " * 50), 100) is None
    tokens = tokenize_conversation(make_tokenizer(QWEN3), Conversation((), "a:1", text="word"))
    assert not tokens.is_cut
    assert np.all(tokens.loss_mask)
