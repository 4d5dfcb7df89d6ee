"""The drafter's shape: every number that its tensors, its rope and its exported config.json depend on.

It is derived from the target's configuration once, stored in each checkpoint, and never guessed again. The
captured layers are always written out (ids of decoder layers, counted from 0, outputs before any final norm).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PretrainedConfig

from dflash_cache.config.settings import DrafterSettings
from dflash_cache.errors import ConfigError, TargetError

# Ways in which a target's embedding or head differs from a plain table and a plain matrix product. A drafter
# trained without them would learn against the wrong logits, so such a target is refused.
UNSUPPORTED_HEAD_KEYS = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
}


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

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as stored in checkpoints."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DrafterShape":
        """The inverse of `to_dict`."""
        return cls(**{**values, "target_layer_ids": tuple(values["target_layer_ids"])})


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
    check_head_is_plain(target)
    num_heads = settings.num_attention_heads or target.num_attention_heads
    num_kv_heads = (
        settings.num_key_value_heads or getattr(target, "num_key_value_heads", None) or target.num_attention_heads
    )
    head_dim = (
        settings.head_dim or getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    )
    if head_dim % 2:
        raise ConfigError(f"The drafter's head_dim {head_dim} is odd, and rotary positions need pairs: make it even.")
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"The drafter's {num_heads} attention heads are no multiple of its {num_kv_heads} key-value heads; "
            f"set drafter.num_attention_heads or drafter.num_key_value_heads."
        )
    return DrafterShape(
        hidden_size=target.hidden_size,
        num_layers=settings.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=settings.intermediate_size or target.intermediate_size,
        rms_norm_eps=norm_eps_of(target),
        rope_theta=rope_theta_of(target),
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_position_embeddings,
        block_size=settings.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=tuple(layer_ids),
        target_num_layers=target.num_hidden_layers,
        embedding_scale=embedding_scale_of(target),
    )


def norm_eps_of(target: PretrainedConfig) -> float:
    """The epsilon of the target's norms, whatever its family calls it."""
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    return float(next((value for name in names if (value := getattr(target, name, None)) is not None), 1e-6))


def rope_theta_of(target: PretrainedConfig) -> float:
    """The target's rope base; layers that differ from each other (Gemma 3) count by their full-attention one."""
    parameters = getattr(target, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    theta = parameters.get("rope_theta", getattr(target, "rope_theta", None))
    if theta is None:
        raise TargetError(
            f"The target ({target.model_type}) has no rope_theta in its config, and a DFlash drafter needs rotary "
            "positions; use another target."
        )
    return float(theta)


def embedding_scale_of(target: PretrainedConfig) -> float:
    """What the target multiplies its embeddings by: Gemma's square root of the hidden size, else 1."""
    return float(target.hidden_size) ** 0.5 if target.model_type.startswith("gemma") else 1.0


def check_head_is_plain(target: PretrainedConfig) -> None:
    """Refuse a target whose logits are not simply head times normalised state."""
    for key, neutral in UNSUPPORTED_HEAD_KEYS.items():
        value = getattr(target, key, neutral)
        if value not in (None, neutral):
            raise TargetError(
                f"The target ({target.model_type}) has {key} = {value}, which this version does not reproduce in "
                f"training; use another target."
            )
