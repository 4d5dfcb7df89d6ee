"""Starting from an earlier drafter: of a run, of one checkpoint, or published in z-lab's format."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter.tiny_drafter import make_drafter
from torch import Tensor
from train.rank_runs import COMPLETE, KILLED, Fate, read_log, run_ranks

from dflash_cache.config.loading import validate_config
from dflash_cache.config.settings import Config
from dflash_cache.drafter.export import export_zlab, read_export
from dflash_cache.errors import ConfigError, RunError
from dflash_cache.train.checkpoint import best_path, checkpoints_dir, latest_path, load_drafter
from dflash_cache.train.setup import open_run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def from_earlier(config: Config, path: Path | str, **drafter: Any) -> Config:
    tree = config.model_dump(mode="json")
    tree["drafter"] |= {"init_from": str(path), **drafter}
    return validate_config(tree, "test")


def starting_weights(config: Config) -> dict[str, Tensor]:
    with open_run(config) as run:
        return {name: tensor.clone() for name, tensor in run.drafter.state_dict().items()}


@pytest.fixture
def earlier(configure) -> Config:
    """A run of six steps, trained with a mask token that the rule would not choose."""
    tree = configure("earlier", max_steps=6, keep_checkpoints=9).model_dump(mode="json")
    tree["drafter"]["mask_token_id"] = 3
    config = validate_config(tree, "test")
    assert run_ranks([config]) == [(COMPLETE, "")]
    return config


def test_a_run_starts_with_the_weights_and_the_mask_token_of_the_earlier_runs_best_checkpoint(
    configure, earlier
) -> None:
    best = best_path(Path(earlier.run_dir))
    assert best is not None
    config = from_earlier(configure("later"), earlier.run_dir)
    found, expected = starting_weights(config), load_drafter(best).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    with open_run(config) as run:
        assert run.drafter.shape.mask_token_id == 3
        assert run.step == 0
    with open_run(from_earlier(configure("other"), earlier.run_dir, mask_token_id=119, block_size=3)) as run:
        assert run.drafter.shape.mask_token_id == 119
        assert run.drafter.shape.block_size == 3
    one = sorted(checkpoints_dir(Path(earlier.run_dir)).glob("*2*"))[0]
    found, expected = starting_weights(from_earlier(configure("second"), one)), load_drafter(one).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_training_goes_on_from_a_published_drafter_and_not_from_scratch(configure, earlier, tmp_path) -> None:
    drafter = load_drafter(best_path(Path(earlier.run_dir)))
    export_zlab(drafter, tmp_path / "published", "bfloat16")
    config = from_earlier(configure("later", max_steps=1, learning_rate=1e-9), tmp_path / "published")
    found = starting_weights(config)
    for name, tensor in drafter.state_dict().items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor.to(torch.bfloat16).float())
    assert run_ranks([config]) == [(COMPLETE, "")]
    one, last = (read_log(each)[-1] for each in (config, earlier))
    assert one["kind"] == last["kind"] == "validation"
    assert one["loss"] == pytest.approx(last["loss"], rel=1e-2)  # bfloat16 has eight bits


def test_a_run_from_an_earlier_drafter_killed_and_resumed_has_the_same_bits(configure, earlier, tmp_path) -> None:
    whole, parts = (from_earlier(configure(name), earlier.run_dir) for name in ("whole", "parts"))
    assert run_ranks([whole]) == [(COMPLETE, "")]
    assert run_ranks([parts], Fate(rank=0, step=5)) == [(KILLED, "")]
    assert run_ranks([parts]) == [(COMPLETE, "")]
    one, other = (load_drafter(latest_path(Path(each.run_dir))).state_dict() for each in (whole, parts))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    moved = from_earlier(parts, best_path(Path(earlier.run_dir)))  # the same weights under another name
    with open_run(moved):
        pass
    with (
        pytest.raises(RunError, match=r"init: was weights [0-9a-f]{16}, is target-layers"),
        open_run(from_earlier(parts, "").model_copy(update={"drafter": configure("x").drafter})),
    ):
        pass


def test_a_drafter_of_another_shape_or_of_other_layers_is_refused_with_the_difference(configure, earlier) -> None:
    config = from_earlier(configure("later"), earlier.run_dir, num_layers=2, intermediate_size=96)
    with pytest.raises(ConfigError) as caught, open_run(config):
        pass
    assert f"the drafter in {earlier.run_dir} is another than the one to be trained" in str(caught.value)
    assert "(intermediate_size: there 48, here 96; num_layers: there 1, here 2)" in str(caught.value)
    assert not Path(config.run_dir).exists()


def test_this_runs_own_folder_and_a_place_without_a_drafter_are_refused(configure, tmp_path) -> None:
    config = configure("run")
    for path in (config.run_dir, f"{config.run_dir}/checkpoints/step-2"):
        with pytest.raises(ConfigError, match="inside this run's own folder"), open_run(from_earlier(config, path)):
            pass
    (tmp_path / "empty").mkdir()
    for name in ("empty", "none"):
        with pytest.raises(RunError, match=f"There is no checkpoint.* .*{name}"):
            starting_weights(from_earlier(config, tmp_path / name))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "rope_type dynamic"),
        ({"rope_parameters": None, "rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type longrope"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types chunked_attention"),
        ({"layer_types": ["full_attention"]}, "1 layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window None"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}, "sliding_window 3"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "is_causal": False}, "causal False"),
        ({"is_causal": True}, "causal True"),
        ({"use_sliding_window": True}, "use_sliding_window but no such layer_types"),
        ({"attention_bias": True, "hidden_act": "gelu"}, "attention_bias and hidden_act gelu"),
    ],
)
def test_a_published_drafter_that_computes_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    export_zlab(make_drafter(), tmp_path / "published", "float32")
    path = tmp_path / "published" / "config.json"
    config = json.loads(path.read_text())
    older = {name: value for name, value in config.items() if name not in ("rope_parameters", "layer_types")}
    path.write_text(json.dumps(older | {"rope_scaling": None}))
    assert read_export(tmp_path / "published")[0].rope_theta == 1000.0
    path.write_text(json.dumps(config | changes))
    with pytest.raises(RunError, match=f"drafters with {reason} are not supported"):
        read_export(tmp_path / "published")
