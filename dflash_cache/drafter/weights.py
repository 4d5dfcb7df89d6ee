"""A target's files: its weights read by name, without building the model.

Training needs only a few of the target's tensors (embedding, head, perhaps its last layers), so it reads just
those; the cache records a fingerprint of the files, so that a drafter is never trained against another target.

Weights are safetensors. Pickles (`pytorch_model.bin`) are taken only with target.allow_pickle, and then by torch's
reader that makes nothing but tensors.
"""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from xxhash import xxh3_64

from dflash_cache.config.settings import TargetSettings
from dflash_cache.drafter.family import check_family
from dflash_cache.errors import TargetError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
SAMPLE_BYTES = 64 << 10


class TargetFiles:
    """The config and safetensors files of a target, in a folder or on the Hub (fetched when first needed)."""

    def __init__(self, settings: TargetSettings) -> None:
        """Raises TargetError, in one sentence, if there is no such target or it holds no safetensors."""
        self._settings = settings
        config = self._locate("config.json")
        if config is None:
            raise TargetError(
                f"There is no target at {settings.model} (no config.json): name the folder of a transformers "
                "checkpoint, or a model on the Hub that can be reached."
            )
        self._config_path = config
        self._files = self._find_weights()

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The named tensors on the CPU, in the dtype of the file. Raises TargetError if one is missing."""
        found: dict[str, Tensor] = {}
        with ExitStack() as stack:
            opened: dict[str, Any] = {}
            for name in names:
                file = self._files.get(name)
                if file is None:
                    raise TargetError(
                        f"The target {self._settings.model} has no tensor {name}; its family is not supported yet."
                    )
                if file not in opened:
                    is_pickle, path = file.endswith(".bin"), self._path(file)
                    opened[file] = _read_pickle(Path(path)) if is_pickle else stack.enter_context(safe_open(path, "pt"))
                held = opened[file]
                found[name] = held[name] if isinstance(held, dict) else held.get_tensor(name)
        return found

    @property
    def names(self) -> frozenset[str]:
        """All tensors of the checkpoint."""
        return frozenset(self._files)

    @property
    def architectures(self) -> list[str]:
        """The names of the model's classes, as in its config.json; empty if that names none."""
        return list(_read_json(self._config_path).get("architectures") or [])

    def load_whole_config(self) -> PretrainedConfig:
        """The model's config, with those of its image or sound towers; TargetError as in `load_config`."""
        try:
            config: PretrainedConfig = AutoConfig.from_pretrained(
                self._settings.model,
                revision=self._settings.revision,
                trust_remote_code=self._settings.trust_remote_code,
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise TargetError(f"The config of the target {self._settings.model} cannot be used ({reason}).") from None
        check_family(config)
        return config

    def load_config(self) -> PretrainedConfig:
        """The text model's config; TargetError if transformers does not know it, or it cannot have a drafter."""
        text: PretrainedConfig = self.load_whole_config().get_text_config(decoder=True)
        return text

    def fingerprint(self) -> str:
        """16 hex digits over the config, and over each weight file's size, header and a sample of its bytes.

        64 KiB at the begin, the middle and the end of each file tell two trainings of one model apart at a cost that
        does not grow with the target (hashing 600 GB would take minutes at every start).
        """
        hasher = xxh3_64(json.dumps(_read_json(self._config_path), sort_keys=True).encode())
        for file in sorted(set(self._files.values())):
            path = Path(self._path(file))
            size = path.stat().st_size
            with path.open("rb") as stream:
                header_bytes = 0 if file.endswith(".bin") else int.from_bytes(stream.read(8), "little")
                hasher.update(stream.read(min(header_bytes, 64 << 20)))
                for begin in (8 + header_bytes, size // 2, max(0, size - SAMPLE_BYTES)):
                    stream.seek(begin)
                    hasher.update(stream.read(SAMPLE_BYTES))
            hasher.update(size.to_bytes(8, "little"))
        return hasher.hexdigest()

    def _find_weights(self) -> dict[str, str]:
        """Each tensor's name and the file that holds it."""
        index = self._locate(INDEX)
        if index is not None:
            weight_map: dict[str, str] = _read_json(index).get("weight_map", {})
            self._check_files(weight_map)
            return weight_map
        single = self._locate(SINGLE)
        if single is not None:
            return dict.fromkeys(_list_tensors(single), SINGLE)
        if self._settings.allow_pickle:
            index, single = self._locate(PICKLE_INDEX), self._locate(PICKLE)
            if index is not None:
                return {name: file for file in _files_of(index) for name in _read_pickle(Path(self._path(file)))}
            if single is not None:
                return dict.fromkeys(_read_pickle(single), PICKLE)
        raise TargetError(
            f"The target {self._settings.model} has no weights in safetensors ({SINGLE} or {INDEX}): save it with "
            "`save_pretrained` first, or set target.allow_pickle if it has a pytorch_model.bin that you trust."
        )

    def _check_files(self, weight_map: dict[str, str]) -> None:
        """See that each file of the index is whole and holds what the index says."""
        for file in sorted(set(weight_map.values())):
            held = _list_tensors(Path(self._path(file)))
            missing = next((name for name, where in weight_map.items() if where == file and name not in held), None)
            if missing is not None:
                raise TargetError(
                    f"The weights {file} of the target {self._settings.model} lack {missing}, which {INDEX} promises: "
                    "fetch them again."
                )

    def _path(self, name: str) -> str:
        path = self._locate(name)
        if path is None:
            raise TargetError(f"The target {self._settings.model} lacks its file {name}: fetch it again.")
        return str(path)

    def _locate(self, name: str) -> Path | None:
        folder = Path(self._settings.model)
        if folder.is_dir():
            return folder / name if (folder / name).is_file() else None
        try:
            return Path(hf_hub_download(self._settings.model, name, revision=self._settings.revision))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
            return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TargetError(f"The target's file {path} is damaged ({error}): fetch it again.") from None
    if not isinstance(tree, dict):
        raise TargetError(f"The target's file {path} does not hold a JSON object: fetch it again.")
    return tree


def _files_of(index: Path) -> list[str]:
    return sorted(set(_read_json(index).get("weight_map", {}).values()))


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, mapped from the file; no code in it is run (`weights_only`). Raises TargetError."""
    try:
        tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, OSError, EOFError, UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise TargetError(f"The weights {path} cannot be read as mere tensors ({reason}): use safetensors.") from None
    return tensors


def _list_tensors(path: Path) -> frozenset[str]:
    """Names in a safetensors file; opening it checks its header against its size."""
    try:
        with safe_open(path, "pt") as file:
            return frozenset(file.keys())
    except (SafetensorError, OSError) as error:
        raise TargetError(f"The weights {path} are damaged ({error}): fetch them again.") from None
