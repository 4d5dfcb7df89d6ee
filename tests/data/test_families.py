"""What is trained on, family by family: the rendered text with brackets, against expectations written by hand."""

import functools
from itertools import pairwise

import numpy as np
import pytest
from data.families import FAMILIES, Family, Refused
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_cache.data.conversations import RecordError
from dflash_cache.data.records import Conversation, Message
from dflash_cache.data.templates import Tokens, tokenize_conversation

ONE = (Message("user", "Hello"), Message("assistant", "Hi there."))
TWO = (*ONE, Message("user", "And you?"), Message("assistant", "Fine."))
SYSTEM = Message("system", "Be brief.")
TALKS = {"one": ONE, "one_system": (SYSTEM, *ONE), "two": TWO, "two_system": (SYSTEM, *TWO)}


@functools.cache
def make_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """Bytes, and the family's special tokens: every character has its own token, so each border can be seen."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    others = [token for token in (*family.special, *family.stops[1:]) if token != family.begin]
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token=family.begin, eos_token=family.stops[0], additional_special_tokens=others
    )
    tokenizer.chat_template = family.template
    return tokenizer


def tokenize(family: Family, messages: tuple[Message, ...], last_only: bool = False) -> str:
    """The text of the tokens, what is supervised between ⟦ and ⟧."""
    tokenizer = make_tokenizer(family)
    vocabulary = tokenizer.get_vocab()
    stops = frozenset(vocabulary[stop] for stop in family.stops)
    return show(tokenizer, tokenize_conversation(tokenizer, Conversation(messages, "a:1"), stops, last_only))


def show(tokenizer: PreTrainedTokenizerFast, tokens: Tokens) -> str:
    bounds = [0, *(np.flatnonzero(np.diff(tokens.loss_mask)) + 1).tolist(), len(tokens.input_ids)]
    runs = [(tokens.loss_mask[begin], tokenizer.decode(tokens.input_ids[begin:end])) for begin, end in pairwise(bounds)]
    return "".join(f"⟦{text}⟧" if is_supervised else str(text) for is_supervised, text in runs)


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name.partition(":")[0])
def test_the_assistants_tokens_alone_are_trained_on(family: Family, talk: str) -> None:
    expected = getattr(family, talk)
    if isinstance(expected, Refused):
        with pytest.raises(RecordError) as caught:
            tokenize(family, TALKS[talk])
        assert caught.value.reason == expected.reason
    else:
        assert tokenize(family, TALKS[talk]) == expected


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name.partition(":")[0])
def test_with_last_only_the_first_answer_is_as_the_users_words(family: Family) -> None:
    if isinstance(family.two, str):
        head, _, last = family.two.rpartition("⟦")
        assert tokenize(family, TWO, last_only=True) == head.replace("⟦", "").replace("⟧", "") + "⟦" + last


def test_an_earlier_answer_that_lost_its_reasoning_is_not_trained_on() -> None:
    """Qwen3 and gpt-oss drop it: without it the words are not what the target would say there."""
    qwen3 = next(family for family in FAMILIES if family.name.startswith("Qwen3"))
    thoughtful = (TWO[0], Message("assistant", "Hi there.", reasoning="Greet."), *TWO[2:])
    assert isinstance(qwen3.two, str)
    assert tokenize(qwen3, thoughtful) == qwen3.two.replace("⟦Hi there.<|im_end|>⟧", "Hi there.<|im_end|>")
