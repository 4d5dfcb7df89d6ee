"""`dflash sweep` from its file to its table."""

import io
import math
from typing import ClassVar

import pyarrow.parquet as pq
import yaml
from cli.test_errors import check
from rich.console import Console

from dflash_cache.train.sweep_table import read_last_step
from dflash_cli import sweep
from dflash_cli.sweep_lines import SweepStatus


class Watched(SweepStatus):
    """On a terminal; keeps what the live line says after each record."""

    lines: ClassVar[list[str]] = []

    def __init__(self, groups) -> None:
        super().__init__(groups, Console(file=io.StringIO(), force_terminal=True))

    def add(self, name, record) -> None:
        super().add(name, record)
        self.lines.append(self._describe(name))


def test_a_sweep_trains_each_run_and_ends_in_a_ranked_table(dflash, project, tmp_path, monkeypatch) -> None:
    assert dflash("generate", project).code == 0
    tree = {
        "base": project.name,
        "sweep_dir": str(tmp_path / "sweep"),
        "mode": "together",
        "grid": {"objective.weights": ["decay", "uniform"]},
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tree))
    shown = dflash("sweep", tmp_path / "sweep.yaml")
    assert shown.code == 0, shown.err
    rows = pq.read_table(tmp_path / "sweep" / "table.parquet").to_pylist()
    assert {row["objective.weights"] for row in rows} == {"decay", "uniform"}
    lines = [line.split() for line in shown.out.splitlines() if "complete" in line]
    assert [(words[0], words[-1]) for words in lines] == [
        (row["objective.weights"], f"~{row['acceptance_estimate']:.3f}") for row in rows
    ]
    check(
        dflash("sweep", tmp_path / "sweep.yaml", "--set", "objective.weights=dpace"),
        "--set changes objective.weights, which the sweep",
    )
    again = dflash("sweep", tmp_path / "sweep.yaml", "--set", "train.log_every=1")
    assert again.code == 0
    assert "validation" in shown.out
    assert "validation" not in again.out  # all was done already
    assert pq.read_table(tmp_path / "sweep" / "table.parquet").to_pylist() == rows

    tree["grid"]["objective.weights"].append("dpace")
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.setattr(sweep, "SweepStatus", Watched)
    assert dflash("sweep", tmp_path / "sweep.yaml").code == 0
    assert Watched.lines[0].startswith("2 of 3 runs done  step 1/")
    assert Watched.lines[0].endswith(f"best ~{rows[0]['acceptance_estimate']:.3f} {rows[0]['name']}")


def test_a_sweep_of_a_cache_that_is_not_there(dflash, project, tmp_path) -> None:
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"base": project.name, "sweep_dir": str(tmp_path / "sweep")}))
    check(dflash("sweep", tmp_path / "sweep.yaml"), "There is no cache", "dflash generate")


def test_a_run_whose_loss_is_no_number_is_in_the_table_and_its_sweep_goes_on(dflash, project, tmp_path) -> None:
    """The log has null for it."""
    assert dflash("generate", project).code == 0
    tree = {
        "base": project.name,
        "sweep_dir": str(tmp_path / "sweep"),
        "grid": {"train.learning_rate": [1e30], "train.max_skipped": [1000]},
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tree))
    for _ in range(2):
        shown = dflash("sweep", tmp_path / "sweep.yaml")
        assert shown.code == 0, shown.err
        (row,) = pq.read_table(tmp_path / "sweep" / "table.parquet").to_pylist()
        assert (row["status"], math.isnan(row["loss"])) == ("complete", True)
        (line,) = (words for words in map(str.split, shown.out.splitlines()) if words[2:3] == ["complete"])
        assert line[3:] == [str(row["step"]), "nan", "0.0", "%", "~1.000"]
    (run_dir,) = (path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    last = read_last_step(run_dir)
    assert last is not None
    assert math.isnan(last["loss"])


def test_a_failed_run_is_named_and_the_exit_code_says_so(dflash, project, tmp_path) -> None:
    assert dflash("generate", project).code == 0
    tree = {
        "base": project.name,
        "sweep_dir": str(tmp_path / "sweep"),
        "grid": {"train.learning_rate": [1e-3, 1e30], "train.max_skipped": [2]},
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tree))
    shown = dflash("sweep", tmp_path / "sweep.yaml")
    assert shown.code == 2
    assert "learning_rate=1e+30,max_skipped=2 failed: " in shown.err
    assert [row["status"] for row in pq.read_table(tmp_path / "sweep" / "table.parquet").to_pylist()] == [
        "complete",
        "failed",
    ]
