"""What an export in z-lab's form says beside the tensors, and what is read from a published one."""

import json
from pathlib import Path
from typing import Any

import pytest
from drafter.tiny_drafter import TINY, make_drafter
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.drafter.export import export_zlab, read_export, shape_from_zlab, zlab_config
from dflash_cache.errors import RunError

KEYS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")


def test_factors_and_cap_are_named_where_zlabs_package_looks_and_left_out_where_there_are_none() -> None:
    own = zlab_config(make_drafter().shape, "float32")
    assert not own["dflash_config"].keys() & {*KEYS}
    assert "logit_scale" not in own
    shape = make_drafter(embedding_scale=4.0, logit_scale=0.125, softcap=30.0).shape
    config = zlab_config(shape, "bfloat16")
    assert [config["dflash_config"][key] for key in KEYS] == [4.0, 0.125, 30.0]
    assert config["logit_scale"] == 0.125  # vLLM's name
    assert not config.keys() & {*KEYS}


@given(
    embedding_scale=st.floats(1e-3, 1e3),
    logit_scale=st.floats(1e-3, 1e3),
    softcap=st.none() | st.floats(1e-3, 1e3),
)
def test_factors_and_cap_read_back_to_the_bit(embedding_scale: float, logit_scale: float, softcap: float) -> None:
    shape = make_drafter(embedding_scale=embedding_scale, logit_scale=logit_scale, softcap=softcap).shape
    assert shape_from_zlab(json.loads(json.dumps(zlab_config(shape, "float32")))) == shape


@pytest.mark.parametrize(
    ("inside", "outside", "expected"),
    [
        ({}, {}, (1.0, 1.0, None)),
        ({KEYS[0]: 4, KEYS[1]: 0.5, KEYS[2]: 30}, {}, (4.0, 0.5, 30.0)),
        ({}, {KEYS[0]: 4, KEYS[1]: 0.5, KEYS[2]: 30}, (4.0, 0.5, 30.0)),
        ({KEYS[0]: 4, KEYS[1]: 0.5, KEYS[2]: 30}, {KEYS[0]: 5, KEYS[1]: 6, KEYS[2]: 7}, (4.0, 0.5, 30.0)),
        ({KEYS[2]: 0.0}, {KEYS[2]: 7}, (1.0, 1.0, None)),  # z-lab caps only at what is above 0
        ({KEYS[2]: None}, {KEYS[2]: 7}, (1.0, 1.0, None)),
        ({KEYS[2]: -1.0}, {}, (1.0, 1.0, None)),
    ],
)
def test_published_factors_and_caps_are_found_inside_dflash_config_before_the_top(
    inside: dict[str, Any], outside: dict[str, Any], expected: tuple[float, float, float | None]
) -> None:
    config = zlab_config(TINY, "float32")
    shape = shape_from_zlab({**config, **outside, "dflash_config": {**config["dflash_config"], **inside}})
    assert (shape.embedding_scale, shape.logit_scale, shape.softcap) == expected


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ({"output_multiplier": 0.0}, "output_multiplier 0"),
        ({"output_multiplier": -1.0}, "output_multiplier -1"),
        ({"output_multiplier": float("nan")}, "output_multiplier nan"),
        ({"input_embedding_scale": float("inf")}, "input_embedding_scale inf"),
    ],
)
def test_a_published_factor_that_is_no_positive_number_is_refused(
    own: dict[str, float], reason: str, tmp_path: Path
) -> None:
    export_zlab(make_drafter(), tmp_path / "published", "float32")
    path = tmp_path / "published" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "dflash_config": {**config["dflash_config"], **own}}))
    with pytest.raises(RunError, match=f"drafters with {reason} are not supported"):
        read_export(tmp_path / "published")
