"""Code and pickles of a checkpoint: neither is touched unless asked for, and then they do what they should."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dflash_cache.config.settings import TargetSettings
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.errors import TargetError
from dflash_cache.target.capture import capture_states
from dflash_cache.target.load import load_target

OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own-llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def settings(folder: Path, **changes: object) -> TargetSettings:
    return TargetSettings.model_validate(
        {"model": str(folder), "dtype": "float32", "device": "cpu", "layer_ids": [0, 2], **changes}
    )


@pytest.fixture
def copy(llama_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_folder, tmp_path / "copy"))


def states(options: TargetSettings) -> torch.Tensor:
    return capture_states(load_target(options), torch.arange(5, 25)[None], torch.tensor([20]))


def test_code_of_a_checkpoint_is_run_only_if_asked_for(llama_folder: Path, copy: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = json.loads((copy / "config.json").read_text()) | {
        "model_type": "own-llama",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "own.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n{OWN_CODE}")
    with pytest.raises(TargetError, match=r"The config of the target .* cannot be used \("):
        load_target(settings(copy))
    assert not (tmp_path / "ran").exists()
    assert torch.equal(states(settings(copy, trust_remote_code=True)), states(settings(llama_folder)))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("num_files", [1, 2])
def test_pickled_weights_are_those_of_the_safetensors(llama_folder: Path, copy: Path, num_files: int) -> None:
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = [names[i::num_files] for i in range(num_files)]
    files = ["pytorch_model.bin"] if num_files == 1 else [f"pytorch_model-{i}.bin" for i in range(num_files)]
    for file, part in zip(files, parts, strict=True):
        torch.save({name: tensors[name] for name in part}, copy / file)
    if num_files > 1:
        where = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (copy / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    with pytest.raises(TargetError, match="has no weights in safetensors"):
        TargetFiles(settings(copy))
    asked = settings(copy, allow_pickle=True)
    found = TargetFiles(asked).read(names)
    assert all(torch.equal(found[name], tensors[name]) for name in names)
    assert torch.equal(states(asked), states(settings(llama_folder)))

    before = TargetFiles(asked).fingerprint()
    data = bytearray((copy / files[-1]).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / files[-1]).write_bytes(data)
    assert TargetFiles(asked).fingerprint() != before


class Surprise:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch ran",)


def test_a_pickle_that_holds_more_than_tensors_is_refused_and_runs_nothing(copy: Path, monkeypatch) -> None:
    (copy / "model.safetensors").unlink()
    torch.save({"model.norm.weight": nn.Parameter(torch.ones(2)), "other": Surprise()}, copy / "pytorch_model.bin")
    monkeypatch.chdir(copy)
    with pytest.raises(TargetError, match=r"cannot be read as mere tensors \(.*\): use safetensors\.$"):
        TargetFiles(settings(copy, allow_pickle=True))
    assert not (copy / "ran").exists()
