"""What a target's family does around its decoder layers, read from its config alone.

Families differ in what stands between the embedding's rows and the first layer, and between the last norm and the
logits: a factor on the embeddings (Gemma, Granite), a factor on the logits (Cohere, Granite), a cap on them (Gemma 2).
A drafter that is trained without them learns against the wrong logits, and only its acceptance length shows it. What no
drafter can be made for is refused here, before any weight is read; `target.probe` compares the rest with the model
itself. Names and formulas: the families' modules in transformers 5.
"""

import torch
from transformers import PretrainedConfig

from dflash_cache.errors import TargetError

# Factors of the logits by the config's key: 1 multiplies, −1 divides. HyperCLOVA X multiplies where Granite divides.
LOGIT_FACTORS = {
    "logit_scale": 1,
    "lm_head_multiplier": 1,
    "output_multiplier": 1,
    "logits_scaling": -1,
    "logits_mup_width_multiplier": -1,
}
MULTIPLIES = {"hyperclovax"}
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
EMBEDDING_FACTORS = ("embedding_multiplier", "scale_emb")
SEVERAL_STREAMS = ("altup_num_inputs", "hc_mult")  # Gemma 3n, DeepSeek-V4: a token has several states between layers


def check_family(config: PretrainedConfig) -> None:
    """Raise TargetError if a target with this (whole) config cannot have a DFlash drafter."""
    if config.is_encoder_decoder:
        raise TargetError(
            f"The target ({config.model_type}) is an encoder-decoder, and a DFlash drafter drafts for causal language "
            "models: use a decoder-only target."
        )
    text = config.get_text_config(decoder=True)
    rope_theta_of(text)
    streams = next((name for name in SEVERAL_STREAMS if (getattr(text, name, None) or 1) > 1), None)
    if streams is not None:
        raise TargetError(
            f"The target ({text.model_type}) carries {getattr(text, streams)} states a token from layer to layer "
            f"({streams}), and a DFlash drafter reads one: use another target."
        )


def embedding_scale_of(target: PretrainedConfig) -> float:
    """What the target multiplies its embeddings by: Gemma's square root of the hidden size, Granite's factor, or 1."""
    if _is_gemma(target) or getattr(target, "mup_enabled", False):  # the latter is AFMoE's
        return float(target.hidden_size**0.5)
    return float(next((value for name in EMBEDDING_FACTORS if (value := getattr(target, name, None))), 1.0))


def embedding_factor(target: PretrainedConfig, scale: float, dtype: torch.dtype) -> float:
    """`scale` as it is multiplied in `dtype`: Gemma and MiniCPM3 round it, the others only the product."""
    rounds = _is_gemma(target) or getattr(target, "scale_emb", None) is not None
    return float(torch.tensor(scale, dtype=dtype)) if rounds else scale


def logit_scale_of(target: PretrainedConfig) -> float:
    """What the target multiplies the head's product by, usually 1."""
    scale = 1.0
    for name, sign in LOGIT_FACTORS.items():
        if getattr(target, name, None) is None:
            continue
        value = _positive(target, name)
        scale *= value if sign > 0 or target.model_type in MULTIPLIES else 1.0 / value
    return scale


def softcap_of(target: PretrainedConfig) -> float | None:
    """c of the target's logits c · tanh(z / c), None if they are not capped."""
    name = next((name for name in SOFTCAPS if getattr(target, name, None) is not None), None)
    return None if name is None else _positive(target, name)


def norm_eps_of(target: PretrainedConfig) -> float:
    """The epsilon of the target's norms, whatever its family calls it."""
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    return float(next((value for name in names if (value := getattr(target, name, None)) is not None), 1e-6))


def intermediate_size_of(target: PretrainedConfig) -> int:
    """Width of the target's dense MLPs, the widest where layers differ; four times the hidden size if it names none."""
    names = ("intermediate_size", "ffn_hidden_size")
    widths = []
    for layer in layer_configs(target):
        found = next((value for name in names if (value := getattr(layer, name, None))), 4 * target.hidden_size)
        widths.append(max(found) if isinstance(found, list | tuple) else int(found))
    return max(widths)


def layer_configs(target: PretrainedConfig) -> list[PretrainedConfig]:
    """The configs to read a layer's sizes from: the target's own, or each layer's where they differ (Gemma 4)."""
    return list(target.per_layer_config) if getattr(target, "is_heterogeneous", False) else [target]


def rope_parameters_of(target: PretrainedConfig) -> dict[str, object]:
    """The config's rope parameters; layers that differ from each other (Gemma 3) count by their full-attention ones."""
    parameters = getattr(target, "rope_parameters", None) or {}
    found: dict[str, object] = parameters.get("full_attention", parameters) or {}
    return found


def rope_theta_of(target: PretrainedConfig) -> float:
    """The base of the target's rope. Raises TargetError if it has none."""
    theta = rope_parameters_of(target).get("rope_theta", getattr(target, "rope_theta", None))
    if theta is None:
        raise TargetError(
            f"The target ({target.model_type}) has no rope_theta in its config, and a DFlash drafter needs rotary "
            "positions; use another target."
        )
    return float(theta)  # type: ignore[arg-type]  # a number, as transformers checks


def _positive(target: PretrainedConfig, name: str) -> float:
    """The number of that name. Raises TargetError if it is none, or not above 0."""
    value = getattr(target, name)
    if not isinstance(value, int | float) or value <= 0:
        raise TargetError(
            f"The target ({target.model_type}) has {name} = {value}, and a drafter's logits need a positive number "
            "there: use another target."
        )
    return float(value)


def _is_gemma(target: PretrainedConfig) -> bool:
    return "gemma" in target.model_type
