"""What a user says of a dump, and who is told what is becoming of it; light, so that the command line starts fast."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """Where a dump lies (`dataset` for vllm alone), its format, and what the user says of it.

    `layer_ids` in our numbers, or None where the dump says so itself; `max_bad_share` of its samples may be left out;
    `full_masks`: masks that cover every token are meant.
    """

    folder: Path
    format: str
    layer_ids: tuple[int, ...] | None
    dataset: Path | None = None
    max_bad_share: float = 0.01
    full_masks: bool = False


@dataclass(frozen=True)
class Outline:
    """What will be copied; `token_bytes` of states a token."""

    num_samples: int
    num_tokens: int
    num_shards: int
    token_bytes: int
    dtype: str
    layer_ids: tuple[int, ...]


class AdoptObserver:
    """Listens to nothing; override what is of interest."""

    def skipped(self, reasons: dict[str, int], first: dict[str, str]) -> None:
        """Samples left out, by reason; `first` names the first of each."""

    def scanning(self, done: int, total: int) -> None:
        """Samples whose tokens have been looked at."""

    def planned(self, outline: Outline) -> None:
        """Called once, before the first state is copied."""

    def copying(self, done_tokens: int, total_tokens: int) -> None:
        """Tokens whose states are in the cache."""
