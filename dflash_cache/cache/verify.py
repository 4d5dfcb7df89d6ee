"""What a cache holds, proven: its tables agree, its shards are whole, and, if asked, every byte is as it was written.

The structure (seconds) compares manifest, samples, jobs and index with each other and with every shard's header and
size. The full check (the speed of the disk) also reads every byte: sealed files against their seals, a shard's header
against the one that its layout gives, samples against their checksums. So any flipped bit is found, in samples,
padding and footers alike. Reading runs on several threads; nothing is written, `repair` does that.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dflash_cache.cache.buffers import BufferPool
from dflash_cache.cache.codec import as_bytes
from dflash_cache.cache.index import IndexColumns, split_columns
from dflash_cache.cache.layout import DUMPED, Manifest, bucket_of_shard, is_remote, manifest_path, read_manifest
from dflash_cache.cache.reader import check_layout
from dflash_cache.cache.remote import RemoteShard, RemoteShards
from dflash_cache.cache.seal import check_file
from dflash_cache.cache.shards import encode_header, shard_metadata
from dflash_cache.cache.storage import DamageError, OpenShards, Shard
from dflash_cache.cache.structure import NO_SAMPLES, Finding, check_places, check_tables, read_rows
from dflash_cache.config.settings import RemoteSettings
from dflash_cache.errors import CacheError

Progress = Callable[[int, int], None]  # bytes of samples read, bytes in all
_TASK_BYTES = 64 << 20  # of one shard, by one thread
_MAX_OPEN_SHARDS = 64
_STORE = RemoteSettings(retry_seconds=60)  # someone waits at the console

Shards = OpenShards | RemoteShards


@dataclass(frozen=True)
class Report:
    """What was found. `num_samples`: that the manifest promises; `num_listed`: that the index lists."""

    findings: list[Finding]
    notes: list[str]
    num_samples: int
    num_listed: int
    num_shards: int
    checked_bytes: int

    @property
    def damaged_samples(self) -> np.ndarray:
        """Samples (int64, ascending) that the index lists and that cannot be trained on."""
        lists = [finding.samples for finding in self.findings if finding.is_listed]
        return np.unique(np.concatenate([NO_SAMPLES, *lists]))


def verify(
    cache_dir: Path | str, full: bool, threads: int = 2, progress: Progress = lambda done, total: None
) -> Report:
    """Check the cache; damage does not raise, but CacheError if there is no cache at `cache_dir`, a folder or a URI.

    `progress` is called on this thread, in the full check only. Of a cache in a store everything but the shards is
    copied into a temporary folder, and the shards are read by ranges.
    """
    shards = RemoteShards(str(cache_dir), _STORE, all_tables=True) if is_remote(cache_dir) else None
    with closing(shards or OpenShards(Path(cache_dir), _MAX_OPEN_SHARDS)) as opened:
        return _verify(opened, full, threads, progress)


def _verify(shards: Shards, full: bool, threads: int, progress: Progress) -> Report:
    folder = shards.tables_dir
    if not manifest_path(folder).exists():
        read_manifest(folder)  # raises the sentence for it
    try:
        manifest = read_manifest(folder)
    except CacheError as error:
        damage = Finding("manifest.json", f"{error} Nothing else can be checked without it")
        return Report([damage], [], 0, 0, 0, 0)
    rows, findings = read_rows(folder)
    columns = split_columns(rows)
    findings += check_tables(folder, manifest, rows) + check_places(columns)
    check = _ShardCheck(shards, manifest, columns)
    tasks: list[_Task] = []
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        for found in pool.map(check.check_header, range(len(columns.shard_names))):
            findings += found
        if full:
            for found in pool.map(check_sealed, *_list_sealed(folder)):
                findings += [finding for finding in found if finding.place not in {other.place for other in findings}]
            tasks = check.plan_reads(skipped=[finding.samples for finding in findings if finding.is_listed])
            total, done = sum(task.num_bytes for task in tasks), 0
            progress(done, total)
            for task, found in zip(tasks, pool.map(check.check_samples, tasks), strict=True):
                findings += found
                done += task.num_bytes
                progress(done, total)
    return Report(
        findings=findings,
        notes=_list_leftovers(shards, columns) + _tell_import(manifest, findings),
        num_samples=manifest.num_samples,
        num_listed=rows.num_rows,
        num_shards=len(columns.shard_names),
        checked_bytes=sum(task.num_bytes for task in tasks),
    )


@dataclass(frozen=True)
class _Task:
    """Some samples of one shard, by their places in the index, in the order of the shard."""

    shard: int
    places: np.ndarray
    num_bytes: int


class _ShardCheck:
    """Checks of one cache's shards; several threads may call them at once."""

    def __init__(self, shards: Shards, manifest: Manifest, columns: IndexColumns) -> None:
        self._shards, self._manifest, self._columns = shards, manifest, columns
        self._order = np.lexsort((columns.row, columns.shard))
        shard = columns.shard[self._order]
        self._begin = np.searchsorted(shard, np.arange(len(columns.shard_names) + 1))
        self._buffers = BufferPool(max_idle=8)

    def check_header(self, shard: int) -> list[Finding]:
        """Size and header of one shard, and the rows in it; a finding names all its samples, or those misplaced."""
        columns, name = self._columns, self._columns.shard_names[shard]
        places = self._order[self._begin[shard] : self._begin[shard + 1]]
        try:
            with self._shards.borrow(name) as opened:
                check_layout(opened.layout, self._manifest, 0)
                check_header_bytes(opened, bucket_of_shard(name))
        except (DamageError, OSError) as error:
            return [Finding(name, _explain(error), np.sort(columns.sample[places]))]
        ends = columns.row[places] + columns.length[places]
        outside = (ends > opened.layout.num_tokens) | (columns.row[places] < 0)
        strange = columns.bucket[places] != bucket_of_shard(name)
        reasons = {
            f"the index places them beyond the shard's {opened.layout.num_tokens:,} tokens": outside,
            "the index places them in a shard of another bucket": strange,
        }
        return [
            Finding(name, reason, np.sort(columns.sample[places[wrong]]))
            for reason, wrong in reasons.items()
            if wrong.any()
        ]

    def plan_reads(self, skipped: list[np.ndarray]) -> list[_Task]:
        """All samples but those already found damaged, in the order of the disk, cut into tasks."""
        columns = self._columns
        wanted = ~np.isin(columns.sample, np.concatenate([NO_SAMPLES, *skipped]))
        places = self._order[wanted[self._order]]
        token_bytes = self._manifest.states.token_bytes
        sizes = columns.length[places].astype(np.int64) * token_bytes
        turn = np.cumsum(sizes) // _TASK_BYTES
        cuts = np.flatnonzero((np.diff(turn) != 0) | (np.diff(columns.shard[places]) != 0)) + 1
        parts = [part for part in np.split(places, cuts) if len(part)]
        return [
            _Task(int(columns.shard[part[0]]), part, int(columns.length[part].sum()) * token_bytes) for part in parts
        ]

    def check_samples(self, task: _Task) -> list[Finding]:
        """The checksums of a task's samples."""
        columns, name = self._columns, self._columns.shard_names[task.shard]
        findings = []
        try:
            with self._shards.borrow(name) as opened:
                for place in task.places.tolist():
                    try:
                        self._compare_checksum(opened, place)
                    except (DamageError, OSError) as error:
                        findings.append(Finding(name, _explain(error), columns.sample[place : place + 1]))
        except (DamageError, OSError) as error:
            return [Finding(name, _explain(error), np.sort(columns.sample[task.places]))]
        return findings

    def _compare_checksum(self, shard: Shard | RemoteShard, place: int) -> None:
        begin, length = int(self._columns.row[place]), int(self._columns.length[place])
        hidden = as_bytes(self._buffers.lend((length * shard.layout.token_bytes,), torch.uint8))
        ids, mask = np.empty(length, "<i4"), np.empty(length, np.uint8)
        if shard.read_sample(begin, hidden, ids, mask, checked=True) != int(self._columns.checksum[place]):
            raise DamageError("its checksum is not the index's")


