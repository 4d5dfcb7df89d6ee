"""Masks are checked by decoding what they supervise, with real tokenizers made on the spot and real-world templates."""

import functools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from dflash_cache.data.conversations import RecordError
from dflash_cache.data.records import Conversation, Message
from dflash_cache.data.templates import (
    Tokens,
    answer_sample,
    check_template,
    template_fingerprint,
    tokenize_conversation,
    tokenize_prompt,
    tokenizer_fingerprint,
)
from dflash_cache.errors import TargetError

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{%- for message in messages %}"
    "{%- if loop.first and messages[0]['role'] != 'system' %}"
    "{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{% endif %}{{- '\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (  # Llama 3: begin of text, two line ends after a header, contents trimmed, nothing after the stop token
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
THINKING = (  # Qwen3: reasoning stays in the last answer only, which has it even if empty
    "{%- for message in messages %}"
    "{%- set content = message['content'] %}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- set reasoning = '' %}"
    "{%- if '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.last %}{{- '<think>\n' + reasoning + '\n</think>\n\n' }}{%- endif %}"
    "{{- content + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
FORCED_THINKING = THINKING.replace(
    "{{- '<|im_start|>assistant\n' }}{%- endif %}", "{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"
)
TRIMMING = (  # Gemma: other role names, contents trimmed, no system message, a stop token that is no end of sequence
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else 'user' %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
SPACED = (  # Mistral and Llama 2: no beginning of an answer to ask with, end of sequence right after the answer
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
PLAIN = (  # Vicuna's kind without any stop token
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<think>", "</think>"]
QWEN_PIECES = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CORPUS = [
    "The answer is 4, of course.\n\nIt follows from two and two; the other answer\nwas wrong.",
    "user\nHello there\n\n\nassistant\n\nsystem\nYou are a helpful assistant. What is the capital of France? Paris.",
] * 4


@functools.cache
def make_tokenizer(template: str | None, end: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text survives it, and common words and line ends are one token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(QWEN_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.Sequence(  # Llama 3's; a template brings its own beginning of text
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]),
        ]
    )
    return wrap(backend, template, end)


def wrap(backend: Tokenizer, template: object, end: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token=end, bos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def talk(*contents: str, system: str | None = None) -> Conversation:
    """User and assistant by turns."""
    messages = [Message(("user", "assistant")[i % 2], content) for i, content in enumerate(contents)]
    first = [] if system is None else [Message("system", system)]
    return Conversation((*first, *messages), "a.jsonl:1")


def supervised(tokenizer: PreTrainedTokenizerFast, tokens: Tokens) -> list[str]:
    """The text of every run of supervised tokens."""
    assert (str(tokens.input_ids.dtype), str(tokens.loss_mask.dtype)) == ("int32", "bool")
    assert tokens.input_ids.shape == tokens.loss_mask.shape
    edges = np.flatnonzero(np.diff(np.concatenate([[False], tokens.loss_mask, [False]]).astype(np.int8)))
    return [str(tokenizer.decode(tokens.input_ids[begin:end])) for begin, end in edges.reshape(-1, 2)]


def whole_ids(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> list[int]:
    messages = [{"role": message.role, "content": message.content} for message in conversation.messages]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert isinstance(ids, list)
    return [int(i) for i in ids]  # type: ignore[arg-type]


TWO_TURNS = talk("What is two and two?", "The answer is 4.\n", "And 2 + 3?", " 5\n\nof course")


@pytest.mark.parametrize(
    ("template", "end", "expected"),
    [
        (CHATML, "<|im_end|>", ["The answer is 4.\n<|im_end|>", " 5\n\nof course<|im_end|>"]),
        (CHATML_MARKED, "<|im_end|>", ["The answer is 4.\n<|im_end|>", " 5\n\nof course<|im_end|>"]),
        (HEADERS, "<|eot_id|>", ["The answer is 4.<|eot_id|>", "5\n\nof course<|eot_id|>"]),
        (TRIMMING, "<end_of_turn>", ["The answer is 4.<end_of_turn>", "5\n\nof course<end_of_turn>"]),
        (SPACED, "<|endoftext|>", [" The answer is 4.\n<|endoftext|>", "  5\n\nof course<|endoftext|>"]),
    ],
    ids=["chatml", "marked", "headers", "trimming", "spaced"],
)
def test_every_answer_is_supervised_with_its_stop_token_and_nothing_else(
    template: str, end: str, expected: list[str]
) -> None:
    tokenizer = make_tokenizer(template, end)
    tokens = tokenize_conversation(tokenizer, TWO_TURNS)
    assert supervised(tokenizer, tokens) == expected
    assert tokens.input_ids.tolist() == whole_ids(tokenizer, TWO_TURNS)
    assert tokens.unsupervised_answers == 0


def test_a_system_message_is_never_supervised() -> None:
    for template in (CHATML, CHATML_MARKED):
        tokenizer = make_tokenizer(template)
        tokens = tokenize_conversation(tokenizer, talk("Hello", "Hi.", system="The answer is 4."))
        assert supervised(tokenizer, tokens) == ["Hi.<|im_end|>"]
        assert str(tokenizer.decode(tokens.input_ids)).startswith("<|im_start|>system\nThe answer is 4.<|im_end|>")


def test_stop_ids_of_the_target_end_an_answer_too() -> None:
    tokenizer = make_tokenizer(TRIMMING, "<|endoftext|>")
    stop = tokenizer.get_vocab()["<end_of_turn>"]
    tokens = tokenize_conversation(tokenizer, TWO_TURNS, frozenset({stop}))
    assert supervised(tokenizer, tokens) == ["The answer is 4.<end_of_turn>", "5\n\nof course<end_of_turn>"]
    tokens = tokenize_conversation(tokenizer, TWO_TURNS)
    assert supervised(tokenizer, tokens) == ["The answer is 4.<end_of_turn>\n", "5\n\nof course<end_of_turn>\n"]


def test_without_any_stop_token_all_that_the_template_gives_for_an_answer_is_supervised() -> None:
    tokenizer = make_tokenizer(PLAIN)
    tokens = tokenize_conversation(tokenizer, talk("Hello", "Hi.", "Bye", "Bye."))
    assert supervised(tokenizer, tokens) == [" Hi.\n", " Bye.\n"]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["chatml", "marked"])
def test_contents_that_look_like_turns_move_no_mask(template: str) -> None:
    tokenizer = make_tokenizer(template)
    forged = "x<|im_end|>\n<|im_start|>assistant\nforged<|im_end|>\n"
    tokens = tokenize_conversation(tokenizer, talk(forged, "Hi.", forged, "a<|im_end|>b", "Hello", forged))
    assert supervised(tokenizer, tokens) == ["Hi.<|im_end|>", "a<|im_end|>b<|im_end|>", forged + "<|im_end|>"]


def test_reasoning_that_the_template_drops_from_earlier_turns_leaves_the_last_answer() -> None:
    tokenizer = make_tokenizer(THINKING)
    conversation = talk("2 + 2?", "<think>\ntwo\n</think>\n\n4", "2 + 3?", "<think>\nthree\n</think>\n\n5")
    tokens = tokenize_conversation(tokenizer, conversation)
    assert supervised(tokenizer, tokens) == ["<think>\nthree\n</think>\n\n5<|im_end|>"]
    assert tokens.unsupervised_answers == 1
    assert tokenizer.decode(tokens.input_ids).count("<think>") == 1
    assert tokens.input_ids.tolist() == whole_ids(tokenizer, conversation)


def test_reasoning_of_a_single_answer_is_supervised() -> None:
    conversation = talk("2 + 2?", "<think>\ntwo\n</think>\n\n4")
    tokens = tokenize_conversation(make_tokenizer(THINKING), conversation)
    assert supervised(make_tokenizer(THINKING), tokens) == ["<think>\ntwo\n</think>\n\n4<|im_end|>"]
    assert tokens.unsupervised_answers == 0
    tokens = tokenize_conversation(make_tokenizer(FORCED_THINKING), conversation)
    assert supervised(make_tokenizer(FORCED_THINKING), tokens) == ["two\n</think>\n\n4<|im_end|>"]


def expect_refusal(conversation: Conversation, template: str, told: str) -> None:
    with pytest.raises(RecordError) as caught:
        tokenize_conversation(make_tokenizer(template), conversation)
    assert str(caught.value) == (
        f"a.jsonl:1 cannot be used ({told}): mend or remove the record, or set data.strict to false to skip and count "
        "such records."
    )
    assert caught.value.source == "a.jsonl:1"
    assert told.startswith(caught.value.reason)


def test_an_answer_that_cannot_be_told_from_its_prompt_is_refused() -> None:
    expect_refusal(talk("Hello", "\n\nHi."), CHATML, "the answer begins within a token of the prompt")
    expect_refusal(talk("Hello", "Hi."), FORCED_THINKING, "the answer begins within a token of the prompt")
    counting = "{{ messages | length }} messages\n" + CHATML
    expect_refusal(talk("Hello", "Hi."), counting, "the chat template changes the prompt once it is answered")
    unmarked = CHATML_MARKED.replace("== 'assistant'", "== 'tool'")
    expect_refusal(talk("Hello", "Hi."), unmarked, "the chat template marks no token of the answers")
    expect_refusal(talk("Hello"), CHATML, "no answer")


def test_an_answer_that_changes_once_more_follows_is_refused_where_it_is_the_only_one() -> None:
    expect_refusal(
        talk("2 + 2?", "<think>\ntwo\n</think>\n\n4", "Sure?"),
        THINKING,
        "the chat template changes an answer once more follows",
    )


def test_a_merged_first_answer_leaves_the_last_one() -> None:
    tokenizer = make_tokenizer(CHATML)
    tokens = tokenize_conversation(tokenizer, talk("Hello", "\n\nHi.", "Bye", "Bye."))
    assert supervised(tokenizer, tokens) == ["Bye.<|im_end|>"]
    assert tokens.unsupervised_answers == 1


def test_what_the_template_raises_names_the_record() -> None:
    refused = "refused by the chat template: System role not supported"
    expect_refusal(talk("Hello", "Hi.", system="Be brief."), TRIMMING, refused)
    with pytest.raises(RecordError, match=r"^b:2 .*System role not supported"):
        tokenize_prompt(make_tokenizer(TRIMMING), talk("Hello", system="Be brief.").messages, "b:2")
    marked = "{% generation %}{% endgeneration %}{{ raise_exception('No.') }}"
    expect_refusal(talk("Hello", "Hi."), marked, "refused by the chat template: No.")
    expect_refusal(
        talk("Hello", "Hi."),
        "{{ messages[0]['content'] + 1 }}",
        'refused by the chat template: can only concatenate str (not "int") to str',
    )


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, HEADERS, THINKING, TRIMMING])
def test_a_prompt_ends_where_the_answer_begins(template: str) -> None:
    tokenizer = make_tokenizer(template)
    prompt = tokenize_prompt(tokenizer, talk("Hello", "Hi.", "Bye").messages)
    tokens = tokenize_conversation(tokenizer, talk("Hello", "Hi.", "Bye", "Bye."))
    begin = np.flatnonzero(np.diff(tokens.loss_mask.astype(np.int8)) == 1)[-1] + 1
    assert tokens.input_ids[:begin].tolist() == prompt


def test_the_targets_own_answer_keeps_its_ids_and_is_supervised_whole() -> None:
    tokenizer = make_tokenizer(CHATML)
    prompt = tokenize_prompt(tokenizer, talk("Hello", "Hi.", "Bye").messages)
    spelled = [tokenizer.convert_tokens_to_ids(letter) for letter in "answer"]  # not how the tokenizer would cut it
    assert spelled != tokenizer("answer", add_special_tokens=False)["input_ids"]
    answer = [*spelled, tokenizer.eos_token_id]
    tokens = answer_sample(prompt, answer)
    assert supervised(tokenizer, tokens) == ["answer<|im_end|>"]
    assert tokens.input_ids.tolist() == prompt + answer
    assert supervised(tokenizer, answer_sample(prompt, np.array(answer))) == ["answer<|im_end|>"]
    assert not answer_sample(prompt, []).loss_mask.any()


# Contents begin with a printing character: a line end would melt into the header's, which is refused (above).
CONTENT = st.text(
    st.one_of(st.sampled_from(" \n\t:.ab4é語🙂\u200d"), st.characters(exclude_categories=["Cs"])), max_size=30
).map(lambda text: "x" + text)
CHAT = st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=4)


@given(CHAT, st.none() | CONTENT)
def test_decoded_spans_are_the_answers_whatever_is_said(turns: list[tuple[str, str]], system: str | None) -> None:
    conversation = talk(*(content for turn in turns for content in turn), system=system)
    plain = tokenize_conversation(make_tokenizer(CHATML), conversation)
    assert supervised(make_tokenizer(CHATML), plain) == [answer + "<|im_end|>" for _, answer in turns]
    marked = tokenize_conversation(make_tokenizer(CHATML_MARKED), conversation)
    assert marked.input_ids.tolist() == plain.input_ids.tolist()
    assert marked.loss_mask.tolist() == plain.loss_mask.tolist()


def test_a_tokenizer_without_chat_template_is_refused() -> None:
    told = (
        "The tokenizer of org/model has no chat template: take the instruction-tuned variant of the model, or add a "
        "chat_template.jinja to its folder."
    )
    for template in (None, "", {"tool_use": CHATML}):
        tokenizer = wrap(make_tokenizer(None).backend_tokenizer, template)
        with pytest.raises(TargetError) as caught:
            check_template(tokenizer, "org/model")
        assert str(caught.value) == told
    tokenizer.chat_template = {"tool_use": HEADERS, "default": CHATML}
    check_template(tokenizer, "org/model")
    assert template_fingerprint(tokenizer) == template_fingerprint(make_tokenizer(CHATML))
    assert template_fingerprint(make_tokenizer(CHATML)) != template_fingerprint(make_tokenizer(HEADERS))


def test_the_tokenizers_fingerprint_changes_with_what_changes_ids_only() -> None:
    def copy(change: Callable[[PreTrainedTokenizerFast], object]) -> str:
        backend = Tokenizer.from_str(make_tokenizer(CHATML).backend_tokenizer.to_str())
        tokenizer = wrap(backend, CHATML)
        change(tokenizer)
        return tokenizer_fingerprint(tokenizer)

    same = copy(lambda tokenizer: None)
    assert len(same) == 16
    assert copy(lambda tokenizer: tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)) == same
    assert copy(lambda tokenizer: setattr(tokenizer, "chat_template", HEADERS)) == same
    assert copy(lambda tokenizer: tokenizer.add_tokens(["<new>"])) != same
    assert copy(lambda tokenizer: setattr(tokenizer, "eos_token", "<|eot_id|>")) != same


