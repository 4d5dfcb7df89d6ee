"""The questions a drafter is measured on: read like training data, given to the target as a user would.

A question's category is what its record's `category` says, else its file's name without the ending; of files that
share a name (gsm8k/test.jsonl, math/test.jsonl), the folder's name stands before it.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dflash_cache.config.settings import EvalSettings
from dflash_cache.data.conversations import RecordError, read_conversations
from dflash_cache.data.inputs import HUB, list_files, read_records
from dflash_cache.data.records import Conversation
from dflash_cache.data.templates import check_template, tokenize_prompt
from dflash_cache.errors import ConfigError

ADVICE = "mend or remove the record"  # here no setting lets it pass


@dataclass(frozen=True)
class Question:
    """A prompt's token ids, its category, and its number among the category's, counted from 0."""

    ids: list[int]
    category: str
    number: int


def load_questions(tokenizer: PreTrainedTokenizerBase, settings: EvalSettings) -> list[Question]:
    """The questions in order, `max_prompts` of each category; a conversation's last answer is left out if it has one.

    Raises ConfigError without a file, DataError on an unusable one, TargetError without a chat template.
    """
    if not settings.prompts:
        raise ConfigError("eval.prompts names no file: set it to JSONL files of prompts that training never saw.")
    check_template(tokenizer, tokenizer.name_or_path)
    try:
        found = [pair for file, name in _name_files(settings.prompts) for pair in _read_file(file, name)]
        counts: Counter[str] = Counter()
        questions = []
        for category, conversation in found:
            if settings.max_prompts is None or counts[category] < settings.max_prompts:
                questions.append(Question(_tokenize(tokenizer, conversation), category, counts[category]))
                counts[category] += 1
    except RecordError as error:
        raise RecordError(error.source, error.reason, error.detail, ADVICE) from None
    return questions


def _name_files(paths: tuple[str, ...]) -> list[tuple[str, str]]:
    """Every file or data set once, with the category of its records."""
    files = [*dict.fromkeys(file for path in paths for file in ([path] if path.startswith(HUB) else list_files(path)))]
    stems = Counter(Path(file).stem for file in files)
    names = []
    for file in files:
        stem, folder = Path(file).stem, Path(file).parent.name
        whole = file.removeprefix(HUB) if file.startswith(HUB) else f"{folder}/{stem}"
        names.append((file, whole if file.startswith(HUB) or stems[stem] > 1 else stem))
    return names


def _read_file(file: str, name: str) -> list[tuple[str, Conversation]]:
    """Each conversation of the file, with its category. Raises RecordError at the first unusable record."""
    categories: dict[str, object] = {}
    for source, record in read_records([file]):
        if isinstance(record, dict):
            categories[source] = record.get("category")
    pairs = []
    for conversation in read_conversations([file], strict=True).conversations:
        category = categories[conversation.source]
        if category is not None and not (isinstance(category, str) and category.strip()):
            raise RecordError(conversation.source, "category is not a name")
        pairs.append((category or name, conversation))
    return pairs


def _tokenize(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> list[int]:
    messages = conversation.messages if conversation.needs_answer else conversation.messages[:-1]
    return tokenize_prompt(tokenizer, messages, conversation.source, conversation.tools)
