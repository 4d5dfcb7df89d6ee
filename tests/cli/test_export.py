"""An export says what its target applies to logits, whatever the checkpoint recorded; what contradicts is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.test_errors import check
from cli.test_other_target import copy_with_other_weights

from dflash_cache.train.checkpoint import latest_path, load_checkpoint, load_drafter

SCALE = 0.0625  # Cohere 2's


def read_own(folder: Path) -> dict[str, Any]:
    """What z-lab's package looks up first."""
    own: dict[str, Any] = json.loads((folder / "config.json").read_text())["dflash_config"]
    return own


def name(folder: Path, **values: float | None) -> None:
    """Put values into an export's config, or take them out of it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["dflash_config"] |= values
    config["dflash_config"] = {key: value for key, value in config["dflash_config"].items() if value is not None}
    path.write_text(json.dumps(config))


@pytest.fixture
def scaled(dflash, project: Path, save_family) -> tuple[object, ...]:
    """The arguments of a project whose target scales its logits, and whose run is done."""
    settings = (f"target.model={save_family('cohere2')}", "drafter.init=random", "train.max_steps=2")
    given = (project, *(part for setting in settings for part in ("--set", setting)))
    for command in ("generate", "train"):
        outcome = dflash(command, *given)
        assert outcome.code == 0, outcome.err
    return given


def test_the_targets_factor_goes_out_and_comes_back(dflash, scaled, tmp_path) -> None:
    assert dflash("export", *scaled, tmp_path / "out").code == 0
    assert read_own(tmp_path / "out")["output_multiplier"] == SCALE
    assert load_drafter(tmp_path / "out").shape == load_drafter(tmp_path / "run").shape
    assert load_drafter(tmp_path / "run").shape.logit_scale == SCALE
    again = dflash("train", *scaled, "--set", f"run_dir={tmp_path}/again", "--from", tmp_path / "out")
    assert again.code == 0, again.err


def test_earlier_checkpoints_and_exports_without_the_factor_are_taken_and_exported_with_it(
    dflash, scaled, tmp_path
) -> None:
    path = latest_path(tmp_path / "run")
    fields = vars(load_checkpoint(path))
    assert "drafter.logit_scale" not in fields["identity"]  # else no run begun before could go on
    assert fields["shape"].pop("logit_scale") == SCALE
    torch.save(fields, path)
    resumed = dflash("train", *scaled)
    assert resumed.code == 0, resumed.err
    assert dflash("export", *scaled, tmp_path / "out", "--checkpoint", path).code == 0
    assert read_own(tmp_path / "out")["output_multiplier"] == SCALE

    name(tmp_path / "out", output_multiplier=None)
    assert dflash("export", *scaled, tmp_path / "anew", "--checkpoint", tmp_path / "out").code == 0
    assert read_own(tmp_path / "anew")["output_multiplier"] == SCALE
    further = dflash("train", *scaled, "--set", f"run_dir={tmp_path}/further", "--from", tmp_path / "out")
    assert further.code == 0, further.err


def test_an_export_that_names_another_factor_than_the_targets_is_refused(dflash, scaled, tmp_path) -> None:
    assert dflash("export", *scaled, tmp_path / "out").code == 0
    name(tmp_path / "out", output_multiplier=0.5, trained_for=None)
    given = ("--checkpoint", tmp_path / "out")
    for refused in (dflash("eval", *scaled, *given), dflash("export", *scaled, tmp_path / "anew", *given)):
        check(refused, "trained for another target (logit_scale 0.5, not 0.0625): set target.model to its target")
    refused = dflash("train", *scaled, "--set", f"run_dir={tmp_path}/again", "--from", tmp_path / "out")
    check(refused, "is another than the one to be trained (logit_scale: there 0.5, here 0.0625)")
    assert not (tmp_path / "anew").exists()


def test_an_export_for_another_target_of_its_sizes_is_made_only_by_request(
    dflash, project, llama_folder, tmp_path
) -> None:
    for command in ("generate", "train"):
        assert dflash(command, project).code == 0
    weights = copy_with_other_weights(llama_folder, tmp_path / "weights")
    given = ("export", project, tmp_path / "out", "--set", f"target.model={weights}")
    check(dflash(*given), f"trained for another target ({llama_folder})", "give --other-target")
    assert not (tmp_path / "out").exists()
    assert dflash(*given, "--other-target").code == 0
