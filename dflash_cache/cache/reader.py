"""The reader: padded batches of samples, read straight from the shards into the batch's own memory.

A sample's hidden states are one contiguous range of its shard, so each is one positioned read into its row of the
padded tensor: no second copy, only the padding is zeroed, and the memory is that of an earlier batch. Coded states are
read into memory of their own and decoded from there into their row. Reads, zeroing, decoding and checksums of large
buffers release the GIL, so threads share one reader and scale. What a reader sees is fixed
when it opens: the index rows then present, named by `fingerprint`.
"""

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from dflash_cache.cache.buffers import BufferPool
from dflash_cache.cache.codec import TORCH_DTYPES, as_bytes, decode_states
from dflash_cache.cache.index import IndexColumns, index_fingerprint, open_index, split_columns
from dflash_cache.cache.layout import Manifest, is_remote, read_manifest
from dflash_cache.cache.remote import RemoteShards
from dflash_cache.cache.shards import ShardLayout
from dflash_cache.cache.storage import DamageError, OpenShards
from dflash_cache.config.settings import RemoteSettings
from dflash_cache.errors import CacheError

_MAX_OPEN_SHARDS = 128
_MAX_IDLE_BUFFERS = 4  # those that wait between two batches; more come back only when the read-ahead shrinks


@dataclass(frozen=True)
class Batch:
    """S samples padded to T tokens, the longest or more, on the CPU.

    sample, length: (S,) int64; input_ids: (S, T) int64, padded with 0; loss_mask: (S, T) bool, padded with False;
    hidden_STLH: in the cache's dtype, padded with 0.
    """

    sample: Tensor
    length: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    hidden_STLH: Tensor


class CacheReader:
    """Random access to a cache's samples; any number of threads may call `read_batch` at once.

    `direct_io` reads past the page cache where that is possible (see `storage`): for caches larger than memory, on
    disks that are faster than the page cache. A URI as `cache_dir` is read through pyarrow.fs, as `remote` says.
    Batches have a multiple of `pad_to` tokens, so that few sizes occur.
    """

    def __init__(
        self,
        cache_dir: Path | str,
        verify_checksums: bool = True,
        direct_io: bool = False,
        remote: RemoteSettings | None = None,
        pad_to: int = 1,
    ) -> None:
        self._shards: OpenShards | RemoteShards
        if is_remote(cache_dir):
            self._shards = RemoteShards(str(cache_dir), remote or RemoteSettings())
        else:
            self._shards = OpenShards(Path(cache_dir), _MAX_OPEN_SHARDS, direct_io)
        self._pad_to = pad_to
        self._manifest = read_manifest(self.tables_dir)
        table = open_index(self.tables_dir)
        self._index = split_columns(table)
        self._fingerprint = index_fingerprint(table)
        self._verify_checksums = verify_checksums
        self._states = self._manifest.states
        self._buffers = BufferPool(_MAX_IDLE_BUFFERS)
        self._coded_buffers = BufferPool(_MAX_IDLE_BUFFERS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all shards, each as soon as no read uses it."""
        self._shards.close()

    @property
    def tables_dir(self) -> Path:
        """Where manifest and index lie: the cache itself, or the local copy of a remote one's."""
        return self._shards.tables_dir

    @property
    def manifest(self) -> Manifest:
        """What the cache holds and what it was made from."""
        return self._manifest

    @property
    def index(self) -> IndexColumns:
        """The index, one position a sample."""
        return self._index

    @property
    def fingerprint(self) -> str:
        """Identifies the set of samples, and their bits, that this reader sees."""
        return self._fingerprint

    def read_batch(self, rows: np.ndarray) -> Batch:
        """The samples at these positions of the index, in this order.

        The states' memory is used again when the last tensor that looks into it is gone. Raises CacheError, naming
        shard and sample, on a missing or damaged shard or a wrong checksum; IndexError on a position outside the
        index.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if rows.ndim != 1 or len(rows) == 0 or rows.min() < 0:
            raise IndexError(f"read_batch needs a one-dimensional array of positions from 0, got {rows}")
        length = self._index.length[rows].astype(np.int64)
        S, T, states = len(rows), -(-int(length.max()) // self._pad_to) * self._pad_to, self._states
        ids = np.zeros((S, T), dtype="<i4")
        mask = np.zeros((S, T), dtype=np.uint8)
        hidden_STLH = self._buffers.lend((S, T, states.num_layers, states.hidden_size), TORCH_DTYPES[states.dtype])
        coded = None
        if states.codec != "raw":
            coded = as_bytes(self._coded_buffers.lend((T * states.token_bytes,), torch.uint8))
        # In the order of their places on the disk, whatever their order in the batch.
        for s in np.lexsort((self._index.row[rows], self._index.shard[rows])).tolist():
            n = int(length[s])
            hidden_STLH[s, n:].zero_()
            self._read_sample(int(rows[s]), hidden_STLH[s, :n], coded, ids[s, :n], mask[s, :n])
        return Batch(
            sample=torch.from_numpy(self._index.sample[rows]),
            length=torch.from_numpy(length),
            input_ids=torch.from_numpy(ids.astype(np.int64)),
            loss_mask=torch.from_numpy(mask != 0),
            hidden_STLH=hidden_STLH,
        )

    def _read_sample(
        self, row: int, hidden_TLH: Tensor, coded: np.ndarray | None, ids: np.ndarray, mask: np.ndarray
    ) -> None:
        """Fill one sample's part of the batch, by way of `coded` if states are, and compare its checksum."""
        shard = self._index.shard_names[self._index.shard[row]]
        begin = int(self._index.row[row])
        try:
            with self._shards.borrow(shard) as opened:
                check_layout(opened.layout, self._manifest, begin + len(ids))
                stored = as_bytes(hidden_TLH) if coded is None else coded[: len(ids) * self._states.token_bytes]
                found = opened.read_sample(begin, stored, ids, mask, self._verify_checksums)
            if found is not None and found != int(self._index.checksum[row]):
                raise DamageError("its checksum is not the index's")
            if coded is not None:
                decode_states(self._states, stored, hidden_TLH)
        except (DamageError, OSError) as error:
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            raise CacheError(
                f"Sample {self._index.sample[row]} cannot be read from shard {shard} of {self._shards.place} "
                f"({reason}): restore the shard from a copy, or run `dflash verify --full --repair` and then "
                "`dflash generate`, which redoes what is damaged."
            ) from None


def check_layout(layout: ShardLayout, manifest: Manifest, end: int) -> None:
    """Raise DamageError if the shard is not one of this manifest's, or ends before token `end`."""
    if layout.states != manifest.states:
        found, expected = astuple(layout.states), astuple(manifest.states)
        raise DamageError(f"the shard holds layers, hidden size, dtype and codec {found}, the manifest says {expected}")
    if end > layout.num_tokens:
        raise DamageError(f"the shard holds {layout.num_tokens:,} tokens, the index points up to {end:,}")
