"""One record of any common shape to one conversation.

    {"messages": [{"role": "user", "content": "…"}, …]}         chat records, with tool calls, tools and reasoning
    {"conversations": [{"from": "human", "value": "…"}, …]}     ShareGPT, also with role and content
    {"turns": ["…"]}                                            a prompt to be answered
    {"prompt": "…", "response": "…"}                            without response: a prompt to be answered
    {"instruction": "…", "input": "…", "output": "…"}           Alpaca, without output a prompt; input may be missing
    {"text": "…"}                                               plain text, which no chat template touches

The first of these keys that a record has (and is not null) counts. `system` (a string, for records whose messages have
no system message) and `tools` (a list, or its JSON) go with any chat; all other keys are ignored. A record is used
whole or not at all.

Tool calls come in OpenAI's shape, arguments as an object or as its JSON; transformers' templates are given the object
(its guide "Tool use"). ShareGPT's function_call and observation (as in LLaMA-Factory) become the same.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_cache.data.inputs import UnusableError

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_FOLLOWERS = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}


@dataclass(frozen=True)
class Message:
    """One turn: `role` is system, user, assistant or tool.

    `content` holds more than white space, but beside tool calls and of a tool. `tool_calls` are the assistant's, each
    {"type": "function", "function": {"name", "arguments"}}; `name` and `call_id` say what a tool's message answers.
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    name: str | None = None
    call_id: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """What a chat template is given; reasoning under the two names that templates know (Qwen3's, gpt-oss's)."""
        given: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            given |= {"reasoning_content": self.reasoning, "thinking": self.reasoning}
        if self.tool_calls:
            given["tool_calls"] = [*self.tool_calls]
        if self.name is not None:
            given["name"] = self.name
        if self.call_id is not None:
            given["tool_call_id"] = self.call_id
        return given


@dataclass(frozen=True)
class Conversation:
    """At most one system message, then user and assistant by turns, tools' messages between; or plain `text` alone.

    `source` says where it stands; `tools` are the functions that the template may offer to the target.
    """

    messages: tuple[Message, ...]
    source: str
    tools: tuple[dict[str, Any], ...] = ()
    text: str | None = None

    @property
    def needs_answer(self) -> bool:
        """Whether the user or a tool has the last word."""
        return self.text is None and self.messages[-1].role != "assistant"

    def spell(self) -> bytes:
        """Everything but the source, as JSON: equal for equal conversations, and no two lists of them spell alike."""
        if self.text is not None:
            return json.dumps(self.text).encode()
        spelled: list[object] = []
        for message in self.messages:
            rest = {key: value for key, value in message.as_dict().items() if key not in ("role", "content")}
            spelled.append([message.role, message.content, *([rest] if rest else [])])
        return json.dumps([*spelled, *([{"tools": self.tools}] if self.tools else [])], sort_keys=True).encode()


def parse_record(record: dict[str, Any], source: str) -> tuple[str, Conversation]:
    """The key that decides the shape, and the conversation. Raises UnusableError."""
    for key, parse in _PARSERS.items():
        if record.get(key) is not None:
            messages = _add_system(parse(record), record.get("system"))
            _check_order(messages)
            return key, Conversation(messages, source, _parse_tools(record.get("tools")))
    if record.get("text") is not None:
        return "text", Conversation((), source, text=_check_text(record["text"]))
    raise UnusableError("missing keys", f"one of {', '.join(_PARSERS)}, text is expected")


def _parse_messages(record: dict[str, Any]) -> tuple[Message, ...]:
    return _parse_entries(record["messages"])


def _parse_sharegpt(record: dict[str, Any]) -> tuple[Message, ...]:
    return _parse_entries(record["conversations"])


def _parse_turns(record: dict[str, Any]) -> tuple[Message, ...]:
    turns = record["turns"]
    if not isinstance(turns, list):
        raise UnusableError("messages are not a list")
    if len(turns) != 1:
        raise UnusableError("more than one turn" if turns else "no user message", f"{len(turns)} in turns")
    return (_make_message("user", turns[0]),)


def _parse_pair(record: dict[str, Any]) -> tuple[Message, ...]:
    prompt, response = _make_message("user", record["prompt"]), record.get("response")
    return (prompt,) if response is None else (prompt, _make_message("assistant", response))


def _parse_alpaca(record: dict[str, Any]) -> tuple[Message, ...]:
    """The input follows the instruction after an empty line, as in Alpaca's own prompts; `history` holds pairs."""
    messages: list[Message] = []
    for pair in record.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise UnusableError("history is no list of pairs")
        messages += [_make_message("user", pair[0]), _make_message("assistant", pair[1])]
    instruction, given, output = record["instruction"], record.get("input"), record.get("output")
    if isinstance(given, str) and given.strip() and isinstance(instruction, str):
        instruction = f"{instruction}\n\n{given}" if instruction.strip() else given
    messages.append(_make_message("user", instruction))
    return (*messages, *([] if output in (None, "") else [_make_message("assistant", output)]))


