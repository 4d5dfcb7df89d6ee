"""Seals: a file of ours carries the hash of its own bytes, so that any flipped bit of it can be found.

A writer leaves `BLANK_SEAL` somewhere near the end (a value in a JSON object, in a parquet footer, a YAML comment);
`seal_bytes` puts the xxh3 of the whole file, taken with the seal blank, in its place. Parquet's own page checksums
would leave footers, headers and unused bytes uncovered, and a list of hashes in another file could be older or newer
than what it speaks of; a seal is replaced with its file in one rename. It costs one hash of the file.
"""

import io
from pathlib import Path
from typing import BinaryIO, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from xxhash import xxh3_64

_MARK, _DIGITS = b"xxh3:", 16
BLANK_SEAL = (_MARK + b"0" * _DIGITS).decode()
_TAIL_BYTES = 1 << 20  # the seal lies in a file's last megabyte
_PIECE_BYTES = 1 << 24

SealState = Literal["whole", "broken", "absent"]


def seal_bytes(data: bytes) -> bytes:
    """`data` with the hash in place of its last blank seal. Raises ValueError if it has none."""
    begin = data.rfind(BLANK_SEAL.encode()) + len(_MARK)
    if begin < len(_MARK) or len(data) - begin > _TAIL_BYTES - len(_MARK):
        raise ValueError("the data have no blank seal in their last megabyte")
    return data[:begin] + xxh3_64(data).hexdigest().encode() + data[begin + _DIGITS :]


def check_seal(file: BinaryIO) -> SealState:
    """Whether the file is as it was sealed, is not, or carries no seal; reads it once, in pieces."""
    size = file.seek(0, io.SEEK_END)
    tail_begin = file.seek(max(0, size - _TAIL_BYTES))
    tail = file.read()
    place = tail.rfind(_MARK)
    if place < 0:
        return "absent"
    begin = tail_begin + place + len(_MARK)
    digits = tail[place + len(_MARK) :][:_DIGITS]
    hasher = xxh3_64()
    file.seek(0)
    _update(hasher, file, begin)
    hasher.update(b"0" * len(file.read(_DIGITS)))
    _update(hasher, file, size - begin - _DIGITS)
    return "whole" if hasher.hexdigest().encode() == digits else "broken"


def check_file(path: Path) -> SealState:
    """`check_seal` of a file by its path. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return check_seal(file)


def read_sealed_table(path: Path) -> pa.Table:
    """The parquet file's rows; a file without a seal, from before there were seals, is taken as it is.

    Raises pa.ArrowException if it is damaged, OSError if it cannot be read.
    """
    data = path.read_bytes()
    if check_seal(io.BytesIO(data)) == "broken":
        raise pa.ArrowInvalid("its bytes are not those that were written")
    return pq.read_table(pa.BufferReader(data))


def _update(hasher: xxh3_64, file: BinaryIO, count: int) -> None:
    while count > 0 and (piece := file.read(min(count, _PIECE_BYTES))):
        hasher.update(piece)
        count -= len(piece)
