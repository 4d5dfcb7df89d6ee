"""Conversations to token ids and an exact loss mask over the assistant's tokens, with the chat template as it is.

The mask is found by prefix differences: what the template gives for the messages before an answer (asking for one)
must begin what it gives with the answer, and that must begin what it gives for the whole conversation, as text and as
token ids; the difference is supervised up to the last stop token. Where the template marks the assistant's text itself
(`{% generation %}`), transformers' mask is taken, but for what those differences show to be no answer: SmolLM3 marks
the header, too. Strings are never searched for, so no content can pass for a turn. What does not hold is refused, not
guessed. The cost is one tokenization of the whole conversation and two of the part up to each answer (one and one for
a single answer).
"""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from transformers import BatchEncoding, PreTrainedTokenizerBase
from xxhash import xxh3_64

from dflash_cache.data.conversations import RecordError
from dflash_cache.data.records import Conversation, Message
from dflash_cache.errors import TargetError

Tools = Sequence[dict[str, Any]]

# Changes with the rules below where masks of most templates do; the manifest's data fingerprint sees every single one.
MASK_RULE = "assistant-spans-1"

_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")  # in the template's own text
_STATE_KEYS = ("padding", "truncation")  # of the last call, in the backend's JSON


class _Whole(NamedTuple):
    """What the template gives for a whole conversation, as text and as ids."""

    text: str
    ids: list[int]


@dataclass(frozen=True, eq=False)
class Tokens:
    """input_ids (T) int32 and loss_mask (T) bool; `unsupervised_answers` had to be left out of the mask.

    `is_cut`: the conversation had more turns than could be kept.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    unsupervised_answers: int = 0
    is_cut: bool = False


def check_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise TargetError unless the tokenizer of the target `name` has a chat template to use by default."""
    if not _has_template(tokenizer):
        raise TargetError(
            f"The tokenizer of {name} has no chat template: take the instruction-tuned variant of the model, or add a "
            "chat_template.jinja to its folder."
        )


def tokenize_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], source: str = "The prompt", tools: Tools = ()
) -> list[int]:
    """The ids after which the target would begin its answer. Raises RecordError if the template refuses."""
    if not messages:
        raise RecordError(source, "no user message")
    return _encode(tokenizer, _render(tokenizer, Conversation(tuple(messages), source, tuple(tools)), ask=True))


def answer_sample(prompt_ids: Sequence[int] | np.ndarray, answer_ids: Sequence[int] | np.ndarray) -> Tokens:
    """A prompt and the target's own answer to it: its ids as they are, all supervised, a final stop token included."""
    input_ids = np.concatenate([np.asarray(prompt_ids, np.int32), np.asarray(answer_ids, np.int32)])
    return Tokens(input_ids, np.arange(len(input_ids)) >= len(prompt_ids))


def tokenize_conversation(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    stop_ids: frozenset[int] = frozenset(),
    last_only: bool = False,
) -> Tokens:
    """The whole conversation; every answer is supervised with its stop token, with `last_only` the last one alone.

    `stop_ids` are the target's stop tokens besides the tokenizer's end of sequence. An earlier answer that the template
    gives otherwise once more follows (it drops its reasoning, say) is not the target's own, and is not supervised.
    Raises RecordError if the last one cannot be told from its prompt either, if there is none, or if the template
    refuses. Of plain text every token is supervised, but what the tokenizer puts before it.
    """
    if conversation.text is not None:
        return _tokenize_text(tokenizer, conversation.text)
    answers = [i for i, message in enumerate(conversation.messages) if message.role == "assistant"]
    if not answers:
        raise RecordError(conversation.source, "no answer")
    answers = answers[-1:] if last_only else answers
    stops = stop_ids | {tokenizer.eos_token_id}
    if tokenizer.is_fast and _MARK.search(tokenizer.get_chat_template()):
        marked = _tokenize_marked(tokenizer, conversation)
        return _keep_answers(tokenizer, conversation, marked, stops, answers)
    text = _render(tokenizer, conversation)
    whole = _Whole(text, _encode(tokenizer, text))
    spans = _find_answers(tokenizer, conversation, whole, stops, answers)
    return Tokens(np.asarray(whole.ids, np.int32), _mask(spans, len(whole.ids)), len(answers) - len(spans))


