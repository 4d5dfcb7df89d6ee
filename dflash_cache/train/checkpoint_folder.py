"""A checkpoint as a folder (torch.distributed.checkpoint): each rank writes its part, any number of ranks reads it.

FOLDER/about.pt holds what is no tensor, the rest is that library's: every tensor by name (`drafter.fc.weight`,
`optimizers.0.3.exp_avg`) with the places of its parts. Its `.metadata` is a pickle: read no folder of a stranger's.
"""

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from dflash_cache.cache.files import write_atomically
from dflash_cache.train.sharding import split_like

ABOUT = "about.pt"
ParameterOf = Callable[[str], Tensor | None]


def is_folder_checkpoint(path: Path) -> bool:
    """Whether the folder is a checkpoint."""
    return (path / ABOUT).exists()


def flatten(fields: dict[str, Any]) -> dict[str, Tensor]:
    """A checkpoint's tensors by name."""
    tensors = {f"drafter.{name}": tensor for name, tensor in fields["drafter"].items()}
    tensors |= {f"average.{name}": tensor for name, tensor in (fields["average"] or {}).items()}
    for number, optimizer in enumerate(fields["optimizers"]):
        for place, state in optimizer["state"].items():
            tensors |= {f"optimizers.{number}.{place}.{name}": value for name, value in state.items()}
    return tensors


def strip(fields: dict[str, Any]) -> dict[str, Any]:
    """The same without tensors."""
    optimizers = [optimizer | {"state": {}} for optimizer in fields["optimizers"]]
    return fields | {"drafter": {}, "average": fields["average"] and {}, "optimizers": optimizers}


def fill(about: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """`strip`'s fields with `flatten`'s tensors again."""
    filled = strip(about)
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind != "optimizers":
            filled[kind] = (filled[kind] or {}) | {rest: tensor}
            continue
        number, place, value = rest.split(".")
        filled[kind][int(number)]["state"].setdefault(int(place), {})[value] = tensor
    return filled


def split_fields(fields: dict[str, Any], parameter_of: ParameterOf) -> dict[str, Any]:
    """A whole checkpoint with this rank's parts of its tensors."""
    return fill(fields, {name: _split(name, tensor, parameter_of) for name, tensor in flatten(fields).items()})


def write_about(folder: Path, fields: dict[str, Any]) -> None:
    """Write what is no tensor: the folder is a checkpoint from then on."""
    buffer = io.BytesIO()
    torch.save(strip(fields), buffer)
    write_atomically(folder / ABOUT, buffer.getvalue())


def read_folder(folder: Path, parameter_of: ParameterOf | None) -> dict[str, Any]:
    """A checkpoint's fields, each tensor split as its parameter is, or whole; reads no more than that."""
    about = torch.load(folder / ABOUT, map_location="cpu", weights_only=True)
    reader = FileSystemReader(folder)
    tensors = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        whole = torch.empty(stored.size, dtype=stored.properties.dtype, device="meta" if parameter_of else "cpu")
        tensors[name] = _empty_like(name, whole, parameter_of) if parameter_of else whole
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each rank reads by itself
        load(tensors, storage_reader=reader, no_dist=True)
    return fill(about, tensors)


def _split(name: str, tensor: Tensor, parameter_of: ParameterOf) -> Tensor:
    parameter = parameter_of(name)
    return tensor if parameter is None or parameter.shape != tensor.shape else split_like(tensor, parameter)


def _empty_like(name: str, whole: Tensor, parameter_of: ParameterOf) -> Tensor:
    parameter = parameter_of(name)
    if parameter is None or parameter.shape != whole.shape:
        return torch.empty(whole.shape, dtype=whole.dtype)
    return torch.empty_like(parameter.detach())
