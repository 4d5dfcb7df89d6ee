"""Over-long conversations cut at a turn: whole turns go from the end until the rest fits.

The cut is made in the conversation, not in its tokens: what is left is rendered anew, ends with an answer, and is what
the chat template would have given for it, so that a template which treats the last answer in another way does so. The
cost is one tokenization for every halving of the number of answers, and that of the rest.
"""

from bisect import bisect_right
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from dflash_cache.config.settings import DataSettings
from dflash_cache.data.records import Conversation
from dflash_cache.data.templates import Tokens, count_tokens, tokenize_conversation


def tokenize_to_fit(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, settings: DataSettings, stop_ids: frozenset[int]
) -> Tokens:
    """The conversation, cut at a turn where `settings` asks for it; longer than data.max_length if that is no help.

    Nothing is cut where `settings.strict` stops at over-long conversations. Raises RecordError.
    """
    last_only = settings.train_on == "last-assistant"
    tokens = tokenize_conversation(tokenizer, conversation, stop_ids, last_only)
    is_to_cut = settings.overlong == "cut-turn" and not settings.strict
    if not is_to_cut or len(tokens.input_ids) <= settings.max_length:
        return tokens
    return cut_at_turn(tokenizer, conversation, settings.max_length, stop_ids, last_only) or tokens


def cut_at_turn(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    max_length: int,
    stop_ids: frozenset[int] = frozenset(),
    last_only: bool = False,
) -> Tokens | None:
    """The conversation up to its last answer that ends within `max_length` tokens; None if not even the first does.

    `is_cut` of the tokens is set. Plain text has no turns, and is never cut here. Raises RecordError as
    `tokenize_conversation` does, for what is left.
    """
    messages = conversation.messages
    ends = [i + 1 for i, message in enumerate(messages) if message.role == "assistant"]
    fitting = bisect_right(
        ends, max_length, key=lambda end: count_tokens(tokenizer, replace(conversation, messages=messages[:end]))
    )
    if not fitting:
        return None
    rest = replace(conversation, messages=messages[: ends[fitting - 1]])
    return replace(tokenize_conversation(tokenizer, rest, stop_ids, last_only), is_cut=True)
