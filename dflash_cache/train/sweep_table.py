"""A sweep's table: its runs by the best acceptance length that validation estimated.

Only estimates of one kind are ranked: records without `passes` are of runs whose validation took the mean over random
anchors, which is higher, and count as none.
"""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from dflash_cache.cache.files import write_table
from dflash_cache.config.sweep import Sweep, SweepRun
from dflash_cache.train.metrics import Record
from dflash_cache.train.processes import Outcome

RANKED_BY = "acceptance_estimate"
_END_BYTES = 1 << 17  # of a log: some dozens of records


def tabulate(sweep: Sweep, outcomes: dict[str, Outcome]) -> list[dict[str, Any]]:
    """A row a run, best first, those without a validation last: name, what it changes, status, and its figures.

    `step`, `acceptance_estimate`, `loss` and `accuracy_1` (of the first drafted slot) are of its best validation.
    """
    rows = [_row(run, outcomes[run.name]) for run in sweep.runs]
    return sorted(rows, key=lambda row: -(row[RANKED_BY] or 0.0))


def write_sweep_table(sweep: Sweep, rows: list[dict[str, Any]]) -> Path:
    """`table.parquet` in the sweep's folder; what a run changes is text there, as its values may differ in kind."""
    path = sweep.folder / "table.parquet"
    changed = {key for run in sweep.runs for key in run.changes}
    texts = [{key: str(value) if key in changed else value for key, value in row.items()} for row in rows]
    write_table(path, pa.Table.from_pylist(texts))
    return path


def read_last_step(run_dir: Path) -> Record | None:
    """The record of the last step that a run has logged, if it has; reads the end of the log alone."""
    path = run_dir / "log.jsonl"
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _END_BYTES))
        lines = file.read().split(b"\n")
    for line in reversed(lines):
        with suppress(ValueError):  # a kill may have cut the last one, and the seek the first
            if (record := _parse(line))["kind"] == "train":
                return record
    return None


def _row(run: SweepRun, outcome: Outcome) -> dict[str, Any]:
    records = _read_log(Path(run.config.run_dir))
    validations = [record for record in records if record["kind"] == "validation" and "passes" in record]
    best = max(validations, key=lambda record: record[RANKED_BY], default=None)
    return {
        "name": run.name,
        **run.changes,
        "status": outcome.status,
        "error": outcome.error,
        "step": best and best["step"],
        RANKED_BY: best and best[RANKED_BY],
        "loss": best and best["loss"],
        "accuracy_1": best and best["position_accuracy"][0],
    }


def _read_log(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "log.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [_parse(line) for line in lines if line.endswith("\n")]  # a kill may have cut the last one


def _parse(line: str | bytes) -> Record:
    """The record as it was logged: a loss that was not finite is null in JSON (`JsonLines`)."""
    record: Record = json.loads(line)
    return record | {"loss": math.nan} if record.get("loss", 0.0) is None else record
