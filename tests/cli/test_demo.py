"""The demo's whole way with targets of several families: one configuration, of which only target.model changes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dflash_cache.train.checkpoint import latest_path, load_checkpoint


@pytest.fixture
def demo(project: Path) -> Path:
    """A configuration in which, as in configs/demo.yaml, nothing depends on the target's family."""
    folder = project.parent
    prompts = [json.dumps({"prompt": f"w{i % 83} w{(5 * i) % 89}"}) for i in range(48)]
    (folder / "train.jsonl").write_text("\n".join(prompts) + "\n")
    config = yaml.safe_load(project.read_text())
    config["data"] |= {"paths": [str(folder / "train.jsonl")], "num_buckets": 2}
    config["respond"] = {"enabled": True, "max_new_tokens": 24}
    config["drafter"] |= {"init": "auto"}
    config["train"] |= {"epochs": 12, "learning_rate": 4e-3, "token_budget": 256}
    config["eval"] |= {"max_new_tokens": 24}
    project.write_text(yaml.safe_dump(config))
    return project


@pytest.mark.parametrize(("family", "start"), [("qwen3", "target-layers"), ("mixtral", "random"), ("gemma3", "random")])
def test_another_family_runs_through_all_stages_by_a_change_of_the_target_alone(
    dflash, demo: Path, save_family: Callable[[str], Path], family: str, start: str
) -> None:
    config = yaml.safe_load(demo.read_text())
    config["target"]["model"] = str(save_family(family))
    demo.write_text(yaml.safe_dump(config))
    outcome = dflash("demo", demo)
    assert outcome.code == 0, outcome.err
    run = demo.parent / "run"
    report = json.loads((run / "report.json").read_text())
    assert report["stages"]["generate"]["samples"] == 48
    assert report["lossless"] is True
    assert report["acceptance_length"] > report["acceptance_length_untrained"] >= 1.0
    assert "output               the target’s own, token for token" in outcome.out
    assert load_checkpoint(latest_path(run)).identity["init"] == start

    assert dflash("demo", demo).code == 0  # a rerun does nothing again but look at the cache
    again = json.loads((run / "stages.json").read_text())
    assert {**again, "inspect": None} == {**report["stages"], "inspect": None}
