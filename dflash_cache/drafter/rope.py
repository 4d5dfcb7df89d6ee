"""The drafter's rotary positions: the target's base, and its scaling where servers compute the same one.

Three scalings are fixed sets of frequencies that z-lab's package, SGLang and vLLM read from a Qwen3 config alike:
linear, llama3, and YaRN in its plain form. What depends on the length of the text (dynamic, longrope), what has several
dimensions (Qwen-VL's mrope, which for text is the plain rope), and YaRN with factors of its own for the attention
(DeepSeek's mscale, gpt-oss's truncate; programs differ in them) is replaced by the plain rope: a drafter learns its own
layers, and needs positions that are the same in training and serving. Scaled frequencies are transformers' own.
"""

import json
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# The parameters that each carried scaling has; with any other one that is set it is another scaling.
CARRIED = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "beta_fast", "beta_slow", "original_max_position_embeddings"},
}
_NOT_SCALING = {"rope_theta", "type", "rope_type", "partial_rotary_factor"}

Scaling = dict[str, Any]  # rope_type and the parameters above, as in a config's rope_parameters


def carried_scaling(parameters: dict[str, Any], max_position_embeddings: int) -> Scaling | None:
    """The scaling in a config's rope parameters that a drafter has too, None where it has the plain rope."""
    kind = parameters.get("rope_type", parameters.get("type"))
    given = {key: value for key, value in parameters.items() if key not in _NOT_SCALING and value is not None}
    if kind not in CARRIED or given.keys() - CARRIED[kind]:
        return None
    if "original_max_position_embeddings" in CARRIED[kind]:
        given.setdefault("original_max_position_embeddings", max_position_embeddings)
    return {"rope_type": kind, **{key: given[key] for key in sorted(given)}}


def rope_table(positions: Tensor, head_dim: int, theta: float, scaling: Scaling | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines (…, D) in float32 of the rotary embedding at integer `positions` (…)."""
    if scaling is None:
        return rotary_table(positions, head_dim, theta)
    frequencies, factor = _scaled_frequencies(head_dim, theta, json.dumps(scaling))
    angles = positions[..., None].float() * frequencies.to(positions.device)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * factor, angles.sin() * factor


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines (…, D) in float32 of the rotary embedding at integer `positions` (…)."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None].float() * theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(vectors: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate (…, heads, D) by a table (…, D): halves as pairs, as in Llama and Qwen."""
    cos, sin = (part[..., None, : part.shape[-1] // 2].to(vectors.dtype) for part in table)
    rotated: Tensor = _Rotation.apply(vectors, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


class _Rotation(torch.autograd.Function):
    """Each pair by its angle; the gradient turns back by the same. Two passes over the vectors instead of six."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(vectors, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradients[0], cos, sin, -1), None, None


def _turn(vectors: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    turned = torch.empty_like(vectors, memory_format=torch.contiguous_format)
    first, second = vectors.chunk(2, dim=-1)
    to_first, to_second = turned.chunk(2, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-way)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin, value=way)
    return turned


@lru_cache(maxsize=4)
def _scaled_frequencies(head_dim: int, theta: float, scaling: str) -> tuple[Tensor, float]:
    """Frequencies (D / 2) on the CPU, and what cosines and sines are multiplied by (YaRN's attention factor)."""
    parameters = {"rope_theta": theta, **json.loads(scaling)}
    original = parameters.get("original_max_position_embeddings", 1)
    config = Qwen3Config(
        head_dim=head_dim,
        max_position_embeddings=round(original * parameters["factor"]),
        rope_parameters=parameters,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    return frequencies, float(factor)
