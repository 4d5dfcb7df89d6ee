"""Dumps of vLLM's and speculators' offline files: `hs_<i>.safetensors` beside an Arrow dataset with the loss masks.

Sources: vllm-project/speculators c05b95b (scripts/data_generation_offline.py and prepare_data.py,
src/speculators/train/data.py, hs_connectors/transfer.py) and vLLM's example_hidden_states_connector.py. File i holds
`hidden_states` (T, layers, hidden) and `token_ids` (T) of row i of the dataset that prepare_data.py left with
`save_to_disk`: IPC stream files listed in `state.json`, columns `input_ids`, `loss_mask`. By default the dataset's
folder has the files in `hidden_states/`. speculators asks vLLM for the last layer besides (`--include-last-layer`),
as the last one of each file. vLLM numbers a state by the layer that it enters (one more than ours), and takes it
before the final norm, the last one too.
"""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_cache.cache.adopt.dump import DumpedSample, SampleError
from dflash_cache.errors import DataError

_FILE = re.compile(r"hs_(\d+)\.safetensors")
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class VllmDump:
    """The files in `folder` (or its `hidden_states`), row by row of the dataset in `dataset` (or beside them)."""

    layer_ids: tuple[int, ...] | None = None
    extra_last_layer = True

    def __init__(self, folder: Path, dataset: Path | None) -> None:
        self._folder = folder / "hidden_states" if (folder / "hidden_states").is_dir() else folder
        self._dataset = dataset or (folder if any(folder.glob("*.arrow")) else folder.parent)
        self._rows = _read_dataset(self._dataset)
        found = sorted(
            int(match[1]) for path in self._folder.iterdir() if (match := _FILE.fullmatch(path.name)) is not None
        )
        if not found:
            raise DataError(f"There is no hs_<i>.safetensors in {self._folder}: name the folder of the dump.")
        if found[-1] >= self._rows.num_rows:
            raise DataError(
                f"The dump has {_name(found[-1])}, but the dataset {self._dataset} ends with row "
                f"{self._rows.num_rows - 1}: name the dataset that the states were made from with --dataset."
            )
        self.names = [_name(row) for row in found]
        held = set(found)
        self.absent = [_name(row) for row in range(self._rows.num_rows) if row not in held]

    def open_sample(self, name: str) -> DumpedSample:
        """File and row of one sample. Raises SampleError if the file is damaged or holds other tokens than the row."""
        row = int(name.removeprefix("hs_").removesuffix(".safetensors"))
        expected_ids = torch.from_numpy(self._rows["input_ids"][row].values.to_numpy().copy())
        loss_mask = torch.from_numpy(self._rows["loss_mask"][row].values.to_numpy(zero_copy_only=False).copy())
        try:
            with safe_open(self._folder / name, "pt") as file:
                input_ids = file.get_tensor("token_ids")
                states = file.get_slice("hidden_states")
                shape, code = tuple(states.get_shape()), states.get_dtype()
        except (SafetensorError, OSError) as error:
            raise SampleError(name, "a damaged file, or none of hidden states", str(error)) from None
        if not torch.equal(input_ids.to(torch.int64), expected_ids.to(torch.int64)):
            raise SampleError(
                name,
                "other tokens than the dataset's",
                f"{input_ids.numel()} in the file, {len(expected_ids)} in row {row}",
            )
        if code not in _DTYPES:
            raise SampleError(name, f"states in a dtype that a cache does not hold ({', '.join(_DTYPES)})", code)
        return DumpedSample(input_ids, loss_mask, shape, _DTYPES[code], lambda: self._load(name))

    def _load(self, name: str) -> Tensor:
        try:
            with safe_open(self._folder / name, "pt") as file:
                states: Tensor = file.get_tensor("hidden_states")
        except (SafetensorError, OSError) as error:
            raise SampleError(name, "a damaged file, or none of hidden states", str(error)) from None
        return states


def _name(row: int) -> str:
    return f"hs_{row}.safetensors"


def _read_dataset(folder: Path) -> pa.Table:
    """The columns `input_ids` and `loss_mask` of a dataset that `save_to_disk` wrote, mapped into memory."""
    files = sorted(path.name for path in folder.glob("*.arrow"))
    try:
        if (folder / "state.json").is_file():
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            files = [entry["filename"] for entry in state["_data_files"]]
        tables = [pa.ipc.open_stream(pa.memory_map(str(folder / file))).read_all() for file in files]
        rows = pa.concat_tables(tables) if tables else None
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise DataError(f"The dataset {folder} cannot be read ({error}): restore it from a copy.") from None
    if rows is None:
        raise DataError(
            f"There is no Arrow dataset in {folder}, and it holds the loss masks: name the folder that speculators' "
            "prepare_data.py wrote with --dataset."
        )
    missing = {"input_ids", "loss_mask"} - set(rows.column_names)
    if missing:
        raise DataError(
            f"The dataset {folder} lacks {' and '.join(sorted(missing))}: name the one that speculators' "
            "prepare_data.py wrote with --dataset."
        )
    rows = rows.select(["input_ids", "loss_mask"])
    for column in rows.columns:
        lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        if not lists or column.null_count or pc.list_flatten(column).null_count:
            raise DataError(f"The dataset {folder} holds {column.type} with gaps where lists of numbers should be.")
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        kind = column.type.value_type
        flags = name == "loss_mask" and (pa.types.is_boolean(kind) or pa.types.is_floating(kind))
        if not pa.types.is_integer(kind) and not flags:
            raise DataError(
                f"The dataset {folder} holds {kind} as {name} where whole numbers should be: name the one that "
                "speculators' prepare_data.py wrote with --dataset."
            )
    return rows
