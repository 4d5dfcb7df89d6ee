"""The drafter's shape: every number that its tensors, its rope and its exported config.json depend on.

It is derived from the target's configuration once, stored in each checkpoint, and never guessed again. The
captured layers are always written out (ids of decoder layers, counted from 0, outputs before any final norm).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from transformers import PretrainedConfig

from dflash_cache.config.settings import DrafterSettings
from dflash_cache.drafter.family import (
    embedding_scale_of,
    intermediate_size_of,
    layer_configs,
    logit_scale_of,
    norm_eps_of,
    rope_parameters_of,
    rope_theta_of,
    softcap_of,
)
from dflash_cache.drafter.rope import Scaling, carried_scaling
from dflash_cache.errors import ConfigError

# Head sizes of vLLM's attention kernels; a smaller one is a toy's. What replaces another: FIELD.md, "The drafter".
SERVED_HEAD_SIZES = (32, 64, 80, 96, 112, 120, 128, 192, 256)
SERVED_HEADS = (32, 8, 128)
FULL, SLIDING = "full_attention", "sliding_attention"
# What a target does around any drafter of it, which its files decide and no setting does.
OF_LOGITS = ("logit_scale", "softcap")
SURROUNDINGS = ("embedding_scale", *OF_LOGITS)
_LATER = ("rope_scaling", "layer_types", "sliding_window", *OF_LOGITS)
_ROUNDING = 2**-8  # of bfloat16: published factors may be so rounded


@dataclass(frozen=True)
class DrafterShape:
    """Sizes and constants of one drafter; the same names as in a Qwen3 config where they mean the same."""

    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    target_num_layers: int
    embedding_scale: float = 1.0
    initializer_range: float = 0.02
    rope_scaling: Scaling | None = None
    layer_types: tuple[str, ...] = ()  # empty where all have full attention
    sliding_window: int | None = None
    logit_scale: float = 1.0  # of the target's head (`head`), and its cap; 1 and None in what was written before
    softcap: float | None = None

    def window_of(self, layer: int) -> int | None:
        """The layer's sliding window, None where its attention is full."""
        return self.sliding_window if self.layer_types and self.layer_types[layer] == SLIDING else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as stored in checkpoints; what came later only where it is set, as before it came."""
        unset = {entry.name: entry.default for entry in fields(self) if entry.name in _LATER}
        return {name: value for name, value in asdict(self).items() if name not in unset or value != unset[name]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DrafterShape":
        """The inverse of `to_dict`."""
        tuples = {name: tuple(values.get(name, ())) for name in ("target_layer_ids", "layer_types")}
        return cls(**{**values, **tuples})


def spread_layer_ids(target_num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers from the second to the third-to-last, evenly (z-lab's rule: FIELD.md, "The drafter")."""
    if count == 1:
        return (target_num_layers // 2,)
    if target_num_layers < count + 3:
        raise ConfigError(
            f"target.num_layers is {count}, but the target's {target_num_layers} layers leave room for "
            f"{max(1, target_num_layers - 3)}; lower it or write target.layer_ids out."
        )
    span = target_num_layers - 4
    return tuple(round(1 + i * span / (count - 1)) for i in range(count))


def shape_from_target(
    target: PretrainedConfig, settings: DrafterSettings, layer_ids: Sequence[int], mask_token_id: int
) -> DrafterShape:
    """The drafter's shape for a target, settings overriding what the target's config says."""
    num_heads, num_kv_heads, head_dim = choose_heads(target, settings)
    if head_dim % 2:
        raise ConfigError(f"The drafter's head_dim {head_dim} is odd, and rotary positions need pairs: make it even.")
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"The drafter's {num_heads} attention heads are no multiple of its {num_kv_heads} key-value heads; "
            f"set drafter.num_attention_heads or drafter.num_key_value_heads."
        )
    layer_types = checked_layer_types(settings)
    shape = DrafterShape(
        hidden_size=target.hidden_size,
        num_layers=settings.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=settings.intermediate_size or intermediate_size_of(target),
        rms_norm_eps=settings.rms_norm_eps or norm_eps_of(target),
        rope_theta=settings.rope_theta or rope_theta_of(target),
        vocab_size=settings.vocab_size or target.vocab_size,
        max_position_embeddings=target.max_position_embeddings,
        block_size=settings.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=tuple(layer_ids),
        target_num_layers=target.num_hidden_layers,
        rope_scaling=carried_scaling(rope_parameters_of(target), target.max_position_embeddings)
        if settings.rope_scaling == "target"
        else None,
        layer_types=layer_types,
        sliding_window=settings.sliding_window,
    )
    return take_surroundings(shape, target)


def take_surroundings(shape: DrafterShape, target: PretrainedConfig) -> DrafterShape:
    """The shape with the target's own factors and cap, which drafters written before they were recorded lack."""
    return replace(
        shape,
        embedding_scale=embedding_scale_of(target),
        logit_scale=logit_scale_of(target),
        softcap=softcap_of(target),
    )


def find_contradictions(shape: DrafterShape, target: DrafterShape) -> list[str]:
    """Which of SURROUNDINGS a drafter's shape names otherwise than its target has them, but for rounding.

    One that names no factor of the logits, or no cap, says nothing of it: earlier ones never did.
    """
    found = []
    for name in SURROUNDINGS:
        said, own = getattr(shape, name), getattr(target, name)
        if name in OF_LOGITS and said in (1.0, None):
            continue
        if own is None or not math.isclose(said, own, rel_tol=_ROUNDING):
            found.append(name)
    return found


def checked_layer_types(settings: DrafterSettings) -> tuple[str, ...]:
    """Each layer's type, nothing where all have full attention. Raises ConfigError if types and window do not fit."""
    types, window = settings.layer_types or (), settings.sliding_window
    if types and len(types) != settings.num_layers:
        raise ConfigError(
            f"drafter.layer_types names {len(types)} layers, drafter.num_layers is {settings.num_layers}: name each."
        )
    if (SLIDING in types) != (window is not None):
        raise ConfigError(
            f"drafter.sliding_window and {SLIDING} layers need each other: set the window, and name the layers that "
            "have it in drafter.layer_types, or leave out both."
        )
    if window is not None and window < settings.block_size:
        raise ConfigError(
            f"drafter.sliding_window ({window}) is shorter than a block ({settings.block_size} slots), whose slots see "
            "the anchor: make it longer."
        )
    return types if SLIDING in types else ()


def choose_heads(target: PretrainedConfig, settings: DrafterSettings) -> tuple[int, int, int]:
    """Attention heads, key-value heads and head size: the settings', else the target's, or those that servers take.

    Of a target whose layers differ they are the first layer's. A target whose head size servers refuse gets 32 heads of
    128 with 8 key-value heads (FIELD.md, "The drafter").
    """
    given = (settings.num_attention_heads, settings.num_key_value_heads, settings.head_dim)
    layer = layer_configs(target)[0]
    num_heads = layer.num_attention_heads
    head_dim = getattr(layer, "head_dim", None) or target.hidden_size // num_heads
    own = (num_heads, getattr(layer, "num_key_value_heads", None) or num_heads, head_dim)
    if settings.head_dim is None and head_dim > SERVED_HEAD_SIZES[0] and head_dim not in SERVED_HEAD_SIZES:
        own = SERVED_HEADS
    num_heads, num_kv_heads, head_dim = (one or other for one, other in zip(given, own, strict=True))
    return num_heads, num_kv_heads, head_dim
