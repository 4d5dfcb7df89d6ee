"""A drafter as z-lab publishes them: config.json and model.safetensors, ready for their package, SGLang and vLLM.

SGLang ignores tensor names it does not know, so a misnamed export would be a random drafter without an error.
Every export is therefore read back from the very files and checked against a strict table of names and shapes before it
is announced. Tensors and keys: FIELD.md, "The drafter".
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_cache.config.dtypes import Dtype
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.rope import carried_scaling
from dflash_cache.drafter.shape import FULL, SLIDING, DrafterShape
from dflash_cache.drafter.trained_for import TrainedFor, parse_target
from dflash_cache.errors import RunError

DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

TRAINED_FOR = "trained_for"
# What z-lab's package applies around a drafter: to the target's embeddings, to the logits of its head, then a cap.
EMBEDDING_SCALE, LOGIT_SCALE, SOFTCAP = "input_embedding_scale", "output_multiplier", "final_logit_softcapping"


def export_zlab(drafter: Drafter, out: Path, dtype: Dtype) -> None:
    """Write the drafter's folder `out`; nothing may stand there. Raises RunError."""
    config = zlab_config(drafter.shape, dtype)
    if drafter.trained_for is not None:  # beside z-lab's own keys, which its readers ask for by name
        config["dflash_config"][TRAINED_FOR] = drafter.trained_for.to_dict()
    write_export(drafter, config, out, dtype, lambda aside: read_export(aside)[1])


