"""Whether a cache's tables agree: samples with the manifest, jobs with the samples, the index with both and itself.

All comparisons are over whole columns (numpy), so ten million samples take seconds; no hidden state is read.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dflash_cache.cache.index import SCHEMA, IndexColumns, list_index_files, read_index_file
from dflash_cache.cache.layout import Manifest, jobs_path, samples_dir
from dflash_cache.cache.seal import read_sealed_table
from dflash_cache.errors import CacheError

NO_SAMPLES = np.zeros(0, np.int64)
_ANEW = "`dflash verify --repair` sets it aside, and `dflash generate` writes it anew"
_MISSING = "it is missing: `dflash generate` writes it anew"
_COMPARED = ("length", "loss_tokens", "bucket")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: where (a path relative to the cache), why, and which samples (int64) it costs.

    `is_listed`: the index lists these samples, so training would ask for them.
    """

    place: str
    reason: str
    samples: np.ndarray = field(default_factory=lambda: NO_SAMPLES)
    is_listed: bool = True


def read_rows(cache_dir: Path) -> tuple[pa.Table, list[Finding]]:
    """All index rows that can be read, ascending by sample, each once; and damaged files, samples with two places."""
    tables, findings = [SCHEMA.empty_table()], []
    for path in list_index_files(cache_dir):
        try:
            tables.append(read_index_file(path))
        except CacheError as error:
            findings.append(Finding(str(path.relative_to(cache_dir)), str(error)))
    table = pa.concat_tables(tables)
    table = table.take(pa.array(np.argsort(table["sample"].to_numpy(), kind="stable")))
    sample = table["sample"].to_numpy()
    again = np.flatnonzero(sample[1:] == sample[:-1])
    # A consolidation that was killed leaves the same row in two files; that is no damage.
    first, second = table.take(pa.array(again)), table.take(pa.array(again + 1))
    differ = [pc.not_equal(first[name], second[name]).to_numpy() for name in ("shard", "row", "checksum")]
    twice = np.unique(sample[again[np.logical_or.reduce(differ)]]) if len(again) else NO_SAMPLES
    if len(twice):
        findings.append(Finding("index", "the index gives them two places", twice))
    kept = np.ones(len(sample), np.bool_)
    kept[again + 1] = False
    return table.filter(pa.array(kept)), findings


def check_tables(cache_dir: Path, manifest: Manifest, rows: pa.Table) -> list[Finding]:
    """Samples against the manifest, jobs against samples, index rows against both."""
    indexed = rows["sample"].to_numpy()
    known = (indexed >= 0) & (indexed < manifest.num_samples)
    findings = _with_samples("index", "the cache has no samples of these numbers", indexed[~known])
    missing = np.setdiff1d(np.arange(manifest.num_samples), np.concatenate([indexed, _read_rejected(cache_dir)]))
    if len(missing):
        reason = f"{len(missing):,} of {manifest.num_samples:,} samples are not cached: run `dflash generate`"
        findings.append(Finding("index", reason, missing, is_listed=False))
    rows = rows.filter(pa.array(known))
    return findings + _check_samples(cache_dir, manifest, rows) + _check_jobs(cache_dir, manifest)


def check_places(columns: IndexColumns) -> list[Finding]:
    """Samples that the index lets overlap with another one of their shard."""
    order = np.lexsort((columns.row, columns.shard))
    shard, row, length = columns.shard[order], columns.row[order], columns.length[order]
    overlap = np.flatnonzero((shard[1:] == shard[:-1]) & (row[:-1] + length[:-1] > row[1:]))
    findings = []
    for number in np.unique(shard[overlap]).tolist():
        pairs = overlap[shard[overlap] == number]
        samples = np.unique(columns.sample[order[np.concatenate([pairs, pairs + 1])]])
        findings.append(Finding(columns.shard_names[number], "the index lets them overlap", samples))
    return findings


def _read_rejected(cache_dir: Path) -> np.ndarray:
    """Samples that were left out when the cache was made, each with a record; a damaged record counts as none."""
    samples = [NO_SAMPLES]
    for path in sorted((cache_dir / "rejected").glob("*.parquet")):
        with suppress(pa.ArrowException, OSError, KeyError):
            samples.append(read_sealed_table(path)["sample"].to_numpy())
    return np.concatenate(samples)


def _check_samples(cache_dir: Path, manifest: Manifest, rows: pa.Table) -> list[Finding]:
    folder = samples_dir(cache_dir)
    tables, findings = [], []
    for path in sorted(folder.glob("*.parquet")):
        try:
            tables.append(pq.read_table(path, columns=["sample", *_COMPARED], partitioning=None))
        except (pa.ArrowException, OSError, KeyError) as error:
            findings.append(_unreadable(str(path.relative_to(cache_dir)), error))
    if findings or not tables:
        return findings or [Finding(folder.name, _MISSING)]
    table = pa.concat_tables(tables)
    if not np.array_equal(table["sample"].to_numpy(), np.arange(manifest.num_samples)):
        reason = f"it holds other samples than the {manifest.num_samples:,} that the manifest speaks of"
        return [Finding(folder.name, f"{reason}: {_ANEW}")]
    indexed = rows["sample"].to_numpy()
    for name in _COMPARED:
        wrong = indexed[rows[name].to_numpy() != table[name].to_numpy()[indexed]]
        findings += _with_samples("index", f"their {name} is not that of {folder.name}/", wrong)
    return findings


def _check_jobs(cache_dir: Path, manifest: Manifest) -> list[Finding]:
    """Whether the job list has every sample once; a row may speak of an older list, of another token budget."""
    place = jobs_path(cache_dir).name
    try:
        listed = pc.list_flatten(read_sealed_table(jobs_path(cache_dir))["samples"]).to_numpy()
    except FileNotFoundError:
        return [Finding(place, _MISSING)]
    except (pa.ArrowException, OSError, KeyError) as error:
        return [_unreadable(place, error)]
    if not np.array_equal(np.sort(listed), np.arange(manifest.num_samples)):
        return [Finding(place, f"it does not list every sample once: {_ANEW}")]
    return []


def _with_samples(place: str, reason: str, samples: np.ndarray) -> list[Finding]:
    return [Finding(place, reason, samples)] if len(samples) else []


def _unreadable(place: str, error: Exception) -> Finding:
    return Finding(place, f"it is damaged ({str(error).splitlines()[0].rstrip('.')}): {_ANEW}")
