from dataclasses import replace
from itertools import pairwise

import pytest
from drafter.tiny_drafter import SIZES, TINY
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)

from dflash_cache.config.settings import DrafterSettings
from dflash_cache.drafter.shape import (
    DrafterShape,
    find_contradictions,
    shape_from_target,
    spread_layer_ids,
    take_surroundings,
)
from dflash_cache.errors import ConfigError


def shape_of(target: PretrainedConfig, **settings: object) -> DrafterShape:
    return shape_from_target(target, DrafterSettings.model_validate(settings), (1, 3, 6), mask_token_id=99)


@pytest.mark.parametrize(
    ("num_layers", "count", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),  # z-lab's Qwen3-8B drafter
        (30, 5, (1, 8, 14, 20, 27)),  # 7.5 and 20.5 go to the even neighbour
        (8, 5, (1, 2, 3, 4, 5)),
        (5, 2, (1, 2)),
        (36, 1, (18,)),
        (5, 1, (2,)),
        (1, 1, (0,)),
    ],
)
def test_layers_are_spread_from_the_second_to_the_third_to_last(
    num_layers: int, count: int, expected: tuple[int, ...]
) -> None:
    assert spread_layer_ids(num_layers, count) == expected


@given(num_layers=st.integers(1, 200), count=st.integers(2, 40))
def test_spread_layers_ascend_are_even_and_end_three_before_the_last_or_are_refused(
    num_layers: int, count: int
) -> None:
    if num_layers < count + 3:
        with pytest.raises(ConfigError):
            spread_layer_ids(num_layers, count)
        return
    ids = spread_layer_ids(num_layers, count)
    assert (len(ids), ids[0], ids[-1]) == (count, 1, num_layers - 3)
    gaps = [b - a for a, b in pairwise(ids)]
    step = (num_layers - 4) / (count - 1)
    assert all(gap >= 1 and abs(gap - step) <= 1 for gap in gaps)


def test_a_target_too_shallow_is_told_how_many_layers_it_has_room_for() -> None:
    with pytest.raises(ConfigError) as caught:
        spread_layer_ids(7, 5)
    assert str(caught.value) == (
        "target.num_layers is 5, but the target's 7 layers leave room for 4; lower it or write target.layer_ids out."
    )
    assert spread_layer_ids(7, 4) == (1, 2, 3, 4)


def test_sizes_come_from_the_target() -> None:
    target = LlamaConfig(**SIZES, num_key_value_heads=2, rms_norm_eps=3e-5, rope_theta=5000.0)
    assert shape_of(target) == DrafterShape(
        hidden_size=48,
        num_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,  # 48 / 6
        intermediate_size=72,
        rms_norm_eps=3e-5,
        rope_theta=5000.0,
        vocab_size=100,
        max_position_embeddings=333,
        block_size=16,
        mask_token_id=99,
        target_layer_ids=(1, 3, 6),
        target_num_layers=9,
        embedding_scale=1.0,
    )


def test_settings_outrank_the_target() -> None:
    target = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8)
    shape = shape_of(
        target,
        num_layers=2,
        block_size=7,
        intermediate_size=40,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=10,
    )
    assert (shape.num_layers, shape.block_size, shape.intermediate_size) == (2, 7, 40)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (8, 4, 10)
    assert (shape.hidden_size, shape.target_num_layers) == (48, 9)


@pytest.mark.parametrize(
    ("target", "head_dim", "kv_heads"),
    [
        (LlamaConfig(**SIZES, num_key_value_heads=3), 8, 3),
        (Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=20), 20, 2),  # not hidden / heads
        (Gemma3TextConfig(**SIZES, num_key_value_heads=1, head_dim=12), 12, 1),
        (GPTNeoXConfig(**SIZES), 8, 6),  # names neither: plain multi-head attention
    ],
)
def test_head_sizes_are_those_the_target_writes_out_or_implies(
    target: PretrainedConfig, head_dim: int, kv_heads: int
) -> None:
    shape = shape_of(target)
    assert (shape.head_dim, shape.num_key_value_heads) == (head_dim, kv_heads)


def test_sizes_of_a_target_whose_layers_differ_are_its_first_layers_and_its_widest() -> None:
    layers = {0: {"head_dim": 16}, 3: {"intermediate_size": 144}, 5: {"head_dim": 32, "num_key_value_heads": 6}}
    shape = shape_of(Qwen3Config(**SIZES, num_key_value_heads=3, head_dim=20, per_layer_config=layers))
    assert (shape.head_dim, shape.num_key_value_heads, shape.intermediate_size) == (16, 3, 144)
    gemma4 = Gemma4TextConfig(**SIZES, num_key_value_heads=3, head_dim=20)  # 512 in its full layers
    assert shape_of(gemma4).head_dim == 20


def test_the_factors_and_the_cap_around_a_drafter_are_the_targets() -> None:
    shape = shape_of(GraniteConfig(**SIZES, embedding_multiplier=12.0, logits_scaling=8.0))
    assert (shape.embedding_scale, shape.logit_scale, shape.softcap) == (12.0, 0.125, None)
    shape = shape_of(Gemma2Config(**SIZES, head_dim=8, num_key_value_heads=3, final_logit_softcapping=30.0))
    assert (shape.embedding_scale, shape.logit_scale, shape.softcap) == (48**0.5, 1.0, 30.0)
    values = shape.to_dict()
    assert DrafterShape.from_dict(values) == shape
    assert not {"logit_scale", "softcap"} & TINY.to_dict().keys()  # as before they were recorded
    earlier = DrafterShape.from_dict({name: value for name, value in values.items() if name != "softcap"})
    assert earlier != shape
    target = Gemma2Config(**SIZES, final_logit_softcapping=30.0)
    assert take_surroundings(earlier, target) == shape


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({}, []),
        ({"embedding_scale": 1.0}, ["embedding_scale"]),
        ({"embedding_scale": 6.9375}, []),  # as bfloat16 rounds it
        ({"embedding_scale": 7.0}, ["embedding_scale"]),
        ({"logit_scale": 1.0, "softcap": None}, []),  # nothing is said
        ({"logit_scale": 0.5}, ["logit_scale"]),
        ({"softcap": 20.0}, ["softcap"]),
        ({"logit_scale": 8.0, "softcap": 31.0}, ["logit_scale", "softcap"]),
    ],
)
def test_a_shape_contradicts_a_target_where_it_says_something_else(said: dict[str, float], found: list[str]) -> None:
    own = replace(TINY, embedding_scale=48**0.5, logit_scale=0.125, softcap=30.0)
    assert find_contradictions(replace(own, **said), own) == found
    assert find_contradictions(own, TINY) == ["embedding_scale", "logit_scale", "softcap"]


def test_query_heads_that_no_multiple_of_key_value_heads_makes_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        shape_of(LlamaConfig(**SIZES, num_key_value_heads=2), num_key_value_heads=4)
    assert str(caught.value) == (
        "The drafter's 6 attention heads are no multiple of its 4 key-value heads; set drafter.num_attention_heads or "
        "drafter.num_key_value_heads."
    )


def test_a_shape_comes_back_equal_from_its_plain_values() -> None:
    values = TINY.to_dict()
    assert DrafterShape.from_dict(values) == TINY
    assert DrafterShape.from_dict({**values, "target_layer_ids": list(TINY.target_layer_ids)}) == TINY
