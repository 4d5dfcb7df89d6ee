from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.config.settings import DataSettings
from dflash_cache.data.conversations import RecordError
from dflash_cache.data.samples import LONG, SAMPLES, SHORT, build_samples, sample_tokens
from dflash_cache.data.templates import Tokens
from dflash_cache.errors import DataError


def make_tokens(length: int, answer: int, unsupervised_answers: int = 0) -> Tokens:
    """`length` distinct ids, the last `answer` of them supervised."""
    return Tokens(np.arange(length, dtype=np.int32) + 100, np.arange(length) >= length - answer, unsupervised_answers)


def settings(**changes: object) -> DataSettings:
    return DataSettings.model_validate({"paths": ["a.jsonl"], "max_length": 8, "min_answer_tokens": 2} | changes)


def test_samples_are_numbered_in_order_and_keep_their_ids_mask_and_source() -> None:
    table, counts = build_samples([("a:1", make_tokens(5, 2)), ("a:7", make_tokens(8, 3))], settings())
    assert table.schema == SAMPLES
    assert table.to_pylist() == [
        {
            "sample": 0,
            "source": "a:1",
            "length": 5,
            "loss_tokens": 2,
            "input_ids": [100, 101, 102, 103, 104],
            "loss_mask": [False, False, False, True, True],
        },
        {
            "sample": 1,
            "source": "a:7",
            "length": 8,
            "loss_tokens": 3,
            "input_ids": [100, 101, 102, 103, 104, 105, 106, 107],
            "loss_mask": [False] * 5 + [True] * 3,
        },
    ]
    assert (counts.samples, counts.tokens, counts.loss_tokens, counts.skipped) == (2, 13, 5, {})


def test_overlong_samples_are_dropped_and_counted() -> None:
    rows = [("a:1", make_tokens(9, 4)), ("a:2", make_tokens(8, 4)), ("a:3", make_tokens(20, 4))]
    table, counts = build_samples(rows, settings())
    assert table["source"].to_pylist() == ["a:2"]
    assert counts.skipped == {"longer than data.max_length": 2}
    assert counts.first_skipped == {"longer than data.max_length": "a:1"}
    assert counts.truncated == 0


def test_truncated_samples_lose_their_end_and_those_left_without_answer_are_left_out() -> None:
    rows = [("a:1", make_tokens(10, 5, 1)), ("a:2", make_tokens(10, 3, 1)), ("a:3", make_tokens(8, 2))]
    table, counts = build_samples(rows, settings(overlong="truncate"))
    assert table["source"].to_pylist() == ["a:1", "a:3"]
    assert table["length"].to_pylist() == [8, 8]
    assert table["loss_tokens"].to_pylist() == [3, 2]
    assert sample_tokens(table, 0)[0].tolist() == list(range(100, 108))
    assert counts.skipped == {"fewer supervised tokens than data.min_answer_tokens": 1}
    assert counts.first_skipped == {"fewer supervised tokens than data.min_answer_tokens": "a:2"}
    assert counts.truncated == 1
    assert counts.unsupervised_answers == 1  # of the samples kept


def test_samples_cut_at_a_turn_are_counted_apart_and_what_no_cut_made_fit_is_dropped() -> None:
    cut = replace(make_tokens(6, 2), is_cut=True)
    rows = [("a:1", cut), ("a:2", make_tokens(9, 4)), ("a:3", make_tokens(8, 2)), ("a:4", cut)]
    table, counts = build_samples(rows, settings(overlong="cut-turn"))
    assert table["source"].to_pylist() == ["a:1", "a:3", "a:4"]
    assert (counts.cut, counts.truncated, counts.skipped) == (2, 0, {"longer than data.max_length": 1})


@pytest.mark.parametrize("overlong", ["drop", "cut-turn", "truncate"])
def test_strict_stops_at_an_overlong_sample(overlong: str) -> None:
    rows = [("a.jsonl:1", make_tokens(8, 2)), ("a.jsonl:2", make_tokens(9, 2))]
    with pytest.raises(RecordError) as caught:
        build_samples(rows, settings(strict=True, overlong=overlong))
    assert str(caught.value) == (
        "a.jsonl:2 cannot be used (longer than data.max_length: 9 tokens, at most 8): raise data.max_length, shorten "
        "the record, or set data.strict to false to handle it as data.overlong says."
    )