_PARSERS: dict[str, Callable[[dict[str, Any]], tuple[Message, ...]]] = {
    "messages": _parse_messages,
    "conversations": _parse_sharegpt,
    "turns": _parse_turns,
    "prompt": _parse_pair,
    "instruction": _parse_alpaca,
}


def _parse_entries(entries: object) -> tuple[Message, ...]:
    if not isinstance(entries, list):
        raise UnusableError("messages are not a list")
    return tuple(_parse_entry(entry) for entry in entries)


def _parse_entry(entry: object) -> Message:
    if not isinstance(entry, dict):
        raise UnusableError("missing keys", "a message is not an object")
    role_key, content_key = ("role", "content") if "role" in entry else ("from", "value")
    calls = entry.get("tool_calls") or []
    if role_key not in entry or (content_key not in entry and not calls):
        raise UnusableError("missing keys", "a message needs role and content, or from and value")
    role, content = entry[role_key], entry.get(content_key)
    if role == "function_call":
        calls, content = _read_json(content, "invalid tool call"), None
        calls = calls if isinstance(calls, list) else [calls]
    if not isinstance(calls, list):
        raise UnusableError("invalid tool call", "tool_calls is not a list")
    message = _make_message(role, content, tuple(_parse_call(call) for call in calls))
    if message.tool_calls and message.role != "assistant":
        raise UnusableError("invalid tool call", f"by the {message.role}")
    if message.role == "tool":
        return Message("tool", message.content, name=_name(entry, "name"), call_id=_name(entry, "tool_call_id"))
    reasoning = next((entry[key] for key in _REASONING_KEYS if entry.get(key)), None)
    if message.role != "assistant" or reasoning is None:
        return message
    return Message(message.role, message.content, _check_text(reasoning), message.tool_calls)


def _name(entry: dict[str, Any], key: str) -> str | None:
    return entry[key] if isinstance(entry.get(key), str) else None


def _make_message(role: object, content: object, calls: tuple[dict[str, Any], ...] = ()) -> Message:
    if not isinstance(role, str) or role not in _ROLES:
        raise UnusableError("unknown role", json.dumps(role))
    may_be_empty = bool(calls) or _ROLES[role] == "tool"
    if content is None and may_be_empty:
        content = ""
    if isinstance(content, list):
        content = _join_parts(content)
    return Message(_ROLES[role], _check_text(content, may_be_empty), tool_calls=calls)


def _join_parts(parts: list[Any]) -> object:
    """OpenAI's list of parts, if all are text; else the list, which is refused as no string."""
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    strings = [text for text in texts if isinstance(text, str)]
    return "".join(strings) if len(strings) == len(parts) else parts


def _check_text(text: object, may_be_empty: bool = False) -> str:
    if not isinstance(text, str):
        raise UnusableError("content is not a string")
    if not may_be_empty and not text.strip():
        raise UnusableError("empty content")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can escape half of a surrogate pair, which no tokenizer takes
        raise UnusableError("invalid Unicode", "half of a surrogate pair") from None
    return text


def _parse_call(call: object) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableError("invalid tool call", "a call needs function.name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _read_json(arguments, "invalid tool call")
    if not isinstance(arguments, dict):
        raise UnusableError("invalid tool call", "arguments are not an object")
    parsed: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    call_id = call.get("id") if isinstance(call, dict) else None
    return parsed | ({"id": call_id} if isinstance(call_id, str) else {})


def _parse_tools(tools: object) -> tuple[dict[str, Any], ...]:
    """A list of functions, or its JSON; each gets the envelope that templates expect if it has none."""
    if isinstance(tools, str):
        tools = _read_json(tools, "invalid tools") if tools.strip() else None
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UnusableError("invalid tools", "tools is not a list of objects")
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)


def _read_json(text: object, reason: str) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        raise UnusableError(reason, "not valid JSON") from None


def _add_system(messages: tuple[Message, ...], system: object) -> tuple[Message, ...]:
    if not isinstance(system, str) or not system.strip() or (messages and messages[0].role == "system"):
        return messages
    return (_make_message("system", system), *messages)


def _check_order(messages: tuple[Message, ...]) -> None:
    """Refuse anything but [system] user assistant user assistant …, a tool's messages after the assistant's."""
    roles = [message.role for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if "user" not in turns:
        raise UnusableError("no user message")
    allowed: tuple[str, ...] = ("user",)
    for i, role in enumerate(turns, len(roles) - len(turns) + 1):
        if role not in allowed:
            raise UnusableError("wrong role order", f"message {i} is of the {role}")
        allowed = _FOLLOWERS[role]
