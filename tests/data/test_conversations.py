import json
from pathlib import Path

import pytest

from dflash_cache.data.conversations import RecordError, read_conversations
from dflash_cache.data.inputs import ADVICE as PLACES
from dflash_cache.data.records import Conversation, Message
from dflash_cache.errors import DataError

ADVICE = "mend or remove the record, or set data.strict to false to skip and count such records."
HELLO = (Message("user", "Hello"), Message("assistant", "Hi."))
GOOD = b'{"prompt": "Hello", "response": "Hi."}'
SHAPES = "one of messages, conversations, turns, prompt, instruction, text is expected"
BAD_LINES = [
    (b"", "empty line", ""),
    (b"  \t", "empty line", ""),
    (b'{"prompt": "\xff"}', "invalid UTF-8", "byte 13 of the line"),
    (b'{"prompt": "x"', "invalid JSON", "Expecting ',' delimiter at column 15"),
    (b'["Hello"]', "not a JSON object", ""),
    (b'"Hello"', "not a JSON object", ""),
    (b'{"chat": "x"}', "missing keys", SHAPES),
    (b'{"messages": null}', "missing keys", SHAPES),
    (b'{"messages": [{"role": "user"}]}', "missing keys", "a message needs role and content, or from and value"),
    (b'{"messages": ["Hello"]}', "missing keys", "a message is not an object"),
    (b'{"messages": {"role": "user"}}', "messages are not a list", ""),
    (b'{"turns": "Hello"}', "messages are not a list", ""),
    (b'{"turns": ["a", "b"]}', "more than one turn", "2 in turns"),
    (b'{"turns": []}', "no user message", "0 in turns"),
    (b'{"messages": []}', "no user message", ""),
    (b'{"messages": [{"role": "system", "content": "x"}]}', "no user message", ""),
    (b'{"prompt": " \\n"}', "empty content", ""),
    (b'{"prompt": "x", "response": ""}', "empty content", ""),
    (b'{"prompt": ["x"]}', "content is not a string", ""),
    (b'{"prompt": "\\ud800"}', "invalid Unicode", "half of a surrogate pair"),
    (b'{"messages": [{"role": "critic", "content": "x"}]}', "unknown role", '"critic"'),
    (b'{"messages": [{"role": null, "content": "x"}]}', "unknown role", "null"),
    (
        b'{"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "y"}]}',
        "wrong role order",
        "message 1 is of the assistant",
    ),
    (
        b'{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]}',
        "wrong role order",
        "message 2 is of the system",
    ),
    (
        b'{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}, '
        b'{"role": "user", "content": "y"}]}',
        "wrong role order",
        "message 3 is of the user",
    ),
]


def write_lines(path: Path, *lines: bytes) -> str:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi.", "name": "x"}]},
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi."}], "id": 7},
        {"conversations": [{"from": "user", "value": "Hello"}, {"from": "assistant", "value": "Hi."}]},
        {"conversations": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]},
        {"prompt": "Hello", "response": "Hi.", "score": 0.5},
        {"prompt": "Hello", "response": "Hi.", "messages": None},
    ],
)
def test_every_shape_of_an_answered_record_gives_the_same_conversation(tmp_path: Path, record: object) -> None:
    path = write_lines(tmp_path / "a.jsonl", json.dumps(record).encode())
    result = read_conversations([path], strict=True)
    assert result.conversations == [Conversation(HELLO, f"{path}:1")]
    assert not result.conversations[0].needs_answer
    other = read_conversations([write_lines(tmp_path / "b.jsonl", GOOD)], strict=True)
    assert result.fingerprint == other.fingerprint


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "Hello"}]},
        {"conversations": [{"from": "human", "value": "Hello"}]},
        {"prompt": "Hello"},
        {"prompt": "Hello", "response": None},
        {"turns": ["Hello"], "category": "writing"},
    ],
)
def test_every_shape_of_a_prompt_alone_needs_an_answer(tmp_path: Path, record: object) -> None:
    path = write_lines(tmp_path / "a.jsonl", json.dumps(record).encode())
    [conversation] = read_conversations([path], strict=True).conversations
    assert conversation.messages == (Message("user", "Hello"),)
    assert conversation.needs_answer


def test_a_system_message_may_come_first_and_content_keeps_its_white_space(tmp_path: Path) -> None:
    record = {
        "messages": [
            {"role": "system", "content": "Be brief. "},
            {"role": "user", "content": "\nHello é\u2028"},
            {"role": "assistant", "content": " Hi."},
            {"role": "user", "content": "Bye"},
        ]
    }
    path = write_lines(tmp_path / "a.jsonl", json.dumps(record, ensure_ascii=False).encode())
    [conversation] = read_conversations([path], strict=True).conversations
    assert [(m.role, m.content) for m in conversation.messages] == [
        ("system", "Be brief. "),
        ("user", "\nHello é\u2028"),
        ("assistant", " Hi."),
        ("user", "Bye"),
    ]
    assert conversation.needs_answer


