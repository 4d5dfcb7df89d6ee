"""JSONL files of conversations, in the shapes that people have them in, read into one shape.

    {"messages": [{"role": "user", "content": "…"}, …]}         chat records
    {"conversations": [{"from": "human", "value": "…"}, …]}     ShareGPT, also with role and content
    {"prompt": "…", "response": "…"}                            without response: a prompt to be answered
    {"turns": ["…"]}                                            a prompt to be answered

The first of these keys that a record has (and is not null) counts; all other keys are ignored. A record is used whole
or not at all: what cannot be used is counted under a short reason, or stops the reading where `strict` asks for it.
Lines are read one by one, in order; what is kept in memory is the usable conversations.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64

from dflash_cache.errors import DataError

_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
_MEND = "mend or remove the record, or set data.strict to false to skip and count such records"


class RecordError(DataError):
    """One record cannot be used: `source` says where it stands, `reason` is what it is counted under."""

    def __init__(self, source: str, reason: str, detail: str = "", advice: str = _MEND) -> None:
        super().__init__(f"{source} cannot be used ({reason}{detail and ': '}{detail}): {advice}.")
        self.source = source
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Message:
    """One turn: `role` is system, user or assistant; `content` holds more than white space."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """At most one system message, then the user's and the assistant's by turns; `source` is "file:line"."""

    messages: tuple[Message, ...]
    source: str

    @property
    def needs_answer(self) -> bool:
        """Whether the user has the last word."""
        return self.messages[-1].role == "user"


@dataclass(frozen=True)
class ReadResult:
    """The usable conversations in order, and by reason how many records were skipped and where the first stands.

    `fingerprint` is 16 hex digits (xxh3) over roles and contents in order, whatever the files' names and shapes.
    """

    conversations: list[Conversation]
    skipped: dict[str, int]
    first_skipped: dict[str, str]
    fingerprint: str


def read_conversations(paths: Sequence[str], strict: bool) -> ReadResult:
    """Read all files in order; `strict` stops at the first unusable record instead of counting it.

    Raises DataError (RecordError for a record) also if a file cannot be read or no record at all can be used.
    """
    conversations: list[Conversation] = []
    skipped: dict[str, int] = {}
    first_skipped: dict[str, str] = {}
    hasher = xxh3_64()
    for source, line in _read_lines(paths):
        try:
            conversation = Conversation(_parse_line(line), source)
        except _UnusableError as error:
            reason, detail = error.args
            if strict:
                raise RecordError(source, reason, detail) from None
            skipped[reason] = skipped.get(reason, 0) + 1
            first_skipped.setdefault(reason, source)
            continue
        contents = [[message.role, message.content] for message in conversation.messages]
        hasher.update(json.dumps(contents).encode())  # JSON tells where it ends: no two lists give one text
        conversations.append(conversation)
    if not conversations:
        raise DataError(_explain_nothing(paths, skipped, first_skipped))
    return ReadResult(conversations, skipped, first_skipped, hasher.hexdigest())


def list_reasons(skipped: dict[str, int], first_skipped: dict[str, str]) -> str:
    """The reasons in words, for the end of a sentence: "2 invalid JSON, first a.jsonl:1; 1 empty line, first …"."""
    return "; ".join(f"{count} {reason}, first {first_skipped[reason]}" for reason, count in skipped.items())


class _UnusableError(Exception):
    """Why a line cannot be used: the reason it is counted under, and a detail that a person may want."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)


