"""Which target a drafter was trained for, as its checkpoints and its exported config.json record it.

Sizes alone do not tell: a fine-tuned target, another revision, or a foreign model that happens to be as large has the
same, and its drafts would merely be accepted less often. Drafters of others, and older ones, have no such record.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from dflash_cache.cache.layout import Manifest


@dataclass(frozen=True)
class TrainedFor:
    """The target by name, and by the fingerprints that the cache recorded: of its config and weights, its tokenizer."""

    model: str
    revision: str | None
    weights_fingerprint: str
    tokenizer_fingerprint: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as stored in checkpoints and exports."""
        return asdict(self)

    def __str__(self) -> str:
        return self.model if self.revision is None else f"{self.model}, revision {self.revision}"


def target_of_cache(manifest: Manifest) -> TrainedFor:
    """The target whose states the cache holds."""
    return TrainedFor(
        model=manifest.target_model,
        revision=manifest.target_revision,
        weights_fingerprint=manifest.target_fingerprint,
        tokenizer_fingerprint=manifest.tokenizer_fingerprint,
    )


def parse_target(values: Any) -> TrainedFor | None:
    """The inverse of `to_dict`; None of anything else."""
    names = {entry.name for entry in fields(TrainedFor)}
    return TrainedFor(**values) if isinstance(values, dict) and values.keys() == names else None
