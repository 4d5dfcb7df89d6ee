"""A small drafter of odd sizes for tests, and a target's sizes in a config."""

from dataclasses import replace
from typing import Any

import torch

from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.shape import DrafterShape

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 9,
    "num_attention_heads": 6,
    "max_position_embeddings": 333,
}

TINY = DrafterShape(
    hidden_size=16,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=24,
    rms_norm_eps=1e-5,
    rope_theta=1000.0,
    vocab_size=40,
    max_position_embeddings=64,
    block_size=4,
    mask_token_id=39,
    target_layer_ids=(1, 3, 4),
    target_num_layers=7,
)


def make_drafter(seed: int = 0, **changes: object) -> Drafter:
    """A small drafter whose norms are not all ones, so that a forgotten one shows."""
    drafter = Drafter(replace(TINY, **changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.dim() == 1))
    return drafter
