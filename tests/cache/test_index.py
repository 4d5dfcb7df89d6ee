import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dflash_cache.cache.index import (
    SCHEMA,
    cached_rows,
    commit_fragment,
    consolidate,
    index_fingerprint,
    open_index,
    split_columns,
)
from dflash_cache.cache.layout import index_dir
from dflash_cache.errors import CacheError

KILLED_BEFORE_THE_REMOVALS = """
import os, sys
from pathlib import Path
from dflash_cache.cache.index import consolidate
os.unlink = Path.unlink = lambda *_, **__: os._exit(9)
consolidate(Path(sys.argv[1]))
"""


def make_rows(samples: list[int], job: int = 0, **columns: Any) -> Any:
    count = len(samples)
    values = {
        "sample": samples,
        "bucket": [1] * count,
        "shard": [f"bucket-1/shard-{job:06d}.safetensors"] * count,
        "row": [10 * i for i in range(count)],
        "length": [10] * count,
        "loss_tokens": [4] * count,
        "checksum": [2**64 - 1 - sample for sample in samples],
        "job": [job] * count,
    }
    return pa.table(values | columns | {"checksum": pa.array((values | columns)["checksum"], pa.uint64())})


def test_rows_come_back_sorted_by_sample_whatever_the_fragments_order(tmp_path: Path) -> None:
    commit_fragment(tmp_path, make_rows([5, 3], job=8), "a")
    commit_fragment(tmp_path, make_rows([4, 0], job=2), "b")
    table = open_index(tmp_path)
    assert table.schema == SCHEMA
    assert table["sample"].to_pylist() == [0, 3, 4, 5]
    assert table["checksum"].to_pylist() == [2**64 - 1 - sample for sample in (0, 3, 4, 5)]
    columns = split_columns(table)
    assert [columns.shard_names[code] for code in columns.shard] == table["shard"].to_pylist()
    assert cached_rows(tmp_path).equals(table)


def test_consolidation_leaves_one_file_and_the_same_fingerprint(tmp_path: Path) -> None:
    for name, samples in (("b", [7, 1]), ("a", [2, 9]), ("c", [4])):
        commit_fragment(tmp_path, make_rows(samples, job=samples[0]), name)
    before = open_index(tmp_path)
    consolidate(tmp_path)
    assert [path.name for path in index_dir(tmp_path).iterdir()] == ["index.parquet"]
    assert open_index(tmp_path).equals(before)
    assert index_fingerprint(open_index(tmp_path)) == index_fingerprint(before)
    consolidate(tmp_path)
    commit_fragment(tmp_path, make_rows([3], job=3), "a")
    consolidate(tmp_path)
    assert open_index(tmp_path)["sample"].to_pylist() == [1, 2, 3, 4, 7, 9]


def test_a_consolidation_killed_before_it_removed_the_fragments_counts_no_row_twice(tmp_path: Path) -> None:
    commit_fragment(tmp_path, make_rows([1, 2]), "a")
    commit_fragment(tmp_path, make_rows([3, 0], job=1), "b")
    before = open_index(tmp_path)
    done = subprocess.run([sys.executable, "-c", KILLED_BEFORE_THE_REMOVALS, str(tmp_path)], check=False)
    assert done.returncode == 9
    assert len(list(index_dir(tmp_path).iterdir())) == 3
    assert open_index(tmp_path).equals(before)
    consolidate(tmp_path)
    assert len(list(index_dir(tmp_path).iterdir())) == 1
    assert open_index(tmp_path).equals(before)


def test_of_two_rows_of_one_sample_the_same_one_wins_before_and_after_consolidation(tmp_path: Path) -> None:
    commit_fragment(tmp_path, make_rows([1, 2], job=5), "b")
    commit_fragment(tmp_path, make_rows([2, 3], job=4), "a")
    before = open_index(tmp_path)
    assert before["job"].to_pylist() == [5, 4, 4]
    consolidate(tmp_path)
    commit_fragment(tmp_path, make_rows([2], job=9), "0")
    assert open_index(tmp_path).equals(before)


@pytest.mark.parametrize("column", ["shard", "row", "length", "checksum", "sample"])
def test_the_fingerprint_changes_with_each_column_that_places_a_sample(column: str) -> None:
    table = make_rows([1, 2, 3]).cast(SCHEMA)
    changed = pa.array(["bucket-1/other"] * 3) if column == "shard" else pa.array([7, 8, 9])
    i = table.column_names.index(column)
    other = table.set_column(i, SCHEMA.field(i), changed.cast(SCHEMA.field(i).type))
    assert index_fingerprint(table) != index_fingerprint(other)
    assert len(index_fingerprint(table)) == 16


def test_an_absent_or_empty_index_is_refused_but_has_no_cached_rows(tmp_path: Path) -> None:
    words = f"The cache at {tmp_path} holds no samples yet: run `dflash generate` first."
    with pytest.raises(CacheError) as caught:
        open_index(tmp_path)
    assert str(caught.value) == words
    consolidate(tmp_path)
    commit_fragment(tmp_path, make_rows([]).cast(SCHEMA), "a")
    with pytest.raises(CacheError) as caught:
        open_index(tmp_path)
    assert str(caught.value) == words
    assert cached_rows(tmp_path).num_rows == 0


def test_a_fragment_is_never_replaced(tmp_path: Path) -> None:
    commit_fragment(tmp_path, make_rows([1]), "a")
    with pytest.raises(CacheError, match=r"fragment-a\.parquet exists already"):
        commit_fragment(tmp_path, make_rows([2]), "a")
    assert open_index(tmp_path)["sample"].to_pylist() == [1]


def test_a_damaged_index_file_is_named(tmp_path: Path) -> None:
    commit_fragment(tmp_path, make_rows([1]), "a")
    path = index_dir(tmp_path) / "fragment-a.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CacheError, match=rf"The index file {path} is damaged \(.*delete it and run `dflash generate`"):
        open_index(tmp_path)


def test_a_million_rows_open_without_a_loop_over_them(tmp_path: Path) -> None:
    samples = np.random.default_rng(0).permutation(1_000_000)
    names = pa.DictionaryArray.from_arrays(pa.array(samples % 50, pa.int32()), [f"bucket-0/{i}" for i in range(50)])
    constant = np.full(len(samples), 3)
    columns = dict.fromkeys(("bucket", "row", "length", "loss_tokens", "checksum", "job"), constant)
    commit_fragment(tmp_path, pa.table({"sample": samples, "shard": names.cast(pa.string()), **columns}), "a")
    table = open_index(tmp_path)
    assert np.array_equal(table["sample"].to_numpy(), np.arange(1_000_000))
    assert len(split_columns(table).shard_names) == 50
