"""Samples that were forwarded and left out, each with its reason: a cache is finished when all others are in it.

One small parquet file for every commit, named by its first sample, so that workers never meet. A sample that has a
record is neither cached nor tried again: its states would be the same. Deleting the folder has them all tried anew.
"""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from dflash_cache.cache.files import write_table
from dflash_cache.cache.seal import read_sealed_table
from dflash_cache.errors import CacheError

SCHEMA = pa.schema(
    [
        pa.field("sample", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
    ]
)


def rejected_dir(cache_dir: Path) -> Path:
    """Where the records lie."""
    return cache_dir / "rejected"


def write_rejected(cache_dir: Path, reasons: Mapping[int, str]) -> None:
    """Record samples (at least one) with their reasons."""
    table = pa.table({"sample": list(reasons), "reason": list(reasons.values())}, schema=SCHEMA)
    write_table(rejected_dir(cache_dir) / f"samples-{min(reasons):09d}.parquet", table)


def read_rejected(cache_dir: Path) -> pa.Table:
    """All records (SCHEMA), ascending by sample. Raises CacheError if a file is damaged."""
    tables = [SCHEMA.empty_table()]
    for path in sorted(rejected_dir(cache_dir).glob("samples-*.parquet")):
        try:
            tables.append(read_sealed_table(path).cast(SCHEMA))
        except (pa.ArrowException, ValueError, OSError) as error:
            raise CacheError(
                f"The record of left-out samples {path} is damaged ({str(error).splitlines()[0].rstrip('.')}): delete "
                "it and run `dflash generate`, which tries them again."
            ) from None
    return pa.concat_tables(tables).sort_by("sample")
