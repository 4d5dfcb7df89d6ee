from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.config.settings import DrafterSettings
from dflash_cache.drafter.mask_token import check_unused, choose_mask_token, list_candidates
from dflash_cache.errors import ConfigError


def test_the_first_row_without_a_token_is_the_best_then_special_tokens_from_the_last() -> None:
    assert list_candidates(12, 9, [0, 1, 8, 7], np.array([3, 4])) == [9, 10, 11, 8, 7, 1, 0]


def test_qwen3s_is_the_published_one() -> None:
    # z-lab's Qwen3 drafters have mask_token_id 151669: 151,936 rows, tokens up to 151,668
    assert list_candidates(151_936, 151_669, range(151_643, 151_669), np.array([5, 151_645]))[0] == 151_669


def test_ids_that_occur_in_the_data_are_no_candidates() -> None:
    assert list_candidates(10, 9, [1, 8], np.array([9, 8, 2])) == [1]
    assert list_candidates(9, 9, [1, 8], np.array([1, 8])) == []


def test_a_special_token_beyond_the_embedding_is_no_candidate() -> None:
    assert list_candidates(8, 10, [1, 8, 9], np.array([], dtype=np.int64)) == [1]


@given(
    vocab_size=st.integers(1, 60),
    num_tokens=st.integers(1, 60),
    data=st.data(),
)
def test_candidates_are_unused_ids_of_the_embedding_and_sixteen_at_most(
    vocab_size: int, num_tokens: int, data: st.DataObject
) -> None:
    special = data.draw(st.sets(st.integers(0, num_tokens - 1)))
    used = data.draw(st.sets(st.integers(0, vocab_size - 1)))
    found = list_candidates(vocab_size, num_tokens, special, np.array(sorted(used), dtype=np.int64))
    usable = {i for i in range(vocab_size) if i not in used and (i >= num_tokens or i in special)}
    assert set(found) <= usable
    assert len(found) == len(set(found)) == min(16, len(usable))


def test_the_best_candidate_is_chosen_unless_the_setting_names_an_id() -> None:
    assert choose_mask_token(DrafterSettings(), 100, [42, 7]) == 42
    assert choose_mask_token(DrafterSettings(mask_token_id=7), 100, [42]) == 7
    assert choose_mask_token(DrafterSettings(mask_token_id=0), 100, [42]) == 0
    assert choose_mask_token(DrafterSettings(mask_token_id=99), 100, []) == 99


def test_an_id_outside_the_embedding_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_mask_token(DrafterSettings(mask_token_id=100), 100, [42])
    assert str(caught.value) == "drafter.mask_token_id is 100, but the target's embedding has 100 rows."


def test_no_candidate_at_all_is_told_with_what_to_set() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_mask_token(DrafterSettings(), 100, [])
    assert str(caught.value) == (
        "Every special token occurs in the data; set drafter.mask_token_id to an id that does not."
    )


def test_an_id_that_a_sample_holds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    for name, ids in (("samples", [[1, 2], [3]]), ("samples_000001", [[4, 5, 6]])):
        pq.write_table(
            pa.table({"input_ids": pa.array(ids, pa.list_(pa.int32()))}), tmp_path / f"samples/{name}.parquet"
        )
    for used in (1, 3, 6):
        with pytest.raises(
            ConfigError, match=rf"mask_token_id is {used}, but the data contains .* 9, say, does not occur"
        ):
            check_unused(used, [9, 8], tmp_path)
    for unused in (0, 7, 8, 9):
        check_unused(unused, [9, 8], tmp_path)
    check_unused(6, [], tmp_path / "elsewhere")  # the tables of a remote cache hold no samples