@pytest.mark.parametrize(("line", "reason", "detail"), BAD_LINES)
def test_a_bad_line_is_skipped_and_counted_or_told_in_one_sentence(
    tmp_path: Path, line: bytes, reason: str, detail: str
) -> None:
    path = write_lines(tmp_path / "a.jsonl", GOOD, line, GOOD, line)
    result = read_conversations([path], strict=False)
    assert [conversation.source for conversation in result.conversations] == [f"{path}:1", f"{path}:3"]
    assert result.skipped == {reason: 2}
    assert result.first_skipped == {reason: f"{path}:2"}
    with pytest.raises(RecordError) as caught:
        read_conversations([path], strict=True)
    told = f"{reason}: {detail}" if detail else reason
    assert str(caught.value) == f"{path}:2 cannot be used ({told}): {ADVICE}"
    assert (caught.value.source, caught.value.reason) == (f"{path}:2", reason)


@pytest.mark.parametrize("line", [b"[" * 200_000, b'{"prompt": ' + b"1" * 5_000 + b"}"], ids=["deep", "digits"])
def test_json_that_python_gives_up_on_is_a_bad_line_not_a_crash(tmp_path: Path, line: bytes) -> None:
    result = read_conversations([write_lines(tmp_path / "a.jsonl", line, GOOD)], strict=False)
    assert result.skipped == {"invalid JSON": 1}


def test_a_byte_order_mark_and_windows_line_ends_are_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD + b"\r\n" + GOOD + b"\r\n")
    result = read_conversations([str(tmp_path / "a.jsonl")], strict=True)
    assert [conversation.messages for conversation in result.conversations] == [HELLO, HELLO]


def test_files_are_read_in_the_order_given_and_a_last_line_may_lack_its_end(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b'{"prompt": "1"}\n{"prompt": "2"}')
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "3"}')
    result = read_conversations([str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")], strict=True)
    assert [conversation.messages[0].content for conversation in result.conversations] == ["1", "2", "3"]


def test_the_fingerprint_changes_with_content_role_order_and_grouping_but_not_with_skipped_lines(
    tmp_path: Path,
) -> None:
    def fingerprint(*lines: bytes) -> str:
        return read_conversations([write_lines(tmp_path / "a.jsonl", *lines)], strict=False).fingerprint

    one, two = b'{"prompt": "1"}', b'{"prompt": "2"}'
    pair = b'{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}'
    as_system = b'{"messages": [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]}'
    all_of_them = [fingerprint(*lines) for lines in ([one], [two], [one, two], [two, one], [pair], [as_system])]
    assert len(set(all_of_them)) == 6
    assert fingerprint(one, b"", two) == fingerprint(one, two)
    assert len(fingerprint(one)) == 16


def test_a_missing_file_an_empty_folder_and_files_without_records_are_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    missing, empty = str(tmp_path / "none.jsonl"), write_lines(tmp_path / "empty.jsonl")
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        read_conversations([missing], strict=False)
    assert str(caught.value) == (f"{missing} cannot be read (No such file or directory): {PLACES}.")
    with pytest.raises(DataError) as caught:
        read_conversations([str(tmp_path / "folder")], strict=False)
    assert str(caught.value) == (
        f"The folder {tmp_path / 'folder'} holds no file that ends with .jsonl, .ndjson, .json, .parquet: {PLACES}."
    )
    with pytest.raises(DataError) as caught:
        read_conversations([empty], strict=False)
    assert str(caught.value) == (f"No record can be used in {empty} (no records): {PLACES}, with conversations in it.")
    bad = write_lines(tmp_path / "bad.jsonl", b"x", b"", b"y")
    with pytest.raises(DataError) as caught:
        read_conversations([bad, empty], strict=False)
    assert str(caught.value) == (
        f"No record can be used in {bad}, {empty} (skipped: 2 invalid JSON, first {bad}:1; 1 empty line, "
        f"first {bad}:2): {PLACES}, with conversations in it."
    )


def test_a_conversation_that_says_the_same_in_another_shape_is_a_duplicate_and_no_reason_to_stop(
    tmp_path: Path,
) -> None:
    messages = b'{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]}'
    other = b'{"prompt": "Hello", "response": "Hi!"}'
    for name, lines in (("all", [GOOD, other, messages, GOOD]), ("once", [GOOD, other])):
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n".join(lines))
    found, once = (
        read_conversations([str(tmp_path / f"{name}.jsonl")], strict=True, drop_duplicates=True)
        for name in ("all", "once")
    )
    assert [conversation.messages for conversation in found.conversations] == [
        HELLO,
        (Message("user", "Hello"), Message("assistant", "Hi!")),
    ]
    assert found.skipped == {"the same as a conversation before": 2}
    assert found.first_skipped["the same as a conversation before"].endswith("all.jsonl:3")
    assert found.fingerprint == once.fingerprint
    assert found.num_records == 4
    assert len(read_conversations([str(tmp_path / "all.jsonl")], strict=True).conversations) == 4
