"""The table of samples: one row a sample, numbered from 0 in the order of the conversations.

Everything later (buckets, jobs, the cache, training) speaks of samples by their number. Ids and masks are Arrow
lists, so one sample is read as slices of two arrays; the mask is boolean: one bit a token in memory, fewer in parquet.
What is left out is counted by reason. Rows are gathered in chunks, so the cost is the table plus one chunk, and a
chunk's tokens stay far below the 2^31 that Arrow's list offsets can count.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from dflash_cache.config.settings import DataSettings
from dflash_cache.data.conversations import RecordError, list_reasons
from dflash_cache.data.templates import Tokens
from dflash_cache.errors import DataError

SAMPLES = pa.schema(
    [
        pa.field("sample", pa.int64(), nullable=False),
        pa.field("source", pa.string(), nullable=False),  # "file:line" of the conversation
        pa.field("length", pa.int32(), nullable=False),
        pa.field("loss_tokens", pa.int32(), nullable=False),  # how many of the mask are true
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
    ]
)
LONG = "longer than data.max_length"
SHORT = "fewer supervised tokens than data.min_answer_tokens"
_CHUNK_ROWS = 4096
_CHUNK_TOKENS = 1 << 24


@dataclass
class Counts:
    """What became of the conversations; samples `cut` at a turn or `truncated` within one are kept ones.

    So are those with `unsupervised_answers`.
    """

    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    cut: int = 0
    truncated: int = 0
    unsupervised_answers: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    first_skipped: dict[str, str] = field(default_factory=dict)

    def skip(self, reason: str, source: str) -> None:
        """Count one more sample left out for `reason`."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        self.first_skipped.setdefault(reason, source)


def build_samples(tokens: Iterable[tuple[str, Tokens]], settings: DataSettings) -> tuple[pa.Table, Counts]:
    """The table (SAMPLES) of all (source, tokens) that `settings` keeps, in order, and the counts.

    Raises RecordError at the first overlong sample where `settings.strict` asks for it, and DataError if none is left.
    """
    counts = Counts()
    chunks: list[pa.RecordBatch] = []
    rows: list[tuple[str, Tokens]] = []
    waiting = 0  # tokens in `rows`
    for source, given in tokens:
        kept = _fit(source, given, settings, counts)
        if kept is None:
            continue
        rows.append((source, kept))
        waiting += len(kept.input_ids)
        if len(rows) == _CHUNK_ROWS or waiting >= _CHUNK_TOKENS:
            chunks.append(_make_chunk(rows, counts))
            rows, waiting = [], 0
    if rows:
        chunks.append(_make_chunk(rows, counts))
    if not chunks:
        raise DataError(_explain_nothing(counts))
    return pa.Table.from_batches(chunks, SAMPLES), counts


def sample_tokens(table: pa.Table, i: int) -> tuple[np.ndarray, np.ndarray]:
    """Row i's input_ids (T) int32, a read-only view of the table, and loss_mask (T) bool."""
    ids, mask = table["input_ids"][i].values, table["loss_mask"][i].values
    return ids.to_numpy(), mask.to_numpy(zero_copy_only=False)


def _fit(source: str, tokens: Tokens, settings: DataSettings, counts: Counts) -> Tokens | None:
    """The sample within data.max_length, or None if it is left out; either way counted."""
    length, limit = len(tokens.input_ids), settings.max_length
    if length > limit:
        if settings.strict:
            raise RecordError(
                source,
                LONG,
                f"{length} tokens, at most {limit}",
                "raise data.max_length, shorten the record, or set data.strict to false to handle it as "
                "data.overlong says",
            )
        if settings.overlong != "truncate":  # where turns are left out, `cutting` has done so
            counts.skip(LONG, source)
            return None
        tokens = Tokens(tokens.input_ids[:limit], tokens.loss_mask[:limit], tokens.unsupervised_answers)
    if np.count_nonzero(tokens.loss_mask) < settings.min_answer_tokens:
        counts.skip(SHORT, source)
        return None
    counts.cut += tokens.is_cut
    counts.truncated += length > limit
    counts.unsupervised_answers += tokens.unsupervised_answers
    return tokens


def _make_chunk(rows: list[tuple[str, Tokens]], counts: Counts) -> pa.RecordBatch:
    """The rows as Arrow columns, numbered on from the samples counted so far."""
    input_ids = np.concatenate([tokens.input_ids for _, tokens in rows])
    loss_mask = np.concatenate([tokens.loss_mask for _, tokens in rows])
    length_S = np.array([len(tokens.input_ids) for _, tokens in rows], np.int32)
    offsets = np.concatenate([[0], np.cumsum(length_S)]).astype(np.int32)
    loss_tokens_S = np.add.reduceat(loss_mask, offsets[:-1], dtype=np.int32)
    begin = counts.samples
    counts.samples += len(rows)
    counts.tokens += len(input_ids)
    counts.loss_tokens += int(loss_tokens_S.sum())
    return pa.RecordBatch.from_arrays(
        [
            pa.array(np.arange(begin, begin + len(rows))),
            pa.array([source for source, _ in rows], pa.string()),
            pa.array(length_S),
            pa.array(loss_tokens_S),
            pa.ListArray.from_arrays(offsets, input_ids),
            pa.ListArray.from_arrays(offsets, loss_mask),
        ],
        schema=SAMPLES,
    )


def _explain_nothing(counts: Counts) -> str:
    found = list_reasons(counts.skipped, counts.first_skipped) or "none could be tokenized"
    return f"No sample is left ({found}): change data.max_length, data.min_answer_tokens or the records."
