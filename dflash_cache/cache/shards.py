"""Shards: safetensors files of whole samples back to back, written as a stream.

safetensors has no streaming writer, so this one reserves the header, writes hidden states as they come, keeps the few
bytes of ids and masks (5 a token, against 40,960 for five layers of 4,096 in bf16) until the end, patches the
header and publishes. Tensors, in file order: `hidden_states` (tokens, layers, hidden), or (tokens, layers, bytes) uint8
if a codec is set, `input_ids` (tokens) int32, `loss_mask` (tokens) uint8; little-endian, token-major, no padding. Data
begins at byte 4,096, so that rows of a multiple of 4,096 bytes stay on pages. Any safetensors reader can open the file.
"""

import json
import math
import os
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64

from dflash_cache.cache.codec import TORCH_DTYPES, encode_states
from dflash_cache.cache.files import atomic_file, explain_write_errors, write_all
from dflash_cache.cache.layout import FORMAT_VERSION
from dflash_cache.cache.state_format import StateFormat
from dflash_cache.config.dtypes import Codec, Dtype
from dflash_cache.errors import CacheError

_WRITEBACK_BYTES = 8 << 20
ID_BYTES, MASK_BYTES = 4, 1  # of one token, beside its hidden states
DATA_BEGIN = 4096  # bytes: 8 for the header's length, the rest JSON and spaces
_DTYPES: dict[str, Dtype] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "U8": 1}