def check_header_bytes(shard: Shard | RemoteShard, bucket: int) -> None:
    """Raise DamageError unless every byte before the shard's data, padding included, is the writer's."""
    found = shard.head
    header = json.loads(found[8:])  # the layout was read from it
    metadata = header.pop("__metadata__", None)
    if metadata != shard_metadata(bucket, shard.layout.states):
        raise DamageError(f"its header's metadata are {metadata}, of a shard of bucket {bucket}")
    if found != encode_header({name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}, metadata):
        raise DamageError("its header is not as it was written")


def check_sealed(place: str, path: Path, must_be_sealed: bool) -> list[Finding]:
    """One file against its seal."""
    try:
        state = check_file(path)
    except OSError as error:
        return [Finding(place, f"it cannot be read ({_explain(error)})")]
    if state == "broken" or (state == "absent" and must_be_sealed):
        return [Finding(place, "its bytes are not those that were written")]
    return []


def _list_sealed(cache_dir: Path) -> tuple[list[str], list[Path], list[bool]]:
    """All files of ours but the shards: place, path, and whether the cache is so new that each must have a seal."""
    patterns = ("*.parquet", "*.json", "config.yaml")
    paths = sorted({path for pattern in patterns for path in cache_dir.rglob(pattern) if not path.name.startswith(".")})
    sealed = check_file(manifest_path(cache_dir)) == "whole"
    return [str(path.relative_to(cache_dir)) for path in paths], paths, [sealed] * len(paths)


def _list_leftovers(shards: Shards, columns: IndexColumns) -> list[str]:
    """Shards without index rows: of an interrupted or repaired job, harmless, and their room can be had back."""
    listed = set(columns.shard_names)
    left = {name: size for name, size in sorted(shards.list_sizes().items()) if name not in listed}
    if not left:
        return []
    first, size = f"{shards.place}/{next(iter(left))}", sum(left.values())
    return [f"{len(left):,} shards ({size:,} bytes) have no index rows and may be deleted, the first is {first}."]


def _tell_import(manifest: Manifest, findings: list[Finding]) -> list[str]:
    """`generate` refuses a cache that it did not make, so it is no help to one."""
    if not findings or not manifest.mask_rule.startswith(DUMPED):
        return []
    return ["the cache was imported: where `dflash generate` is named, the same `dflash import` does it."]


def _explain(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