def test_no_sample_left_is_told_with_the_reasons() -> None:
    rows = [("a:1", make_tokens(9, 2)), ("a:2", make_tokens(8, 1)), ("a:3", make_tokens(9, 2))]
    with pytest.raises(DataError) as caught:
        build_samples(rows, settings())
    assert str(caught.value) == (
        "No sample is left (2 longer than data.max_length, first a:1; 1 fewer supervised tokens than "
        "data.min_answer_tokens, first a:2): change data.max_length, data.min_answer_tokens or the records."
    )
    with pytest.raises(DataError) as caught:
        build_samples([], settings())
    assert str(caught.value) == (
        "No sample is left (none could be tokenized): change data.max_length, data.min_answer_tokens or the records."
    )


@pytest.mark.parametrize("chunk", [(1, 1 << 20), (3, 1 << 20), (100, 7)])
def test_chunks_cannot_be_seen_in_the_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chunk: tuple[int, int]
) -> None:
    rows = [(f"a:{i}", make_tokens(3 + i % 6, 2)) for i in range(10)]
    whole, counts = build_samples(rows, settings())
    assert whole["sample"].num_chunks == 1
    monkeypatch.setattr("dflash_cache.data.samples._CHUNK_ROWS", chunk[0])
    monkeypatch.setattr("dflash_cache.data.samples._CHUNK_TOKENS", chunk[1])
    cut, cut_counts = build_samples(iter(rows), settings())
    assert cut["sample"].num_chunks > 1
    assert cut.combine_chunks().equals(whole.combine_chunks())
    assert cut_counts == counts
    pq.write_table(cut, tmp_path / "samples.parquet")
    read = pq.read_table(tmp_path / "samples.parquet")
    assert read.schema.equals(SAMPLES)
    for table in (cut, read):
        for i, (_, tokens) in enumerate(rows):
            ids, mask = sample_tokens(table, i)
            assert (str(ids.dtype), str(mask.dtype)) == ("int32", "bool")
            assert ids.tolist() == tokens.input_ids.tolist()
            assert mask.tolist() == tokens.loss_mask.tolist()


ROWS = st.lists(
    st.integers(1, 30).flatmap(lambda length: st.lists(st.booleans(), min_size=length, max_size=length)), max_size=30
)


@given(ROWS, st.integers(1, 30), st.integers(1, 4), st.sampled_from(["drop", "truncate"]))
def test_every_conversation_is_in_the_table_or_counted(
    masks: list[list[bool]], max_length: int, least: int, overlong: str
) -> None:
    def rows() -> Iterator[tuple[str, Tokens]]:
        for i, mask in enumerate(masks):
            yield str(i), Tokens(np.arange(len(mask), dtype=np.int32), np.array(mask))

    expected, skipped = [], {LONG: 0, SHORT: 0}
    for i, mask in enumerate(masks):
        if len(mask) > max_length and overlong == "drop":
            skipped[LONG] += 1
        elif sum(mask[:max_length]) < least:
            skipped[SHORT] += 1
        else:
            expected.append((str(i), mask[:max_length]))
    chosen = settings(max_length=max_length, min_answer_tokens=least, overlong=overlong)
    if not expected:
        with pytest.raises(DataError):
            build_samples(rows(), chosen)
        return
    table, counts = build_samples(rows(), chosen)
    assert list(zip(table["source"].to_pylist(), table["loss_mask"].to_pylist(), strict=True)) == expected
    assert counts.skipped == {reason: count for reason, count in skipped.items() if count}
    assert counts.samples + sum(counts.skipped.values()) == len(masks)
    assert table["sample"].to_pylist() == list(range(counts.samples))


def test_reading_a_sample_copies_no_ids() -> None:
    table, _ = build_samples([("a:1", make_tokens(5, 2)), ("a:2", make_tokens(6, 2))], settings())
    values = table["input_ids"].chunk(0).values
    assert isinstance(values, pa.Int32Array)
    ids, _ = sample_tokens(table, 1)
    assert np.shares_memory(ids, values.to_numpy())
    assert not ids.flags.writeable
