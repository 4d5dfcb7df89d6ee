"""Repair: what a check found damaged is taken out of the index, so that the next `dflash generate` makes it anew.

Of a cache in a store the tables are mended in a copy, under the store's marker, and put back: first what is set aside
and the index, then what they replace goes. Killed in between, a repair leaves what the next one finds again; no sample
that was whole is lost at any instant, it is redone at worst.
"""

import secrets
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from dflash_cache.cache.files import explain_write_errors, flush_folder
from dflash_cache.cache.index import jobs_of, remove_jobs
from dflash_cache.cache.layout import data_report_path, is_remote
from dflash_cache.cache.lock import lock_cache
from dflash_cache.cache.marker import WriterMarker
from dflash_cache.cache.remote import copy_tables
from dflash_cache.cache.store import RemoteStore
from dflash_cache.cache.verify import Report
from dflash_cache.config.settings import RemoteSettings

_SET_ASIDE = ".damaged"
_STORE = RemoteSettings(retry_seconds=60)  # someone waits at the console


def repair(cache: Path | str, report: Report, noted: Callable[[str], None] = lambda sentence: None) -> int:
    """Take the jobs of all damaged samples out of the index, so that the next `dflash generate` redoes them whole.

    Damaged tables (never the manifest) are set aside under another name; `generate` writes them anew. Returns how many
    samples were taken out, the undamaged ones of those jobs included: a job is redone as one, and no sample may be
    there twice. `noted` is told if a writer that is gone was in the way. Raises CacheError if one that lives is.
    """
    if is_remote(cache):
        return _repair_store(RemoteStore(str(cache), _STORE), report, noted)
    with lock_cache(Path(cache)):
        return _repair_folder(Path(cache), report)


def _repair_folder(cache_dir: Path, report: Report) -> int:
    for place in {finding.place for finding in report.findings}:
        path = cache_dir / place
        if (path.suffix == ".parquet" or path == data_report_path(cache_dir)) and path.exists():
            with explain_write_errors(path):
                path.replace(path.with_name(path.name + _SET_ASIDE))
                flush_folder(path.parent)
    samples = report.damaged_samples
    return remove_jobs(cache_dir, jobs_of(cache_dir, samples)) if len(samples) else 0


def _repair_store(store: RemoteStore, report: Report, noted: Callable[[str], None]) -> int:
    marker = WriterMarker(store, f"repair-{secrets.token_hex(8)}")
    try:
        if sentence := marker.claim():
            noted(sentence)
        with TemporaryDirectory(prefix="dflash-cache-") as name:
            folder = Path(name)
            copy_tables(store, folder, everything=True)
            was = _list_stamps(folder)
            num_removed = _repair_folder(folder, report)
            now = _list_stamps(folder)
            marker.check()
            for path, _ in now.items() - was.items():
                store.put_file(path, folder / path, read_back=True)
            for path in was.keys() - now.keys():
                store.delete(path)
        return num_removed
    finally:
        marker.release()


def _list_stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of all files, by name."""
    found = {path.relative_to(folder).as_posix(): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}
