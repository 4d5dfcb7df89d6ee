"""The mask token: the id that stands for "to be drafted" in a block's slots.

By rule it is the first row of the embedding that no token uses (Qwen3: 151669), else a special token that the data
never holds; its row is frozen like the rest of the embedding. A token that occurs in text would give the drafter
two meanings for one vector.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dflash_cache.cache.layout import samples_dir
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


def check_unused(mask_token: int, candidates: Sequence[int], tables_dir: Path) -> None:
    """Raise ConfigError if a sample of the cache whose tables lie there holds `mask_token`.

    The candidates are known to be unused; any other id is looked for in the ids of all samples, where they lie there
    (of a cache in an object store they do not).
    """
    if mask_token in candidates:
        return
    for path in sorted(samples_dir(tables_dir).glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(columns=["input_ids"]):
            if pc.any(pc.equal(pc.list_flatten(batch["input_ids"]), mask_token)).as_py():
                instead = f" {candidates[0]}, say, does not occur." if candidates else ""
                raise ConfigError(
                    f"drafter.mask_token_id is {mask_token}, but the data contains that token, and its vector cannot "
                    f"mean both: leave the setting out, or set another id.{instead}"
                )