def count_tokens(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> int:
    """How many ids the whole conversation takes. Raises RecordError if the template refuses."""
    return len(_encode(tokenizer, _render(tokenizer, conversation)))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits (xxh3) that change with the vocabulary, the rules of splitting and the special tokens.

    The padding and truncation of earlier calls do not count. Takes about a second for a vocabulary of 150,000.
    """
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        rules = {key: value for key, value in rules.items() if key not in _STATE_KEYS}
    else:
        rules = tokenizer.get_vocab()
    return _fingerprint([rules, tokenizer.special_tokens_map])


def template_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits (xxh3) that change with the text of the chat template."""
    return _fingerprint(tokenizer.get_chat_template())


def _has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    template = tokenizer.chat_template
    return "default" in template if isinstance(template, dict) else bool(template)


def _tokenize_marked(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> Tokens:
    """The mask of the template's own marks: every token that overlaps a marked text."""
    try:
        encoded = tokenizer.apply_chat_template(
            [message.as_dict() for message in conversation.messages],
            tools=[*conversation.tools] or None,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise _refused(conversation.source, error) from None
    assert isinstance(encoded, BatchEncoding)
    loss_mask = np.asarray(encoded["assistant_masks"], bool)
    if not loss_mask.any():
        raise RecordError(conversation.source, "the chat template marks no token of the answers")
    return Tokens(np.asarray(encoded["input_ids"], np.int32), loss_mask)


def _keep_answers(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    tokens: Tokens,
    stops: frozenset[int],
    answers: list[int],
) -> Tokens:
    """Of what is marked, that which lies in `answers`; where one of all answers cannot be found, all that is marked."""
    whole = _Whole(_render(tokenizer, conversation), tokens.input_ids.tolist())
    num_answers = sum(message.role == "assistant" for message in conversation.messages)
    try:
        spans = [_find_answer(tokenizer, conversation, whole, stops, i) for i in answers]
    except RecordError:
        if len(answers) < num_answers:
            raise
        return tokens
    return replace(tokens, loss_mask=tokens.loss_mask & _mask(spans, len(whole.ids)))


def _find_answers(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    whole: _Whole,
    stops: frozenset[int],
    answers: list[int],
) -> list[tuple[int, int]]:
    """The spans of `answers` that can be told, the last one's always. Raises RecordError."""
    spans = [_find_answer(tokenizer, conversation, whole, stops, answers[-1])]
    for i in answers[:-1]:
        with suppress(RecordError):
            spans.append(_find_answer(tokenizer, conversation, whole, stops, i))
    return spans


def _find_answer(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    whole: _Whole,
    stops: frozenset[int],
    i: int,
) -> tuple[int, int]:
    """Where in `whole` the answer in message `i` begins and ends. Raises RecordError."""
    before = replace(conversation, messages=conversation.messages[:i])
    prompt, asked = _render(tokenizer, before, ask=True), _render(tokenizer, before)
    answered = _render(tokenizer, replace(conversation, messages=conversation.messages[: i + 1]))
    if not answered.startswith(prompt):
        raise RecordError(conversation.source, "the chat template changes the prompt once it is answered")
    prompt_ids = _encode(tokenizer, prompt)
    answered_ids = _encode(tokenizer, answered) if i + 1 < len(conversation.messages) else whole.ids
    begin = len(prompt_ids)
    if answered_ids[:begin] != prompt_ids:
        raise RecordError(conversation.source, "the answer begins within a token of the prompt")
    if not prompt.startswith(asked):  # Phi-3 closes all that asks for nothing, with a stop token that ends no answer
        closing = _without_prefix(_encode(tokenizer, asked), prompt_ids)
        answered_ids = answered_ids[: -len(closing)] if answered_ids[-len(closing) :] == closing else answered_ids
    end = _end_of_answer(answered_ids, begin, stops)
    has_stop = answered_ids[end - 1] in stops
    if whole.ids[:end] == answered_ids[:end]:
        # GLM's answers end with what begins the next turn: the target stops there, so it is the answer's stop token
        return begin, end + (not has_stop and end < len(whole.ids) and whole.ids[end] in stops)
    # gpt-oss ends an earlier answer as it ends a user's message, and the last one with a token of its own
    ends_alike = whole.ids[end - 1 : end] == _encode(tokenizer, asked)[-1:]
    if has_stop and ends_alike and whole.ids[: end - 1] == answered_ids[: end - 1]:
        return begin, end
    bare = _find_bare_answer(tokenizer, conversation.messages[i], whole, prompt, stops)
    if bare is None:
        raise RecordError(conversation.source, "the chat template changes an answer once more follows")
    return bare


def _find_bare_answer(
    tokenizer: PreTrainedTokenizerBase, message: Message, whole: _Whole, prompt: str, stops: frozenset[int]
) -> tuple[int, int] | None:
    """An earlier answer's span where its content and a stop token follow the prompt at once, and nothing was dropped.

    Qwen3 puts an empty think block before the last answer alone.
    """
    if message.reasoning is not None or not whole.text.startswith(prompt):
        return None
    begin = len(_encode(tokenizer, prompt))
    for content in (message.content, message.content.strip()):
        if whole.text.startswith(content, len(prompt)):
            ids = _encode(tokenizer, prompt + content)
            if whole.ids[: len(ids)] == ids and begin < len(ids) < len(whole.ids) and whole.ids[len(ids)] in stops:
                return begin, len(ids) + 1
    return None


def _without_prefix(ids: list[int], others: list[int]) -> list[int]:
    """What is left of `ids` after the ids that both begin with."""
    same = next((k for k, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other), len(others))
    return ids[same:]


def _mask(spans: list[tuple[int, int]], length: int) -> np.ndarray:
    """(length,) bool: whether a position lies in one of the spans."""
    mask = np.zeros(length, bool)
    for begin, end in spans:
        mask[begin:end] = True
    return mask


def _end_of_answer(ids: list[int], begin: int, stops: frozenset[int]) -> int:
    """Just after the last stop token: the template may add what no model generates; without one, the very end."""
    for i in range(len(ids), begin, -1):
        if ids[i - 1] in stops:
            return i
    return len(ids)


def _render(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, ask: bool = False) -> str:
    """The template's text for the messages; `ask` adds the beginning of an answer."""
    messages = [message.as_dict() for message in conversation.messages]
    tools: list[dict[Any, Any] | Callable[..., Any]] | None = [*conversation.tools] or None
    try:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=ask))
    except (TemplateError, TypeError, ValueError) as error:
        raise _refused(conversation.source, error) from None


def _tokenize_text(tokenizer: PreTrainedTokenizerBase, text: str) -> Tokens:
    """Plain text with the special tokens that the tokenizer itself adds; those before the text are not supervised."""
    brings_own = bool(tokenizer.bos_token) and text.startswith(str(tokenizer.bos_token))
    encoded = tokenizer(text, add_special_tokens=not brings_own, return_special_tokens_mask=True, verbose=False)
    added = np.asarray(encoded["special_tokens_mask"], bool)
    begin = 1 if brings_own else int(np.argmin(added)) if not added.all() else len(added)
    return Tokens(np.asarray(encoded["input_ids"], np.int32), np.arange(len(added)) >= begin)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids that apply_chat_template gives: special tokens are the template's affair."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _refused(source: str, error: Exception) -> RecordError:
    return RecordError(source, "refused by the chat template", str(error).partition("\n")[0])


def _fingerprint(value: object) -> str:
    return xxh3_64(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