def write_export(
    drafter: Drafter,
    config: dict[str, Any],
    out: Path,
    dtype: Dtype,
    read_back: Callable[[Path], dict[str, Tensor]],
) -> None:
    """Write `config` and the drafter's tensors to the new folder `out`, which appears when they have been read back.

    `read_back` gives the tensors of such a folder, or raises RunError if it is not one of the form.
    Raises RunError also if something stands there already, or if the files do not read back as written.
    """
    if out.exists():
        raise RunError(f"{out} exists already: name another folder, or remove it.")
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    tensors = {name: tensor.to(DTYPES[dtype]).contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
    (aside / "config.json").write_text(f"{json.dumps(config, indent=2)}\n", encoding="utf-8")
    found = read_back(aside)
    different = [name for name, tensor in tensors.items() if not torch.equal(found[name], tensor)]
    if different:
        raise RunError(f"The export to {out} did not read back as written ({different[0]}): check the storage.")
    aside.rename(out)


def read_export(folder: Path) -> tuple[DrafterShape, dict[str, Tensor]]:
    """Shape and tensors of an exported drafter; RunError if names or shapes are not exactly the expected ones."""
    try:
        shape = shape_from_zlab(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        tensors = load_file(folder / "model.safetensors")
    except (ValueError, KeyError, TypeError, AttributeError, OSError, SafetensorError) as error:
        raise RunError(
            f"{folder} holds no exported drafter that can be read ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}): export it again, or name another."
        ) from None
    check_tensors(tensors, expected_tensors(shape), folder)
    return shape, tensors


def read_trained_for(folder: Path) -> TrainedFor | None:
    """The target that an exported drafter, as `read_export` takes it, was trained for, if that is recorded."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return parse_target(config["dflash_config"].get(TRAINED_FOR))


def check_tensors(tensors: dict[str, Tensor], expected: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Raise RunError unless names and shapes are exactly the expected ones."""
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        wrong = sorted({name for name, _ in found.items() ^ expected.items()})
        raise RunError(f"The drafter in {folder} has missing, unknown or misshapen tensors: {', '.join(wrong[:4])}.")


def expected_tensors(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a published drafter, written out from the shape alone."""
    H, D, I = shape.hidden_size, shape.head_dim, shape.intermediate_size  # noqa: E741
    queries, keys = shape.num_attention_heads * D, shape.num_key_value_heads * D
    table: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, len(shape.target_layer_ids) * H),
        "hidden_norm.weight": (H,),
        "norm.weight": (H,),
    }
    for i in range(shape.num_layers):
        table |= {
            f"layers.{i}.input_layernorm.weight": (H,),
            f"layers.{i}.post_attention_layernorm.weight": (H,),
            f"layers.{i}.self_attn.q_proj.weight": (queries, H),
            f"layers.{i}.self_attn.k_proj.weight": (keys, H),
            f"layers.{i}.self_attn.v_proj.weight": (keys, H),
            f"layers.{i}.self_attn.o_proj.weight": (H, queries),
            f"layers.{i}.self_attn.q_norm.weight": (D,),
            f"layers.{i}.self_attn.k_norm.weight": (D,),
            f"layers.{i}.mlp.gate_proj.weight": (I, H),
            f"layers.{i}.mlp.up_proj.weight": (I, H),
            f"layers.{i}.mlp.down_proj.weight": (H, I),
        }
    return table


def zlab_config(shape: DrafterShape, dtype: Dtype) -> dict[str, Any]:
    """config.json of a published drafter: a Qwen3 config with DFlash's own keys.

    z-lab's package takes rows of the target's embedding and what the target's head gives, bias included, and applies
    the factors and the cap named here, in this order. It does not round the embedding's factor to the dtype, as Gemma
    does: in bfloat16 that is lost in the rounding of the product.
    """
    own: dict[str, Any] = {
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.target_layer_ids),
    }
    if shape.embedding_scale != 1.0:
        own[EMBEDDING_SCALE] = shape.embedding_scale
    if shape.logit_scale != 1.0:
        own[LOGIT_SCALE] = shape.logit_scale
    if shape.softcap is not None:
        own[SOFTCAP] = shape.softcap
    scaling = shape.rope_scaling or {"rope_type": "default"}
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": shape.block_size,
        "dflash_config": own,
        "dtype": dtype,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": shape.initializer_range,
        "intermediate_size": shape.intermediate_size,
        "layer_types": list(shape.layer_types) or [FULL] * shape.num_layers,
        **({"logit_scale": shape.logit_scale} if shape.logit_scale != 1.0 else {}),  # where vLLM reads it
        "max_position_embeddings": shape.max_position_embeddings,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "num_target_layers": shape.target_num_layers,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {**scaling, "rope_theta": shape.rope_theta},
        **({"rope_scaling": scaling} if shape.rope_scaling else {}),  # its name before transformers 5
        "rope_theta": shape.rope_theta,
        "sliding_window": shape.sliding_window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": shape.sliding_window is not None,  # without it Qwen3's config drops the window
        "vocab_size": shape.vocab_size,
    }


def shape_from_zlab(config: dict[str, Any]) -> DrafterShape:
    """The shape behind a published config.json, older (top-level `block_size`) or newer (inside `dflash_config`).

    Factors and cap are looked up as z-lab's package does: in `dflash_config`, else at the top; a cap of 0 is none.
    Raises ValueError for what `Drafter` does not compute, KeyError for a missing key.
    """
    if "dflash_config" not in config:
        is_other = "speculators_config" in config
        other = " (it is in speculators' format, which is written and not read)" if is_other else ""
        raise ValueError(f"config.json lacks the dflash_config of z-lab's format{other}")
    own = config["dflash_config"]
    scales = {key: float(own.get(key, config.get(key, 1.0))) for key in (EMBEDDING_SCALE, LOGIT_SCALE)}
    softcap = own.get(SOFTCAP, config.get(SOFTCAP)) or 0.0
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    scaling = carried_scaling(rope, config["max_position_embeddings"])
    types, window = tuple(config.get("layer_types") or ()), config.get("sliding_window")
    other_layers, slides = set(types) - {FULL, SLIDING}, SLIDING in types
    block_size = own.get("block_size", config.get("block_size"))
    causal = next((at[key] for at, key in ((config, "is_causal"), (own, "causal")) if at.get(key) is not None), None)
    as_usual = causal is None or all(bool(causal) == (each == SLIDING) for each in types or (FULL,))
    unlike = {
        f"rope_type {rope_type}": rope_type != "default" and scaling is None,
        f"layer_types {', '.join(sorted(other_layers))}": bool(other_layers),
        "use_sliding_window but no such layer_types": bool(config.get("use_sliding_window")) and not slides,
        f"sliding_window {window}": slides and (window is None or window < block_size),
        f"{len(types)} layer_types": bool(types) and len(types) != config["num_hidden_layers"],
        f"causal {causal}": not as_usual,
        "use_swa": bool(own.get("use_swa")),
        "attention_bias": bool(config.get("attention_bias")),
        f"hidden_act {config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
        **{f"{key} {value:g}": not 0 < value < math.inf for key, value in scales.items()},
    }
    if found := [name for name, is_so in unlike.items() if is_so]:
        raise ValueError(f"drafters with {' and '.join(found)} are not supported")
    return DrafterShape(
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate_size=config["intermediate_size"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=float(rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"]),
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        block_size=block_size,
        mask_token_id=own["mask_token_id"],
        target_layer_ids=tuple(own["target_layer_ids"]),
        target_num_layers=config["num_target_layers"],
        embedding_scale=scales[EMBEDDING_SCALE],
        logit_scale=scales[LOGIT_SCALE],
        softcap=float(softcap) if softcap > 0 else None,
        initializer_range=config.get("initializer_range", 0.02),
        rope_scaling=scaling,
        layer_types=types if slides else (),
        sliding_window=window if slides else None,
    )
