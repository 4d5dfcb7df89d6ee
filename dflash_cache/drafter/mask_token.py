"""The mask token: the id that stands for "to be drafted" in a block's slots.

By rule it is the first row of the embedding that no token uses (Qwen3: 151669), else a special token that the data
never holds; its row is frozen like the rest of the embedding. A token that occurs in text would give the drafter
two meanings for one vector.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from dflash_cache.config.settings import DrafterSettings
from dflash_cache.errors import ConfigError

MAX_CANDIDATES = 16


def list_candidates(vocab_size: int, num_tokens: int, special_ids: Iterable[int], used_ids: np.ndarray) -> list[int]:
    """At most 16 usable ids, the best first; `used_ids` are all ids that occur in the data.

    `vocab_size` counts the embedding's rows, `num_tokens` the tokenizer's tokens: rows from `num_tokens` on belong to
    no token. Special tokens follow, the last ones first (the first ones are begin, end and padding).
    """
    used = set(used_ids.tolist())
    ids = [*range(num_tokens, vocab_size), *sorted(special_ids, reverse=True)]
    return [token for token in ids if token not in used and token < vocab_size][:MAX_CANDIDATES]


def choose_mask_token(settings: DrafterSettings, vocab_size: int, candidates: Sequence[int]) -> int:
    """The setting's id, or the best candidate. Raises ConfigError if it lies outside the embedding or none is left."""
    chosen = settings.mask_token_id
    if chosen is None:
        if not candidates:
            raise ConfigError(
                "Every special token occurs in the data; set drafter.mask_token_id to an id that does not."
            )
        return candidates[0]
    if chosen >= vocab_size:
        raise ConfigError(f"drafter.mask_token_id is {chosen}, but the target's embedding has {vocab_size} rows.")
    return chosen
