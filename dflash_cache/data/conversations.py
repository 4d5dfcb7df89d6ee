"""Conversations from files and data sets, in the shapes that people have them in, read into one shape.

What a path may be is said in `inputs`, which shapes a record may have in `records`. A record is used whole or not at
all: what cannot be used is counted under a short reason, or stops the reading where `strict` asks for it. Records are
read one by one, in order; what is kept in memory is the usable conversations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64, xxh3_128_digest

from dflash_cache.data.inputs import ADVICE, UnusableError, read_records
from dflash_cache.data.records import Conversation, parse_record
from dflash_cache.errors import DataError

DUPLICATE = "the same as a conversation before"
_MEND = "mend or remove the record, or set data.strict to false to skip and count such records"


class RecordError(DataError):
    """One record cannot be used: `source` says where it stands, `reason` is what it is counted under."""

    def __init__(self, source: str, reason: str, detail: str = "", advice: str = _MEND) -> None:
        super().__init__(f"{source} cannot be used ({reason}{detail and ': '}{detail}): {advice}.")
        self.source = source
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class ReadResult:
    """The usable conversations in order, and by reason how many records were skipped and where the first stands.

    `fingerprint` is 16 hex digits (xxh3) over all that the conversations say in order, whatever the files' names and
    shapes. `shapes` counts the usable records by the key that decided how they were read.
    """

    conversations: list[Conversation]
    skipped: dict[str, int]
    first_skipped: dict[str, str]
    fingerprint: str
    shapes: dict[str, int] = field(default_factory=dict)

    @property
    def num_records(self) -> int:
        """All that were read, usable or not."""
        return sum(self.shapes.values()) + sum(self.skipped.values())


def read_conversations(paths: Sequence[str], strict: bool, drop_duplicates: bool = False) -> ReadResult:
    """Read all paths in order; `strict` stops at the first unusable record instead of counting it.

    With `drop_duplicates`, a conversation that says the same as one before it is counted, and is no reason to stop.
    Raises DataError (RecordError for a record) also if a file cannot be read or no record at all can be used.
    """
    conversations: list[Conversation] = []
    shapes: dict[str, int] = {}
    skipped: dict[str, int] = {}
    first_skipped: dict[str, str] = {}
    hasher = xxh3_64()
    known: set[bytes] = set()

    def skip(reason: str, source: str) -> None:
        skipped[reason] = skipped.get(reason, 0) + 1
        first_skipped.setdefault(reason, source)

    for source, record in read_records(paths):
        try:
            if isinstance(record, UnusableError):
                raise record
            shape, conversation = parse_record(record, source)
        except UnusableError as error:
            reason, detail = error.args
            if strict:
                raise RecordError(source, reason, detail) from None
            skip(reason, source)
            continue
        spelled = conversation.spell()
        if drop_duplicates:
            digest = xxh3_128_digest(spelled)
            if digest in known:
                skip(DUPLICATE, source)
                continue
            known.add(digest)
        hasher.update(spelled)
        shapes[shape] = shapes.get(shape, 0) + 1
        conversations.append(conversation)
    if not conversations:
        raise DataError(_explain_nothing(paths, skipped, first_skipped))
    return ReadResult(conversations, skipped, first_skipped, hasher.hexdigest(), shapes)


def list_reasons(skipped: dict[str, int], first_skipped: dict[str, str]) -> str:
    """The reasons in words, for the end of a sentence: "2 invalid JSON, first a.jsonl:1; 1 empty line, first …"."""
    return "; ".join(f"{count} {reason}, first {first_skipped[reason]}" for reason, count in skipped.items())


def _explain_nothing(paths: Sequence[str], skipped: dict[str, int], first_skipped: dict[str, str]) -> str:
    found = f"skipped: {list_reasons(skipped, first_skipped)}" if skipped else "no records"
    return f"No record can be used in {', '.join(paths)} ({found}): {ADVICE}, with conversations in it."
