"""Scaled rotary positions against transformers' own module, read back from the exported config."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter.tiny_drafter import TINY, make_drafter
from transformers import AutoConfig, DeepseekV3Config, GptOssConfig, LlamaConfig, Qwen2VLTextConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_cache.config.settings import DrafterSettings
from dflash_cache.drafter.export import export_zlab, read_export
from dflash_cache.drafter.family import rope_parameters_of
from dflash_cache.drafter.rope import carried_scaling, rope_table, rotary_table
from dflash_cache.drafter.shape import shape_from_target

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_a_scaled_table_is_that_of_qwen3_with_the_exported_config(scaling: dict[str, Any], tmp_path: Path) -> None:
    drafter = make_drafter(rope_scaling=scaling)
    export_zlab(drafter, tmp_path / "out", "float32")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    positions = torch.arange(60)[None]
    expected = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions)
    found = rope_table(positions, TINY.head_dim, TINY.rope_theta, scaling)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    plain = rotary_table(positions, TINY.head_dim, TINY.rope_theta)
    assert float((found[0] - plain[0]).abs().max()) > 0.1
    assert read_export(tmp_path / "out")[0] == drafter.shape


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_the_drafter_places_context_and_slots_by_the_scaled_rope(scaling: dict[str, Any]) -> None:
    """With linear scaling by 4, positions 0, 4, 8, … are the plain drafter's 0, 1, 2, …; the others just differ."""
    plain, scaled = make_drafter(), make_drafter(rope_scaling=scaling)
    states = torch.randn(1, 40, 3, 16, generator=torch.Generator().manual_seed(0))
    slots = torch.randn(1, 1, 4, 16, generator=torch.Generator().manual_seed(1))
    anchor = torch.tensor([[40]])
    with torch.no_grad():
        found = scaled(slots, scaled.read_context(states), anchor)
        other = plain(slots, plain.read_context(states), anchor)
        if scaling["rope_type"] == "linear":
            key = scaled.read_context(states)[0][0][:, ::4]
            torch.testing.assert_close(key, plain.read_context(states[:, ::4])[0][0])
    assert float((found - other).abs().max()) > 1e-3


def carried(config: Any) -> dict[str, Any] | None:
    return carried_scaling(rope_parameters_of(config), config.max_position_embeddings)


def test_scalings_that_programs_do_not_share_become_the_plain_rope() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
    sizes = {"max_position_embeddings": 4096}
    assert carried(Qwen3Config(**sizes, rope_parameters=yarn)) == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024,
    }  # fmt: skip
    assert carried(DeepseekV3Config(**sizes, rope_parameters={**yarn, "mscale": 1.0, "mscale_all_dim": 1.0})) is None
    assert carried(GptOssConfig()) is None  # truncate is false
    assert carried(LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})) is None
    assert carried(Qwen3Config()) is None


def test_a_rope_of_several_dimensions_becomes_the_plain_one() -> None:
    mrope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    shape = shape_from_target(Qwen2VLTextConfig(rope_parameters=mrope), DrafterSettings(), (1,), 9)
    assert (shape.rope_theta, shape.rope_scaling) == (1e6, None)


def test_a_plain_shapes_values_are_as_they_were_before_there_was_a_scaling() -> None:
    assert "rope_scaling" not in TINY.to_dict()
    scaled = replace(TINY, rope_scaling=SCALINGS[0])
    assert scaled.to_dict()["rope_scaling"] == SCALINGS[0]
    assert type(scaled).from_dict(json.loads(json.dumps(scaled.to_dict()))) == scaled


def test_settings_outrank_the_targets_rope_norm_and_vocabulary() -> None:
    target = Qwen3Config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})
    options = {"rope_theta": 5e5, "rope_scaling": "none", "rms_norm_eps": 1e-4, "vocab_size": 77}
    shape = shape_from_target(target, DrafterSettings.model_validate(options), (1,), 9)
    assert (shape.rope_theta, shape.rope_scaling, shape.rms_norm_eps, shape.vocab_size) == (5e5, None, 1e-4, 77)
    assert shape_from_target(target, DrafterSettings(), (1,), 9).rope_scaling == {"rope_type": "linear", "factor": 4.0}


def test_a_head_size_that_servers_refuse_becomes_one_that_they_take() -> None:
    sizes = {"hidden_size": 2560, "num_attention_heads": 16, "num_key_value_heads": 4}
    odd, even = LlamaConfig(**sizes), LlamaConfig(**sizes, head_dim=256)
    for target, options, heads in (
        (odd, {}, (32, 8, 128)),  # 160 a head, as Qwen3.5-4B's: FIELD.md
        (odd, {"head_dim": 160}, (16, 4, 160)),
        (odd, {"num_attention_heads": 20, "num_key_value_heads": 4}, (20, 4, 128)),
        (even, {}, (16, 4, 256)),
    ):
        shape = shape_from_target(target, DrafterSettings.model_validate(options), (1,), 9)
        assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == heads
