"""DeepSpec's target caches: `manifest.json`, `samples.idx` and `shard-<n>.bin`, read as raw ranges of bytes.

Source: deepseek-ai/DeepSpec afdfa7c, deepspec/data/target_cache_dataset.py and scripts/data/prepare_target_cache.py.
An index record is 56 bytes, little-endian and packed: sample id (8), shard (4), length (4), and the byte offsets (8
each) of input_ids (int32), attention_mask (uint8), loss_mask (uint8), target_hidden_states (bfloat16; T, n · hidden)
and target_last_hidden_states (bfloat16, after the final norm), back to back without padding. `target_layer_ids` are
ours (hooks on decoder layers, counted from 0, so before any norm), with −1 for the embedding's output. The manifest is
written last, so a folder without one was never finished.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from dflash_cache.cache.adopt.dump import DumpedSample, SampleError
from dflash_cache.errors import DataError

RECORD = np.dtype([("sample", "<u8"), ("shard", "<u4"), ("length", "<u4"), ("offset", "<u8", (5,))])
_IDS, _MASK, _STATES = 0, 2, 3  # places in `offset`
_KNOWN = {
    "version": 2,
    "hidden_dtype": "bfloat16",
    "token_dtype": "int32",
    "mask_dtype": "uint8",
    "index_record_size": 56,
}


class _Shard(BaseModel):
    """One file of the manifest's list."""

    model_config = ConfigDict(strict=True)

    shard_id: int
    file_name: str


class _Manifest(BaseModel):
    """What is read of `manifest.json` besides what must be as in `_KNOWN`."""

    model_config = ConfigDict(strict=True)

    target_layer_ids: Annotated[list[int], Field(min_length=1)]
    hidden_size: Annotated[int, Field(ge=1)]
    num_samples: Annotated[int, Field(ge=1)]
    shards: list[_Shard]


class DeepSpecDump:
    """A finished target cache of format 2."""

    absent: Sequence[str] = ()
    extra_last_layer = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        manifest = _read_manifest(folder)
        self.layer_ids: tuple[int, ...] | None = tuple(manifest.target_layer_ids)
        if min(self.layer_ids) < 0:
            raise DataError(
                f"{folder} holds the embedding's output (layer −1 of {list(self.layer_ids)}), which is no decoder "
                "layer's output and not held by a cache: dump decoder layers alone."
            )
        self.hidden_size = manifest.hidden_size
        self._shards = {shard.shard_id: shard.file_name for shard in manifest.shards}
        self._sizes = {number: _file_size(folder / name) for number, name in self._shards.items()}
        self._records = _read_index(folder, manifest.num_samples)
        self.names = [f"samples.idx:{row}" for row in range(len(self._records))]

    def open_sample(self, name: str) -> DumpedSample:
        """One record's ids and mask. Raises SampleError if the index points outside its shard."""
        record = self._records[int(name.partition(":")[2])]
        length, width = int(record["length"]), len(self.layer_ids or ()) * self.hidden_size
        end = int(record["offset"][_STATES]) + length * width * torch.bfloat16.itemsize
        if end > self._sizes.get(int(record["shard"]), 0):
            raise SampleError(name, "a shard that is missing or ends too early", f"shard {record['shard']}")

        def read(place: int, dtype: str, count: int) -> np.ndarray:
            return self._read(name, int(record["shard"]), int(record["offset"][place]), np.dtype(dtype), count)

        def load() -> Tensor:
            return torch.from_numpy(read(_STATES, "<u2", length * width)).view(torch.bfloat16).reshape(length, width)

        return DumpedSample(
            input_ids=torch.from_numpy(read(_IDS, "<i4", length)),
            loss_mask=torch.from_numpy(read(_MASK, "u1", length)),
            shape=(length, width),
            dtype=torch.bfloat16,
            load=load,
        )

    def _read(self, name: str, shard: int, offset: int, dtype: np.dtype, count: int) -> np.ndarray:
        try:
            values = np.fromfile(self._folder / self._shards[shard], dtype, count, offset=offset)
        except OSError as error:
            raise SampleError(name, "a shard that cannot be read", f"{self._shards[shard]}: {error.strerror}") from None
        except OverflowError:  # an offset that no file has
            values = np.empty(0, dtype)
        if len(values) < count:  # it has shrunk since it was opened, or the index points at nonsense
            raise SampleError(name, "a shard that is missing or ends too early", f"shard {shard}")
        return values


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _read_manifest(folder: Path) -> _Manifest:
    path = folder / "manifest.json"
    try:
        manifest: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"There is no manifest.json in {folder}: DeepSpec writes it last, so name the folder of a finished target "
            "cache."
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"The manifest {path} cannot be read ({error}): restore it from a copy.") from None
    if not isinstance(manifest, dict):
        raise DataError(f"The manifest {path} does not hold a JSON object: restore it from a copy.")
    known = _KNOWN | dict.fromkeys(("target_layer_ids", "hidden_size", "shards", "num_samples"))
    missing = [key for key in known if key not in manifest]
    different = [f"{key} is {manifest[key]!r}" for key in _KNOWN if key in manifest and manifest[key] != _KNOWN[key]]
    if missing or different:
        what = "; ".join([f"it lacks {key}" for key in missing] + different)
        raise DataError(
            f"{path} is not of the format that is known here, version 2 ({what}): dump again with DeepSpec."
        )
    try:
        return _Manifest.model_validate(manifest)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors()]
        raise DataError(
            f"The manifest {path} has wrong entries ({'; '.join(wrong)}): restore it from a copy."
        ) from None


def _read_index(folder: Path, num_samples: int) -> np.ndarray:
    path = folder / "samples.idx"
    try:
        size, records = path.stat().st_size, np.fromfile(path, RECORD)
    except OSError as error:
        raise DataError(f"The index {path} cannot be read ({error.strerror}): restore it from a copy.") from None
    if size != num_samples * RECORD.itemsize or not np.array_equal(records["sample"], np.arange(num_samples)):
        raise DataError(
            f"The index {path} ({size:,} bytes) does not list the {num_samples:,} samples of the manifest in order: "
            "restore it from a copy."
        )
    return records
