"""Who is told what the first stage is doing; the command line shows it, tests collect it."""

from dataclasses import dataclass

from dflash_cache.data.report import DataReport


@dataclass(frozen=True)
class Estimate:
    """What the cache will take, before the first forward; `remaining_tokens` are not cached yet."""

    num_samples: int
    num_tokens: int
    remaining_tokens: int
    token_bytes: int
    free_bytes: int
    num_workers: int
    buffer_bytes: int  # of all workers, for states on their way to the disk
    disk_bytes: int  # that the local disk must hold at once: what remains, or a part of it on its way to a store

    @property
    def total_bytes(self) -> int:
        """Hidden states, ids and masks of all samples."""
        return self.num_tokens * self.token_bytes

    @property
    def remaining_bytes(self) -> int:
        """What is still to be written of it."""
        return self.remaining_tokens * self.token_bytes


class Observer:
    """Listens to nothing; override what is of interest."""

    def skipped(self, reasons: dict[str, int], first: dict[str, str]) -> None:
        """Records left out, by reason; `first` says where the first of each stands."""

    def reported(self, report: DataReport) -> None:
        """What became of all records, once they are samples."""

    def rejected(self, reasons: dict[str, int], first: dict[str, str]) -> None:
        """Samples whose states were bad and left out, by reason, at the end; `first` names the first of each."""

    def responding(self, done: int, total: int, new_tokens: int) -> None:
        """Prompts answered so far, and the tokens of the answers made in this run."""

    def estimated(self, estimate: Estimate) -> None:
        """Called once, before the first forward."""

    def noted(self, sentence: str) -> None:
        """Something that the user should know; the run goes on."""

    def forwarding(self, done_tokens: int, total_tokens: int) -> None:
        """Tokens whose states are in the writer's hands."""
