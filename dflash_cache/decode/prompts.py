"""The prompts a drafter is measured on: read like training data, given to the target as a user would."""

from transformers import PreTrainedTokenizerBase

from dflash_cache.config.settings import EvalSettings
from dflash_cache.data.conversations import RecordError, read_conversations
from dflash_cache.data.templates import check_template, tokenize_prompt
from dflash_cache.errors import ConfigError


def load_prompts(tokenizer: PreTrainedTokenizerBase, settings: EvalSettings) -> list[list[int]]:
    """Token ids of each prompt; a conversation's last answer, if it has one, is left out.

    Raises ConfigError without a file, DataError on an unusable one, TargetError without a chat template.
    """
    if not settings.prompts:
        raise ConfigError("eval.prompts names no file: set it to JSONL files of prompts that training never saw.")
    check_template(tokenizer, tokenizer.name_or_path)
    try:
        read = read_conversations(settings.prompts, strict=True)
    except RecordError as error:  # here no setting lets it pass
        raise RecordError(error.source, error.reason, error.detail, "mend or remove the record") from None
    prompts = []
    for conversation in read.conversations[: settings.max_prompts]:
        messages = conversation.messages if conversation.needs_answer else conversation.messages[:-1]
        prompts.append(tokenize_prompt(tokenizer, messages))
    return prompts
