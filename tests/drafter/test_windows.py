"""Sliding windows from settings to export: what is computed at all, what a config says, what is refused."""

import json
from pathlib import Path

import pytest
import torch
from drafter.tiny_drafter import SIZES, TINY, make_drafter
from transformers import LlamaConfig, Qwen3Config

from dflash_cache.config.settings import DrafterSettings
from dflash_cache.drafter import model
from dflash_cache.drafter.export import export_zlab, read_export
from dflash_cache.drafter.shape import FULL, SLIDING, DrafterShape, shape_from_target
from dflash_cache.errors import ConfigError

WINDOWED = {"layer_types": (SLIDING, FULL), "sliding_window": 5}


def shape_of(**settings: object) -> DrafterShape:
    target = LlamaConfig(**SIZES, num_key_value_heads=2)
    return shape_from_target(target, DrafterSettings.model_validate({"num_layers": 2, **settings}), (1, 3), 99)


@pytest.mark.parametrize(
    ("types", "anchors", "expected"),
    [
        ((SLIDING, FULL), [[20, 24], [17, 22]], [(12, 24), (0, 24)]),  # 17 − 5 + 1 = 13, in whole fours
        ((SLIDING, SLIDING), [[20, 25], [17, 0]], [(12, 28), (12, 28)]),  # a block at 0 sees nothing
        ((FULL, FULL), [[0, 3], [1, 4]], [(0, 4), (0, 4)]),
        ((SLIDING, FULL), [[0, 0], [0, 0]], [(0, 4), (0, 4)]),
        ((SLIDING, FULL), [[29, 29], [29, 29]], [(24, 30), (0, 30)]),  # 30 tokens: the last piece is none
    ],
)
def test_keys_are_computed_only_of_tokens_that_a_block_sees(
    monkeypatch: pytest.MonkeyPatch, types: tuple[str, ...], anchors: list[list[int]], expected: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(model, "_WHOLE", 4)
    window = 5 if SLIDING in types else None
    drafter = make_drafter(layer_types=types, sliding_window=window)
    states = torch.randn(2, 30, 3, 16, generator=torch.Generator().manual_seed(0))
    found = drafter.read_context(states, anchors_SA=torch.tensor(anchors))
    assert [(each.first, each.first + each.keys.shape[1]) for each in found] == expected
    for part, whole in zip(found, drafter.read_context(states), strict=True):
        end = part.first + part.keys.shape[1]
        torch.testing.assert_close(part.keys, whole.keys[:, part.first : end])
        torch.testing.assert_close(part.values, whole.values[:, part.first : end])


def test_settings_name_the_layers_that_have_the_window() -> None:
    shape = shape_of(layer_types=[SLIDING, FULL], sliding_window=16)
    assert [shape.window_of(layer) for layer in range(2)] == [16, None]
    assert DrafterShape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape
    assert shape_of(layer_types=[FULL, FULL]) == shape_of()
    assert not {"layer_types", "sliding_window"} & shape_of().to_dict().keys()  # as before there were windows


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"layer_types": [SLIDING], "sliding_window": 16},
            "drafter.layer_types names 1 layers, drafter.num_layers is 2: name each.",
        ),
        (
            {"sliding_window": 16},
            "drafter.sliding_window and sliding_attention layers need each other: set the window, and name the layers "
            "that have it in drafter.layer_types, or leave out both.",
        ),
        (
            {"layer_types": [FULL, SLIDING], "sliding_window": 15},
            "drafter.sliding_window (15) is shorter than a block (16 slots), whose slots see the anchor: make it "
            "longer.",
        ),
    ],
)
def test_windows_without_layers_or_shorter_than_a_block_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        shape_of(**settings)
    assert str(caught.value) == message


def test_an_export_says_them_as_transformers_does_and_reads_back(tmp_path: Path) -> None:
    drafter = make_drafter(**WINDOWED)
    export_zlab(drafter, tmp_path / "out", "float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    read = Qwen3Config(**{key: value for key, value in config.items() if key != "architectures"})
    assert (read.layer_types, read.sliding_window) == ([SLIDING, FULL], 5)
    assert read_export(tmp_path / "out")[0] == drafter.shape
    assert drafter.shape != TINY
