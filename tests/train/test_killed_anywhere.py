"""`dflash train` and `dflash sweep`, killed with SIGKILL anywhere and started again: the same bits as undisturbed."""

from pathlib import Path

import pytest
import torch
import yaml
from train.killing import Command, kill_until_done, run_whole
from train.rank_runs import final_state, read_log

from dflash_cache.config.loading import dump_config, load_config
from dflash_cache.config.settings import Config
from dflash_cache.config.sweep import load_sweep

NUM_KILLS = 10
GRID = {"train.learning_rate": [1e-3, 3e-3], "objective.weights": ["decay", "dpace"]}


def assert_same_runs(one: list[Config], other: list[Config]) -> None:
    """The same weights and moments to the bit, and the same records."""
    for config, twin in zip(one, other, strict=True):
        (step, tensors), (expected_step, expected) = final_state(config), final_state(twin)
        assert step == expected_step
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
        assert read_log(config) == read_log(twin)


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "devices"),
    [("replicated", 1, []), ("replicated", 2, []), ("sharded", 2, []), ("sharded", 2, ["--devices", "cpu:2"])],
)
def test_a_run_killed_anywhere_ends_with_the_same_bits(configure, tmp_path: Path, parallel, num_ranks, devices) -> None:
    def make(name: object) -> Command:
        config = configure(f"run-{name}", accumulation=4 // num_ranks, parallel=parallel, ema_decay=0.9)
        path = tmp_path / f"{name}.yaml"
        path.write_text(dump_config(config))
        return Command(["train", str(path), *devices], Path(config.run_dir), 1 if devices else num_ranks)

    seconds = run_whole(make("whole"))
    kills = kill_until_done(make, seconds, NUM_KILLS, seed=num_ranks)
    whole = load_config(tmp_path / "whole.yaml")
    for number in kills.finished:
        assert_same_runs([load_config(tmp_path / f"{number}.yaml")], [whole])
        assert not make(number).half_saved()


@pytest.mark.parametrize(
    ("mode", "grid", "num_kills"),
    [("turns", GRID, NUM_KILLS), ("together", GRID, NUM_KILLS), ("devices", {"train.learning_rate": [1e-3, 3e-3]}, 3)],
)
def test_a_sweep_killed_anywhere_ends_with_the_same_bits(configure, tmp_path: Path, mode, grid, num_kills) -> None:
    def make(name: object) -> Command:
        tree = {
            "base": "base.yaml",
            "sweep_dir": str(tmp_path / f"sweep-{name}"),
            "mode": mode,
            "devices": "cpu:2",
            "grid": grid,
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
        return Command(["sweep", str(tmp_path / f"{name}.yaml")], tmp_path / f"sweep-{name}")

    def runs(name: object) -> list[Config]:
        return [run.config for run in load_sweep(tmp_path / f"{name}.yaml").runs]

    (tmp_path / "base.yaml").write_text(dump_config(configure("base")))
    seconds = run_whole(make("whole"))
    kills = kill_until_done(make, seconds, num_kills, seed=7)
    for number in kills.finished:
        assert_same_runs(runs(number), runs("whole"))
        assert not make(number).half_saved()
