import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from dflash_cache.cache.files import write_table
from dflash_cache.cache.seal import BLANK_SEAL, check_file, check_seal, read_sealed_table, seal_bytes


def test_a_seal_is_the_hash_of_the_file_with_a_blank_seal() -> None:
    blank = f"a: 1\n# {BLANK_SEAL}\n".encode()
    sealed = seal_bytes(blank)
    assert sealed == f"a: 1\n# xxh3:{xxh3_64_hexdigest(blank)}\n".encode()
    assert check_seal(io.BytesIO(sealed)) == "whole"


@given(st.binary(max_size=60), st.binary(max_size=60), st.data())
def test_any_flipped_bit_of_a_sealed_file_is_found(before: bytes, after: bytes, data: st.DataObject) -> None:
    sealed = bytearray(seal_bytes(before + BLANK_SEAL.encode() + after))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert check_seal(io.BytesIO(sealed)) != "whole"


def test_a_sealed_table_is_plain_parquet_and_every_bit_of_it_is_watched(tmp_path: Path) -> None:
    table = pa.table({"a": np.arange(3), "s": ["xxh3:", BLANK_SEAL, "x"]})
    path = tmp_path / "t.parquet"
    write_table(path, table)
    assert pq.read_table(path).equals(table)
    assert read_sealed_table(path).equals(table)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        assert check_file(path) != "whole"
    path.write_bytes(whole[:-30])
    with pytest.raises(pa.ArrowInvalid, match="its bytes are not those that were written"):
        read_sealed_table(path)


def test_a_file_without_a_seal_is_read_but_known_to_have_none(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2]})
    pq.write_table(table, tmp_path / "t.parquet")
    assert check_file(tmp_path / "t.parquet") == "absent"
    assert read_sealed_table(tmp_path / "t.parquet").equals(table)


def test_a_file_longer_than_a_piece_is_hashed_whole(tmp_path: Path) -> None:
    path = tmp_path / "long"
    sealed = bytearray(seal_bytes(bytes(40_000_000) + BLANK_SEAL.encode()))
    path.write_bytes(sealed)
    assert check_file(path) == "whole"
    sealed[17_000_000] = 1
    path.write_bytes(sealed)
    assert check_file(path) == "broken"


def test_data_without_a_blank_seal_cannot_be_sealed() -> None:
    with pytest.raises(ValueError, match="no blank seal"):
        seal_bytes(b"xxh3:")