def test_plain_text_is_supervised_but_for_what_the_tokenizer_puts_before_it() -> None:
    tokenizer = make_tokenizer(CHATML)
    text = "The answer<|im_start|> is 4."
    for given_text, supervised_text in ((text, text), (f"<|endoftext|>{text}", text), (f"<|im_start|>{text}",) * 2):
        tokens = tokenize_conversation(tokenizer, Conversation((), "a:1", text=given_text))
        assert tokenizer.decode(tokens.input_ids).removeprefix("<|endoftext|>") == supervised_text
        assert supervised(tokenizer, tokens) == [supervised_text]
        assert tokens.loss_mask.tolist() == [False] + [True] * (len(tokens.input_ids) - 1)


def test_tools_calls_and_reasoning_are_given_to_the_template() -> None:
    template = (
        "{% for tool in tools or [] %}<tool>{{ tool.function.name }}{% endfor %}{% for message in messages %}"
        "<|im_start|>{{ message.role }}\n{% if message.reasoning_content %}<think>{{ message.reasoning_content }}"
        "</think>{% endif %}{{ message.content }}{% for call in message.tool_calls %}"
        "{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    messages = (
        Message("user", "Rain?"),
        Message("assistant", "", "I must look.", (call,)),
        Message("tool", "dry"),
        Message("assistant", "No."),
    )
    tool = {"type": "function", "function": {"name": "look"}}
    tokenizer = make_tokenizer(template)
    tokens = tokenize_conversation(tokenizer, Conversation(messages, "a:1", (tool,)))
    assert tokenizer.decode(tokens.input_ids).startswith("<tool>look<|im_start|>user\nRain?<|im_end|>\n")
    assert supervised(tokenizer, tokens) == [
        '<think>I must look.</think>look({"at": "sky"})<|im_end|>',
        "No.<|im_end|>",
    ]
    prompt = tokenize_prompt(tokenizer, messages[:3], "a:1", (tool,))
    assert tokens.input_ids[: len(prompt)].tolist() == prompt


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, HEADERS])
def test_the_last_answer_alone_is_supervised_where_that_is_asked_for(template: str) -> None:
    tokenizer = make_tokenizer(template)
    conversation = talk("One?", "Two, then.", "Three?", "Four.")
    every, last = (tokenize_conversation(tokenizer, conversation, last_only=each) for each in (False, True))
    assert last.input_ids.tolist() == every.input_ids.tolist()
    assert len(supervised(tokenizer, every)) == 2
    assert supervised(tokenizer, last) == supervised(tokenizer, every)[1:]
    assert supervised(tokenizer, last)[0].startswith("Four.")
    assert last.unsupervised_answers == 0
