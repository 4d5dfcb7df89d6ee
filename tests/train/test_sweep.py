"""Many drafters over one cache: each ends with the bits that it has alone, however the sweep was run."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from train.rank_runs import final_state, read_log, server

from dflash_cache.cache.reader import CacheReader
from dflash_cache.config.loading import dump_config
from dflash_cache.config.settings import Config
from dflash_cache.config.sweep import Sweep, SweepRun, load_sweep
from dflash_cache.errors import CacheError, ConfigError
from dflash_cache.train import processes
from dflash_cache.train.loop import train
from dflash_cache.train.metrics import JsonLines
from dflash_cache.train.processes import Outcome
from dflash_cache.train.sweep import group_runs, run_sweep
from dflash_cache.train.sweep_table import read_last_step, tabulate, write_sweep_table

GRID = {"train.learning_rate": [1e-3, 3e-3], "objective.weights": ["decay", "dpace"]}


@pytest.fixture
def make_sweep(configure, tmp_path: Path) -> Callable[..., Sweep]:
    """A sweep over the small cache, in a new folder `name`."""

    def make(name: str, **settings: object) -> Sweep:
        (tmp_path / "base.yaml").write_text(dump_config(configure("base")))
        tree = {"base": "base.yaml", "sweep_dir": str(tmp_path / name), "grid": GRID, **settings}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
        return load_sweep(tmp_path / f"{name}.yaml")

    return make


@pytest.fixture
def from_server(monkeypatch) -> None:
    """Runs of their own processes come from a server that has imported torch already."""
    monkeypatch.setattr(processes, "get_context", lambda _: server)


@contextmanager
def log_only(run: SweepRun) -> Iterator[list[JsonLines]]:
    with JsonLines(Path(run.config.run_dir) / "log.jsonl") as log:
        yield [log]


def train_alone(sweep: Sweep, tmp_path: Path) -> dict[str, Config]:
    """Each run of the sweep as `dflash train` trains it."""
    alone = {}
    for run in sweep.runs:
        config = run.config.model_copy(update={"run_dir": str(tmp_path / "alone" / run.name)})
        with JsonLines(Path(config.run_dir) / "log.jsonl") as log:
            assert train(config, [log])
        alone[run.name] = config
    return alone


def assert_same_runs(sweep: Sweep, alone: dict[str, Config]) -> None:
    for run in sweep.runs:
        (step, tensors), (expected_step, expected) = final_state(run.config), final_state(alone[run.name])
        assert step == expected_step
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
        assert read_log(run.config) == read_log(alone[run.name])


def test_together_each_batch_is_read_once_and_every_run_has_the_bits_that_it_has_alone(
    make_sweep, tmp_path, monkeypatch
) -> None:
    reads: list[bytes] = []
    read_batch = CacheReader.read_batch
    monkeypatch.setattr(
        CacheReader, "read_batch", lambda self, rows: (reads.append(rows.tobytes()), read_batch(self, rows))[1]
    )
    sweep = make_sweep("together", mode="together")
    assert [run.name for run in sweep.runs] == [
        "learning_rate=0.001,weights=decay",
        "learning_rate=0.001,weights=dpace",
        "learning_rate=0.003,weights=decay",
        "learning_rate=0.003,weights=dpace",
    ]
    assert set(run_sweep(sweep, log_only).values()) == {Outcome("complete")}
    together, reads = sorted(reads), []
    assert train(sweep.runs[0].config.model_copy(update={"run_dir": str(tmp_path / "one")}), [])
    assert together == sorted(reads)
    assert_same_runs(sweep, train_alone(sweep, tmp_path))
    weights = [final_state(run.config)[1]["fc.weight"] for run in sweep.runs]
    assert not any(torch.equal(weights[0], other) for other in weights[1:])


@pytest.mark.usefixtures("from_server")
def test_one_run_a_device_ends_like_the_others(make_sweep, tmp_path) -> None:
    sweep = make_sweep("devices", mode="devices", devices="cpu:2")
    assert set(run_sweep(sweep, log_only).values()) == {Outcome("complete")}
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    try:
        assert_same_runs(sweep, train_alone(sweep, tmp_path))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("from_server")
def test_a_signal_stops_the_runs_on_all_devices_with_a_checkpoint_each(make_sweep, tmp_path) -> None:
    sweep = make_sweep("stopped", mode="devices", devices="cpu:2")
    log = Path(sweep.runs[0].config.run_dir) / "log.jsonl"

    def stop_soon() -> None:
        while not (log.exists() and log.read_text().count("\n") >= 2):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_soon).start()
    outcomes = run_sweep(sweep, log_only)
    assert "failed" not in {outcome.status for outcome in outcomes.values()}
    assert outcomes[sweep.runs[-1].name] == Outcome("stopped")  # it had not begun
    for run in sweep.runs:
        if (Path(run.config.run_dir) / "checkpoints").exists():
            assert final_state(run.config)[0] == [rec["step"] for rec in read_log(run.config)][-1]
    assert set(run_sweep(sweep, log_only).values()) == {Outcome("complete")}


def test_a_run_that_fails_leaves_the_others_alone(make_sweep, tmp_path) -> None:
    sweep = make_sweep(
        "failing", mode="together", runs=[{"train.max_skipped": 2}], grid={"train.learning_rate": [1e-3, 1e30]}
    )
    outcomes = run_sweep(sweep, log_only)
    assert [outcome.status for outcome in outcomes.values()] == ["complete", "failed"]
    assert "lower train.learning_rate" in outcomes["max_skipped=2,learning_rate=1e+30"].error
    fine = {
        sweep.runs[0].name: train_alone(sweep.__class__(sweep.settings, sweep.runs[:1]), tmp_path)[sweep.runs[0].name]
    }
    assert_same_runs(Sweep(sweep.settings, sweep.runs[:1]), fine)


@pytest.mark.parametrize("mode", ["turns", "together"])
def test_a_run_that_is_refused_before_it_begins_leaves_the_others_alone(make_sweep, mode) -> None:
    runs = [{"objective.gamma": 2.0}, {"drafter.num_attention_heads": 3}, {"objective.gamma": 3.0}]
    outcomes = run_sweep(make_sweep(mode, mode=mode, runs=runs, grid={"train.max_steps": [1]}), log_only)
    assert [outcome.status for outcome in outcomes.values()] == ["complete", "failed", "complete"]
    assert "set drafter.num_attention_heads" in outcomes["num_attention_heads=3,max_steps=1"].error


def test_wandb_gets_each_run_under_its_own_name_in_one_group(make_sweep, tmp_path) -> None:
    for given, group in (({"mode": "offline", "name": "mine"}, "tracked"), ({"group": "ours"}, "ours")):
        tree = yaml.safe_load((make_sweep("tracked").folder.parent / "base.yaml").read_text())
        (tmp_path / "tracking.yaml").write_text(yaml.safe_dump(tree | {"wandb": tree["wandb"] | given}))
        runs = make_sweep("tracked", base="tracking.yaml").runs
        assert [(run.config.wandb.name, run.config.wandb.group) for run in runs] == [(run.name, group) for run in runs]


def test_the_table_ranks_by_the_best_validation(make_sweep, tmp_path) -> None:
    sweep = make_sweep("table", mode="together")
    outcomes = run_sweep(sweep, log_only)
    rows = tabulate(sweep, outcomes)
    for row in rows:
        log = read_log(next(run.config for run in sweep.runs if run.name == row["name"]))
        best = max(record["acceptance_estimate"] for record in log if record["kind"] == "validation")
        assert row["acceptance_estimate"] == best
    assert [row["acceptance_estimate"] for row in rows] == sorted(
        (row["acceptance_estimate"] for row in rows), reverse=True
    )
    found = pq.read_table(write_sweep_table(sweep, rows)).to_pylist()
    assert [(row["name"], row["train.learning_rate"]) for row in found] == [
        (row["name"], str(row["train.learning_rate"])) for row in rows
    ]


def test_only_validations_that_walked_are_ranked(make_sweep) -> None:
    """Records of before had the mean over random anchors under the same name, which is higher."""
    sweep = make_sweep("old", grid={"train.seed": [0, 1, 2]})
    walked = {"kind": "validation", "loss": 2.0, "position_accuracy": [0.5], "acceptance_estimate": 1.25, "passes": 8}
    old = {name: value for name, value in walked.items() if name != "passes"} | {"acceptance_estimate": 1.75}
    logs = [[old | {"step": 2}], [old | {"step": 2}, walked | {"step": 4}], [walked | {"step": 2}]]
    for run, records in zip(sweep.runs, logs, strict=True):
        with JsonLines(Path(run.config.run_dir) / "log.jsonl") as log:
            for record in records:
                log(record)
    rows = tabulate(sweep, {run.name: Outcome("complete") for run in sweep.runs})
    found = [(row["name"], row["step"], row["acceptance_estimate"]) for row in rows]
    assert found == [("seed=1", 4, 1.25), ("seed=2", 2, 1.25), ("seed=0", None, None)]


def test_the_last_step_is_found_at_the_end_of_a_log_that_a_kill_may_have_cut(tmp_path) -> None:
    assert read_last_step(tmp_path) is None
    steps = [{"kind": "train", "step": step, "filling": "x" * 5000} for step in range(1, 60)]
    records = [*steps, {"kind": "validation", "step": 59}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read_last_step(tmp_path) == steps[-1]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records)[:-7000])
    assert read_last_step(tmp_path) == steps[-3]
    (tmp_path / "log.jsonl").write_text("")
    assert read_last_step(tmp_path) is None


def test_runs_of_other_seeds_read_another_order_and_share_nothing(make_sweep) -> None:
    grid = {"train.seed": [0, 1], "drafter.num_layers": [1, 2]}
    groups = [[run.name for run in group] for group in group_runs(make_sweep("seeds", mode="together", grid=grid))]
    assert groups == [
        ["seed=0,num_layers=1", "seed=0,num_layers=2"],
        ["seed=1,num_layers=1", "seed=1,num_layers=2"],
    ]


def test_a_damaged_cache_stops_the_sweep_with_its_sentence(make_sweep, tmp_path, monkeypatch) -> None:
    def damaged(self: CacheReader, rows: np.ndarray) -> None:
        raise CacheError("Sample 3 cannot be read")

    monkeypatch.setattr(CacheReader, "read_batch", damaged)
    with pytest.raises(CacheError, match="Sample 3"):
        run_sweep(make_sweep("damaged", mode="together"), log_only)


def test_an_override_changes_the_base_of_all_runs_and_nothing_that_the_sweep_sets(make_sweep, tmp_path) -> None:
    made = make_sweep("overridden", runs=[{"train.seed": 1}])
    path = tmp_path / "overridden.yaml"
    plain, changed = (load_sweep(path, given) for given in ([], ["train.epochs=7", "wandb={project: mine}"]))
    assert plain == made
    for one, other in zip(plain.runs, changed.runs, strict=True):
        assert (other.name, other.changes) == (one.name, one.changes)
        assert (other.config.train.epochs, other.config.wandb.project) == (7, "mine")
        train = one.config.train.model_copy(update={"epochs": 7})
        wandb = one.config.wandb.model_copy(update={"project": "mine"})
        assert other.config == one.config.model_copy(update={"train": train, "wandb": wandb})
    for override, key in {
        "train.learning_rate=1": "train.learning_rate",
        "objective={weights: decay, gamma: 2}": "objective.weights",
        "train.seed=2": "train.seed",
        "run_dir=x": "run_dir",
        "wandb.name=x": "wandb.name",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_sweep(path, ["train.epochs=7", override])
        assert str(caught.value) == f"--set changes {key}, which the sweep {path} sets for its runs: leave it out."
    assert load_sweep(path, ["objective={gamma: 2}"]).runs[0].config.objective.weights == "decay"
    with pytest.raises(ConfigError, match=r"there is no setting train\.epoch; did you mean train\.epochs\?"):
        load_sweep(path, ["train.epoch=7"])
    with pytest.raises(ConfigError, match=r"wandb: must be a section with keys of its own"):
        load_sweep(path, ["wandb=7"])
    make_sweep("whole", grid={"objective": [{"weights": "decay"}]})
    with pytest.raises(ConfigError, match=r"--set changes objective, which"):
        load_sweep(tmp_path / "whole.yaml", ["objective.gamma=2"])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"grid": {"target.model": ["a"]}}, r"changes target\.model: its runs share one cache, so only drafter, objec"),
        ({"grid": {"train.epoch": [1]}}, r"there is no setting train\.epoch; did you mean train\.epochs\?"),
        ({"runs": [{"train.seed": 1}, {"train.seed": 1}]}, r"holds the run seed=1,\S+ twice: leave one out\."),
        ({"grid": {"train.seed": []}}, r"grid\.train\.seed: must not be empty"),
        ({"gird": {}}, r"there is no setting gird; did you mean grid\?"),
        ({"base": "none.yaml"}, r"There is no configuration file \S+none\.yaml"),
        ({"grid": {"train.learning_rate": [-1]}}, r"train\.learning_rate: input should be greater than 0"),
    ],
)
def test_a_wrong_sweep_is_refused(make_sweep, settings, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_sweep("wrong", **settings)
