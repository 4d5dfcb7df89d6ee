"""The index: one row a cached sample, as immutable parquet fragments and, when finished, one consolidated file.

A fragment appears after its shard, so whatever has a row is whole; what has none is not there. Consolidation writes
`index.parquet` first and removes the fragments it read afterwards; rows are told apart by their sample, so killed
at any instant it neither loses a row nor counts one twice. All columns stay in arrow and numpy: no Python loop over
samples.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64

from dflash_cache.cache.files import explain_write_errors, flush_folder, write_table
from dflash_cache.cache.layout import index_dir
from dflash_cache.cache.seal import read_sealed_table
from dflash_cache.errors import CacheError

SCHEMA = pa.schema(
    [
        pa.field("sample", pa.int64(), nullable=False),
        pa.field("bucket", pa.int16(), nullable=False),
        pa.field("shard", pa.string(), nullable=False),  # path relative to the cache
        pa.field("row", pa.int64(), nullable=False),  # token offset in the shard
        pa.field("length", pa.int32(), nullable=False),
        pa.field("loss_tokens", pa.int32(), nullable=False),
        pa.field("checksum", pa.uint64(), nullable=False),
        pa.field("job", pa.int32(), nullable=False),
    ]
)
_CONSOLIDATED = "index.parquet"
_ATTEMPTS = 10  # readings of the folder while someone else consolidates it


@dataclass(frozen=True)
class IndexColumns:
    """The index as read-only arrays of equal length, ascending by sample; `shard` numbers `shard_names`."""

    sample: np.ndarray
    bucket: np.ndarray
    shard: np.ndarray
    row: np.ndarray
    length: np.ndarray
    loss_tokens: np.ndarray
    checksum: np.ndarray
    job: np.ndarray
    shard_names: tuple[str, ...]


def commit_fragment(cache_dir: Path, rows: pa.Table, name: str) -> None:
    """Announce `rows` (columns of SCHEMA; whole jobs only, their shards committed) as one immutable fragment.

    Raises CacheError if a fragment of that name exists.
    """
    path = fragment_path(cache_dir, name)
    if path.exists():
        raise CacheError(
            f"The index fragment {path} exists already: let one `dflash generate` at a time write a cache."
        )
    write_table(path, rows.select(SCHEMA.names).cast(SCHEMA))


def fragment_path(cache_dir: Path, name: str) -> Path:
    """Where the fragment of that name lies."""
    return index_dir(cache_dir) / f"fragment-{name}.parquet"


def consolidate(cache_dir: Path) -> None:
    """Merge all fragments into `index/index.parquet`, then remove them; without fragments it does nothing."""
    table, paths = _read_rows(cache_dir)
    fragments = [path for path in paths if path.name != _CONSOLIDATED]
    if not fragments:
        return
    write_table(index_dir(cache_dir) / _CONSOLIDATED, table)
    with explain_write_errors(index_dir(cache_dir)):
        for fragment in fragments:
            fragment.unlink(missing_ok=True)
        flush_folder(index_dir(cache_dir))


def open_index(cache_dir: Path) -> pa.Table:
    """All rows, ascending by sample, each sample once. Raises CacheError if there are none or a file is damaged."""
    table, _ = _read_rows(cache_dir)
    if table.num_rows == 0:
        raise CacheError(f"The cache at {cache_dir} holds no samples yet: run `dflash generate` first.")
    return table


def cached_rows(cache_dir: Path) -> pa.Table:
    """Like `open_index`, but empty if nothing was committed yet: what `generate` need not do again."""
    table, _ = _read_rows(cache_dir)
    return table


def index_fingerprint(table: pa.Table) -> str:
    """16 hex digits that change with any sample, shard, row, length or checksum, but not by consolidation."""
    columns = split_columns(table)
    hasher = xxh3_64("\n".join(columns.shard_names).encode())
    for column in (columns.sample, columns.shard, columns.row, columns.length, columns.checksum):
        hasher.update(np.ascontiguousarray(column).view(np.uint8).data)
    return hasher.hexdigest()


def split_columns(table: pa.Table) -> IndexColumns:
    """The table's columns as read-only arrays; shards are numbered in the order of their first row."""
    encoded = table["shard"].dictionary_encode().unify_dictionaries().combine_chunks()
    arrays = {name: table[name].to_numpy() for name in SCHEMA.names if name != "shard"}
    arrays["shard"] = encoded.indices.to_numpy(zero_copy_only=False)
    for array in arrays.values():
        array.flags.writeable = False
    return IndexColumns(**arrays, shard_names=tuple(encoded.dictionary.to_pylist()))


def list_index_files(cache_dir: Path) -> list[Path]:
    """The consolidated file, if there is one, then the fragments by name."""
    folder = index_dir(cache_dir)
    consolidated = [folder / _CONSOLIDATED] if (folder / _CONSOLIDATED).exists() else []
    return consolidated + sorted(folder.glob("fragment-*.parquet"))


def read_index_file(path: Path) -> pa.Table:
    """One file's rows (SCHEMA). Raises CacheError if it is damaged, FileNotFoundError if it is gone."""
    try:
        table = read_sealed_table(path)
        if not table.schema.equals(SCHEMA):
            raise pa.ArrowInvalid("unexpected columns")
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise CacheError(
            f"The index file {path} is damaged ({str(error).splitlines()[0].rstrip('.')}): "
            "delete it and run `dflash generate`, which redoes the samples it listed."
        ) from None
    return table


def jobs_of(cache_dir: Path, samples: np.ndarray) -> np.ndarray:
    """The jobs (int32, ascending) whose rows list any of these samples."""
    table, _ = _read_rows(cache_dir)
    listed = np.isin(table["sample"].to_numpy(), samples)
    jobs: np.ndarray = np.unique(table["job"].to_numpy()[listed])
    return jobs


def remove_jobs(cache_dir: Path, jobs: np.ndarray) -> int:
    """Take all rows of these jobs out of the index, all at once; returns how many there were.

    The next `dflash generate` redoes them whole. Not while one is running: it holds rows that this cannot see.
    """
    consolidate(cache_dir)  # a row left in a fragment would come back
    table, _ = _read_rows(cache_dir)
    kept = table.filter(pa.array(~np.isin(table["job"].to_numpy(), jobs)))
    write_table(index_dir(cache_dir) / _CONSOLIDATED, kept)
    return int(table.num_rows - kept.num_rows)


def _read_rows(cache_dir: Path) -> tuple[pa.Table, list[Path]]:
    """Rows of all index files, ascending by sample, each sample once; and the files they came from."""
    for _ in range(_ATTEMPTS):
        # The consolidated file first: of a sample's two rows, the first wins, before and after consolidation.
        paths = list_index_files(cache_dir)
        try:
            tables = [read_index_file(path) for path in paths]
        except FileNotFoundError:  # consolidated since the folder was listed: list it again
            continue
        table = pa.concat_tables([SCHEMA.empty_table(), *tables])
        _, first = np.unique(table["sample"].to_numpy(), return_index=True)
        return table.take(pa.array(first)), paths
    raise CacheError(f"The index of {cache_dir} keeps changing: wait until `dflash generate` has ended.")
