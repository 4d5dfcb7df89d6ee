"""The cache's `data_report.json`: for each of its parts, what became of the records that it was made from.

It is there to be read by people and their scripts, and decides nothing: caches that have none are as good. Sealed like
the manifest, so that `dflash verify` sees whether it is whole.
"""

import json
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from dflash_cache.cache.files import write_atomically
from dflash_cache.cache.layout import data_report_path
from dflash_cache.cache.seal import BLANK_SEAL, seal_bytes
from dflash_cache.data.report import DataReport
from dflash_cache.errors import CacheError


def read_reports(cache_dir: Path) -> list[DataReport | None]:
    """Each part's report in order, None for those of older versions. Raises CacheError if the file is damaged."""
    path = data_report_path(cache_dir)
    if not path.exists():
        return []
    try:
        parts = json.loads(path.read_bytes())["parts"]
        return TypeAdapter(list[DataReport | None]).validate_python(parts)
    except (OSError, ValueError, KeyError, TypeError, ValidationError):
        raise CacheError(f"{path} cannot be read: delete it, nothing but its counts is lost.") from None


def write_report(cache_dir: Path, part: int, report: DataReport) -> None:
    """Add the report of `part`, where it has none yet. Raises CacheError or WriteError."""
    reports = read_reports(cache_dir)
    if part < len(reports) and reports[part] is not None:
        return
    reports += [None] * (part + 1 - len(reports))
    reports[part] = report
    tree = {"parts": [each and asdict(each) for each in reports], "seal": BLANK_SEAL}
    text = json.dumps(tree, indent=2, ensure_ascii=False)
    write_atomically(data_report_path(cache_dir), seal_bytes(f"{text}\n".encode()))