def _read_lines(paths: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Every line of every file with its "file:line", counted from 1."""
    for path in paths:
        if Path(path).is_dir():
            raise DataError(f"{path} is a folder: name the JSONL files in it.")
        try:
            with Path(path).open("rb") as file:
                for number, line in enumerate(file, 1):
                    yield f"{path}:{number}", line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        except OSError as error:
            raise DataError(
                f"{path} cannot be read ({error.strerror or error}): name JSONL files that exist."
            ) from None


def _parse_line(line: bytes) -> tuple[Message, ...]:
    if not line.strip():
        raise _UnusableError("empty line")
    try:
        record = json.loads(line.rstrip().decode())
    except UnicodeDecodeError as error:
        raise _UnusableError("invalid UTF-8", f"byte {error.start + 1} of the line") from None
    except json.JSONDecodeError as error:
        raise _UnusableError("invalid JSON", f"{error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, brackets nested too deep
        raise _UnusableError("invalid JSON", str(error)) from None
    if not isinstance(record, dict):
        raise _UnusableError("not a JSON object")
    for key, parse in _PARSERS.items():
        if record.get(key) is not None:
            messages = parse(record)
            _check_order(messages)
            return messages
    raise _UnusableError("missing keys", f"one of {', '.join(_PARSERS)} is expected")


def _parse_messages(record: dict[str, object]) -> tuple[Message, ...]:
    return _parse_entries(record["messages"])


def _parse_sharegpt(record: dict[str, object]) -> tuple[Message, ...]:
    return _parse_entries(record["conversations"])


def _parse_turns(record: dict[str, object]) -> tuple[Message, ...]:
    turns = record["turns"]
    if not isinstance(turns, list):
        raise _UnusableError("messages are not a list")
    if len(turns) != 1:
        raise _UnusableError("more than one turn" if turns else "no user message", f"{len(turns)} in turns")
    return (_make_message("user", turns[0]),)


def _parse_pair(record: dict[str, object]) -> tuple[Message, ...]:
    prompt, response = _make_message("user", record["prompt"]), record.get("response")
    return (prompt,) if response is None else (prompt, _make_message("assistant", response))


_PARSERS: dict[str, Callable[[dict[str, object]], tuple[Message, ...]]] = {
    "messages": _parse_messages,
    "conversations": _parse_sharegpt,
    "turns": _parse_turns,
    "prompt": _parse_pair,
}


def _parse_entries(entries: object) -> tuple[Message, ...]:
    if not isinstance(entries, list):
        raise _UnusableError("messages are not a list")
    return tuple(_parse_entry(entry) for entry in entries)


def _parse_entry(entry: object) -> Message:
    if not isinstance(entry, dict):
        raise _UnusableError("missing keys", "a message is not an object")
    role_key, content_key = ("role", "content") if "role" in entry else ("from", "value")
    if role_key not in entry or content_key not in entry:
        raise _UnusableError("missing keys", "a message needs role and content, or from and value")
    return _make_message(entry[role_key], entry[content_key])


def _make_message(role: object, content: object) -> Message:
    if not isinstance(role, str) or role not in _ROLES:
        raise _UnusableError("unknown role", json.dumps(role))
    if not isinstance(content, str):
        raise _UnusableError("content is not a string")
    if not content.strip():
        raise _UnusableError("empty content")
    try:
        content.encode()
    except UnicodeEncodeError:  # JSON can escape half of a surrogate pair, which no tokenizer takes
        raise _UnusableError("invalid Unicode", "half of a surrogate pair") from None
    return Message(_ROLES[role], content)


def _check_order(messages: tuple[Message, ...]) -> None:
    """Refuse anything but [system] user assistant user assistant …, ended by either."""
    roles = [message.role for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if "user" not in turns:
        raise _UnusableError("no user message")
    for i, role in enumerate(turns):
        if role != ("user", "assistant")[i % 2]:
            raise _UnusableError("wrong role order", f"message {len(roles) - len(turns) + i + 1} is of the {role}")


def _explain_nothing(paths: Sequence[str], skipped: dict[str, int], first_skipped: dict[str, str]) -> str:
    found = f"skipped: {list_reasons(skipped, first_skipped)}" if skipped else "no lines"
    return f"No record can be used in {', '.join(paths)} ({found}): name JSONL files of conversations, one a line."