class ShardWriter:
    """Writes one shard; it appears under `path` at `commit`, whole, or never.

    A context manager: leaving it without `commit`, by an exception or not, leaves nothing. `path` is replaced if it
    exists (an uncommitted job's shard, redone). Disk errors raise WriteError.
    """

    def __init__(self, path: Path, bucket: int, states: StateFormat) -> None:
        self._path = path
        self._bucket = bucket
        self._states = states
        self._num_tokens = 0
        self._advised = 0  # bytes that the kernel was asked to write
        self._ids: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._publication = ExitStack()
        self._file: FileIO | None = None

    def __enter__(self) -> Self:
        self._file = self._publication.enter_context(atomic_file(self._path))
        with explain_write_errors(self._path):
            self._file.seek(DATA_BEGIN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file = None
        # Nothing is left to publish after `commit`; before it, any exception makes the file vanish.
        self._publication.__exit__(_AbandonedError, _AbandonedError(), None)

    @property
    def num_tokens(self) -> int:
        """Tokens appended so far."""
        return self._num_tokens

    @property
    def num_bytes(self) -> int:
        """Size the file would have if it were committed now."""
        return DATA_BEGIN + self._num_tokens * (self._states.token_bytes + ID_BYTES + MASK_BYTES)

    def append(self, input_ids_T: Tensor, loss_mask_T: Tensor, hidden_TLH: Tensor) -> tuple[int, int]:
        """Write one sample; returns its token offset in the shard and its checksum (see `checksum_sample`).

        Ids are int32 or int64, the mask is bool or uint8, hidden states have the shard's dtype; those on the CPU and
        contiguous are written without a copy if no codec is set, and are coded here otherwise. Device tensors are
        fetched here (a device synchronisation).
        """
        if self._file is None:
            raise ValueError("append needs an open writer: use `with ShardWriter(...)`, and append before commit")
        self._check(input_ids_T, loss_mask_T, hidden_TLH)
        ids = input_ids_T.to("cpu", torch.int32).numpy().astype("<i4")  # a copy: kept until commit
        mask = loss_mask_T.to("cpu", torch.bool).numpy().astype(np.uint8)
        hidden = encode_states(self._states, hidden_TLH)
        with explain_write_errors(self._path):
            write_all(self._file, hidden.data)
            self._start_writeback()
        row = self._num_tokens
        self._ids.append(ids)
        self._masks.append(mask)
        self._num_tokens += len(ids)
        return row, checksum_sample(hidden, ids, mask)

    def cut(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens (whole samples), and drop what a failed `append` left behind them."""
        if self._file is None or num_tokens > self._num_tokens:
            raise ValueError("cut needs an open writer, and no more tokens than it holds")
        while self._num_tokens > num_tokens:
            self._num_tokens -= len(self._ids.pop())
            self._masks.pop()
        if self._num_tokens < num_tokens:
            raise ValueError(f"{num_tokens} tokens are not a number of whole samples")
        with explain_write_errors(self._path):
            self._file.seek(DATA_BEGIN + num_tokens * self._states.token_bytes)
            self._file.truncate()
        self._advised = min(self._advised, DATA_BEGIN + num_tokens * self._states.token_bytes)

    def commit(self) -> None:
        """Complete the file, flush it to disk and give it its name."""
        if self._file is None:
            raise ValueError("commit needs an open writer, and only once")
        if not self._num_tokens:
            raise ValueError("a shard without samples cannot be committed")
        metadata = shard_metadata(self._bucket, self._states)
        header = encode_header(list_tensors(self._states, self._num_tokens), metadata)
        with explain_write_errors(self._path):
            write_all(self._file, np.concatenate(self._ids).view(np.uint8).data)
            write_all(self._file, np.concatenate(self._masks).data)
            self._file.seek(0)
            write_all(self._file, memoryview(header))
        self._file = None
        self._publication.close()

    def _start_writeback(self) -> None:
        """Have the kernel write to disk now what would else wait for the flush at `commit` (Linux does so on this
        advice): 120 MB were flushed in 2 ms instead of 70, and other files keep their place in the page cache."""
        assert self._file is not None
        end = self._file.tell()
        if end - self._advised >= _WRITEBACK_BYTES and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), self._advised, end - self._advised, os.POSIX_FADV_DONTNEED)
            self._advised = end

    def _check(self, input_ids_T: Tensor, loss_mask_T: Tensor, hidden_TLH: Tensor) -> None:
        T = len(input_ids_T)
        shapes = tuple(input_ids_T.shape), tuple(loss_mask_T.shape), tuple(hidden_TLH.shape)
        expected = (T,), (T,), (T, self._states.num_layers, self._states.hidden_size)
        if shapes != expected or T == 0:
            raise ValueError(f"a sample's ids, mask and hidden states have shapes {shapes}, expected {expected}, T > 0")
        if hidden_TLH.dtype != TORCH_DTYPES[self._states.dtype]:
            raise ValueError(f"hidden states are {hidden_TLH.dtype}, the shard holds {self._states.dtype}")


class _AbandonedError(Exception):
    """Ends a publication that was not committed; never leaves this module."""


@dataclass(frozen=True)
class ShardLayout:
    """Where a shard's tensors lie: how its states are stored, its tokens; begins are byte offsets in the file."""

    states: StateFormat
    num_tokens: int
    hidden_begin: int
    ids_begin: int
    mask_begin: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's hidden states as stored."""
        return self.states.token_bytes


def read_layout(descriptor: int) -> ShardLayout:
    """The layout of an open shard, from its own header, checked against the file's size.

    Raises ValueError, saying what is wrong, if it is not a whole shard of ours; OSError if it cannot be read.
    """
    return parse_layout(os.pread(descriptor, DATA_BEGIN, 0), os.fstat(descriptor).st_size)


def parse_layout(head: bytes, size: int) -> ShardLayout:
    """The same from a shard's first 4,096 bytes and its size."""
    header_bytes = int.from_bytes(head[:8], "little")
    if len(head) < 8 or header_bytes > DATA_BEGIN - 8:
        raise ValueError("it does not begin with a shard's header")
    try:
        header = json.loads(head[8 : 8 + header_bytes])
        hidden, ids, mask = (header[name] for name in ("hidden_states", "input_ids", "loss_mask"))
        states, num_tokens = _read_state_format(header), hidden["shape"][0]
        begins = [8 + header_bytes + tensor["data_offsets"][0] for tensor in (hidden, ids, mask)]
        end = max(8 + header_bytes + tensor["data_offsets"][1] for tensor in (hidden, ids, mask))
        tensors = {name: (header[name]["dtype"], header[name]["shape"]) for name in header if name != "__metadata__"}
        expected = list_tensors(states, num_tokens)
        sound = tensors == expected and place_tensors(expected) == {n: header[n]["data_offsets"] for n in expected}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise ValueError("its header is damaged") from None
    if not sound:
        raise ValueError("its tensors are not a shard's")
    if size != end:
        raise ValueError(f"it has {size:,} bytes instead of {end:,}")
    return ShardLayout(states, num_tokens, *begins)


def list_tensors(states: StateFormat, num_tokens: int) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of a shard's tensors, in file order."""
    code, token_shape = states.stored_tensor
    return {
        "hidden_states": (code, [num_tokens, *token_shape]),
        "input_ids": ("I32", [num_tokens]),
        "loss_mask": ("U8", [num_tokens]),
    }


def shard_metadata(bucket: int, states: StateFormat) -> dict[str, str]:
    """What a shard's header says of itself; with a codec also what its rows of bytes hold."""
    metadata = {"format": "dflash-cache", "version": str(FORMAT_VERSION), "bucket": str(bucket)}
    if states.codec == "raw":
        return metadata
    return metadata | {"codec": states.codec, "dtype": states.dtype, "hidden_size": str(states.hidden_size)}


def _read_state_format(header: dict[str, Any]) -> StateFormat:
    """Raises KeyError, ValueError or TypeError if the header is not a shard's."""
    (_, num_layers, width), metadata = header["hidden_states"]["shape"], header.get("__metadata__", {})
    if "codec" not in metadata:
        return StateFormat(num_layers, width, _DTYPES[header["hidden_states"]["dtype"]])
    codec, dtype = metadata["codec"], metadata["dtype"]
    if codec not in get_args(Codec) or dtype not in get_args(Dtype):
        raise ValueError(f"unknown codec {codec} of {dtype}")
    return StateFormat(num_layers, int(metadata["hidden_size"]), dtype, codec)


def encode_header(tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str]) -> bytes:
    """The first 4,096 bytes of a safetensors file whose tensors (dtype code, shape) lie back to back in dict order."""
    offsets = place_tensors(tensors)
    header: dict[str, Any] = {"__metadata__": metadata}
    for name, (code, shape) in tensors.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": offsets[name]}
    text = json.dumps(header, separators=(",", ":")).encode()
    room = DATA_BEGIN - 8
    if len(text) > room:
        raise CacheError(f"A shard's header has {len(text):,} bytes and must fit into {room:,}: shorten its metadata.")
    return room.to_bytes(8, "little") + text.ljust(room)


def place_tensors(tensors: dict[str, tuple[str, list[int]]]) -> dict[str, list[int]]:
    """Begin and end of each tensor in bytes from the first data byte, back to back in dict order."""
    offsets, begin = {}, 0
    for name, (code, shape) in tensors.items():
        end = begin + math.prod(shape) * _ITEM_BYTES[code]
        offsets[name], begin = [begin, end], end
    return offsets


def checksum_sample(hidden_bytes: np.ndarray, ids: np.ndarray, mask: np.ndarray) -> int:
    """xxh3-64 over a sample as stored: hidden bytes, then ids (int32), then mask (uint8); contiguous arrays."""
    hasher = xxh3_64(hidden_bytes.data)  # releases the GIL for large buffers
    hasher.update(ids.view(np.uint8).data)
    hasher.update(mask.data)
    return hasher.intdigest()
