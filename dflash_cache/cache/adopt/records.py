"""Dumps of one `torch.save` file a sample: SpecForge's `.ckpt` and `.ckpt.gz`, Model Optimizer's `.pt`.

Both are dictionaries of tensors, read without running what they pickle (`weights_only`).

- SpecForge (sgl-project/SpecForge a6b6b02, scripts/prepare_hidden_states.py, specforge/algorithms/*/providers.py):
  `rows_<a>-<b>/data_<i>.ckpt` with `input_ids` (T), `loss_mask` (T) and (1, T, n · hidden) under `hidden_states`
  (DFlash, Domino, DSpark) or `aux_hidden_state` (EAGLE-3, whose `hidden_state` is the last one, after the final norm).
  Layer ids are ours: SGLang's `set_*_layers_to_capture` adds the one itself. Batches are padded with zeros before the
  forward and no attention mask is kept, so a record ends in padding that looks like tokens: trailing zeros outside
  the mask are cut off, which changes no other position of a causal model.
- Model Optimizer (NVIDIA/Model-Optimizer a2fbac7, examples/speculative_decoding/collect_hidden_states):
  `<conversation_id>.pt` with `input_ids` (T), `aux_hidden_states` (T, n · hidden), `hidden_states` (T, hidden; the
  last one, before or after the norm by dumper), `loss_mask` (T; absent from TensorRT-LLM's and older dumps, all ones
  without `--answer-only-loss`). Its HF dumper's `--aux-layers` are ours; its vLLM dumper hands the same numbers to
  vLLM, where they mean one layer less.
"""

import gzip
import pickle
import zlib
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from dflash_cache.cache.adopt.dump import DumpedSample, SampleError, natural_key
from dflash_cache.errors import DataError

_GZIP = ".gz"


class RecordDump:
    """A folder of record files, at any depth, in the order of the numbers in their names."""

    absent: Sequence[str] = ()
    layer_ids: tuple[int, ...] | None = None
    extra_last_layer = False

    def __init__(self, folder: Path, suffixes: tuple[str, ...], state_keys: tuple[str, ...], padded: bool) -> None:
        self._folder = folder
        self._state_keys = state_keys
        self._padded = padded
        paths = (path for path in folder.rglob("*") if path.name.endswith(suffixes) and path.is_file())
        self.names: list[str] = sorted((str(path.relative_to(folder)) for path in paths), key=natural_key)
        if not self.names:
            raise DataError(f"There is no {' or '.join(suffixes)} file in {folder}: name the folder of the dump.")
        _refuse_doubles(folder, self.names)

    def open_sample(self, name: str) -> DumpedSample:
        """The record, its tensors mapped. Raises SampleError if it is damaged or holds code, DataError without mask."""
        record = self._read(name, mapped=True)
        key = next((key for key in self._state_keys if key in record), None)
        if key is None or "input_ids" not in record:
            raise SampleError(
                name,
                f"a record without input_ids or {' or '.join(self._state_keys)}",
                f"it holds {', '.join(map(str, record))}",
            )
        if "loss_mask" not in record:
            raise DataError(
                f"{self._folder / name} holds no loss_mask, so nothing says which tokens are the answer's: dump again "
                "with one (Model Optimizer's HF and vLLM dumpers write it with --answer-only-loss)."
            )
        input_ids, loss_mask, states = (self._tensor(name, record, each) for each in ("input_ids", "loss_mask", key))
        shape = tuple(states.shape[1:] if states.ndim == 3 and states.shape[0] == 1 else states.shape)
        length = shape[0] if shape else 0
        if self._padded and input_ids.shape == loss_mask.shape == (length,):
            length = _trim_padding(input_ids, loss_mask)
        return DumpedSample(
            input_ids=input_ids[:length] if self._padded else input_ids,
            loss_mask=loss_mask[:length] if self._padded else loss_mask,
            shape=(length, *shape[1:]),
            dtype=states.dtype,
            load=lambda: self._tensor(name, self._read(name, mapped=False), key).reshape(shape)[:length],
        )

    def _read(self, name: str, mapped: bool) -> dict[str, Any]:
        path = self._folder / name
        try:
            if name.endswith(_GZIP):
                with gzip.open(path) as stream:  # no random access: a record is inflated whole
                    record = torch.load(BytesIO(stream.read()), map_location="cpu", weights_only=True)
            else:
                record = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and is_zipfile(path))
        except pickle.UnpicklingError:
            raise SampleError(
                name, "pickled objects other than tensors and plain values (never run), or damage"
            ) from None
        except (RuntimeError, OSError, EOFError, ValueError, KeyError, zlib.error) as error:
            lines = str(error).splitlines()
            raise SampleError(name, "a damaged file", lines[0] if lines else type(error).__name__) from None
        if not isinstance(record, dict):
            raise SampleError(name, "no record", f"it holds a {type(record).__name__}")
        return record

    def _tensor(self, name: str, record: dict[str, Any], key: str) -> Tensor:
        try:
            tensor = torch.as_tensor(record[key])
        except (KeyError, TypeError, ValueError, RuntimeError):
            raise SampleError(name, f"no tensor as {key}") from None
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise SampleError(name, f"a tensor of another kind than plain numbers as {key}")
        return tensor


def open_specforge(folder: Path) -> RecordDump:
    """SpecForge's records. Raises DataError if there are none."""
    return RecordDump(folder, (".ckpt", ".ckpt.gz"), ("aux_hidden_state", "hidden_states"), padded=True)


def open_modelopt(folder: Path) -> RecordDump:
    """Model Optimizer's records. Raises DataError if there are none."""
    return RecordDump(folder, (".pt",), ("aux_hidden_states",), padded=False)


def _refuse_doubles(folder: Path, names: list[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.removesuffix(_GZIP), name)
        if other != name:
            raise DataError(f"{folder} holds the same sample twice, in {other} and {name}: remove one of the two.")


def _trim_padding(input_ids: Tensor, loss_mask: Tensor) -> int:
    """How many tokens are left without the trailing zeros outside the mask (all of them if nothing else is there)."""
    real = ((input_ids != 0) | (loss_mask != 0)).nonzero()
    return int(real[-1]) + 1 if len(real) else len(input_ids)
