"""Where a drafter's weights start: at random, or from the target's own layers.

`target-layers` copies the target's last layers into the drafter's, lets `fc` pass the deepest captured layer
through, and takes the target's final norm. The copied layers then begin in the place they were trained for, and a
drafter reaches the same loss in about 40 % of the steps (this project's first trial, SmolLM2-135M). Not every family's
layers are like the drafter's (Gemma's activation, Mixtral's experts): `auto` then takes random weights.
"""

from typing import Literal

import torch
from torch import Tensor

from dflash_cache.config.settings import DrafterSettings
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.errors import ConfigError

LAYER_PREFIXES = ("model.layers", "model.language_model.layers", "language_model.model.layers")
Start = Literal["random", "target-layers"]
QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


def start_drafter(drafter: Drafter, settings: DrafterSettings, files: TargetFiles, seed: int) -> Start:
    """Initialise all weights in place, the same for the same seed; returns the way taken, which `auto` leaves open.

    Raises ConfigError if the target's layers are asked for and cannot be copied.
    """
    drafter.initialize(torch.Generator().manual_seed(seed))
    if settings.init == "random":
        return "random"
    try:
        copies = _read_target_layers(drafter, files)
    except ConfigError:
        if settings.init == "auto":
            return "random"
        raise
    for own, source in copies:
        own.copy_(source)
    with torch.no_grad():
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -drafter.shape.hidden_size :].fill_diagonal_(1.0)
    return "target-layers"


def _read_target_layers(drafter: Drafter, files: TargetFiles) -> list[tuple[Tensor, Tensor]]:
    """The drafter's tensors that have one in the target's last layers, each with it. Raises ConfigError."""
    shape = drafter.shape
    config = files.load_config()
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if activation != "silu":
        raise ConfigError(
            f"drafter.init: target-layers needs a target whose layers are like the drafter's, and "
            f"{config.model_type}'s (activation {activation}) are not; set it to random."
        )
    if shape.num_layers > shape.target_num_layers:
        raise ConfigError(
            f"drafter.init: target-layers needs drafter.num_layers ({shape.num_layers}) to be at most the target's "
            f"{shape.target_num_layers}."
        )
    prefix = next((p for p in LAYER_PREFIXES if f"{p}.0.self_attn.q_proj.weight" in files.names), None)
    if prefix is None:
        raise ConfigError("drafter.init: target-layers needs a target with Llama's layer names; set it to random.")
    norm_name = f"{prefix.removesuffix('.layers')}.norm.weight"
    first = shape.target_num_layers - shape.num_layers
    sources = {"norm.weight": norm_name, "hidden_norm.weight": f"{prefix}.{first}.input_layernorm.weight"}
    own = drafter.state_dict()
    for name in own:
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            source = f"{prefix}.{first + int(number)}.{rest}"
            if rest not in QK_NORMS or source in files.names:
                sources[name] = source
    lacking = sorted(set(sources.values()) - files.names)
    if lacking:
        raise ConfigError(
            f"drafter.init: target-layers needs a target whose layers are like the drafter's, and "
            f"{config.model_type}'s lack {lacking[0]}; set it to random."
        )
    tensors = files.read(set(sources.values()))
    for name, source in sources.items():
        _check_sizes(own[name], tensors[source], name, source)
    return [(own[name], tensors[source]) for name, source in sources.items()]


def _check_sizes(own: Tensor, source: Tensor, name: str, source_name: str) -> None:
    if own.shape != source.shape:
        raise ConfigError(
            f"drafter.init: target-layers cannot copy {source_name} {tuple(source.shape)} into {name} "
            f"{tuple(own.shape)}: leave the drafter's sizes at the target's, or set drafter.init to random."
        )
