"""What became of every record that was read: the counts that the cache keeps, and that people are told.

Each record is kept as a sample or left out for one reason, so `read` is `kept` and all of `left_out` together.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line shows reports, and must not wait for transformers
    from dflash_cache.data.conversations import ReadResult
    from dflash_cache.data.samples import Counts


@dataclass(frozen=True)
class DataReport:
    """`shapes`: usable records by the key that decided how they were read; `left_out`: counts by reason.

    `first_left_out` says where the first of each reason stands. Of the samples kept, some are `cut` at a turn or
    `truncated` within one; `unsupervised_answers` are answers in them that are not trained on.
    """

    read: int
    kept: int
    tokens: int
    loss_tokens: int
    cut: int = 0
    truncated: int = 0
    unsupervised_answers: int = 0
    shapes: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    first_left_out: dict[str, str] = field(default_factory=dict)

    def describe_samples(self) -> list[str]:
        """One sentence for each thing that samples lack."""
        sentences = []
        if self.cut:
            sentences.append(f"Cut at a turn, to fit data.max_length: {self.cut:,}.")
        if self.truncated:
            sentences.append(f"{self.truncated:,} samples were longer than data.max_length and are cut.")
        if self.unsupervised_answers:
            sentences.append(f"{self.unsupervised_answers:,} answers are not trained on: the template changes them.")
        return sentences

    def sum_up(self) -> str:
        """The whole in one sentence."""
        return (
            f"Of {self.read:,} records, {self.kept:,} are samples and {sum(self.left_out.values()):,} are left out; "
            f"{self.loss_tokens:,} of {self.tokens:,} tokens are trained on."
        )


def make_report(
    read: "ReadResult", refused: dict[str, int], first_refused: dict[str, str], counts: "Counts"
) -> DataReport:
    """The counts of all stations: reading, tokenizing (`refused` there, by reason), and the table of samples."""
    left_out: dict[str, int] = {}
    for reasons in (read.skipped, refused, counts.skipped):
        for reason, count in reasons.items():
            left_out[reason] = left_out.get(reason, 0) + count
    return DataReport(
        read=read.num_records,
        kept=counts.samples,
        tokens=counts.tokens,
        loss_tokens=counts.loss_tokens,
        cut=counts.cut,
        truncated=counts.truncated,
        unsupervised_answers=counts.unsupervised_answers,
        shapes=read.shapes,
        left_out=left_out,
        first_left_out=counts.first_skipped | first_refused | read.first_skipped,
    )
