"""New conversations for an old cache: they become a further part of it, under the same manifest.

A part is what one `generate` prepared: a file of samples, numbered on from those before, in the buckets that the cache
began with, and jobs of its own behind the others'. The manifest names the parts by the fingerprints of their data; it
is written last, so a part that it does not name is not there. Whoever comes with any part's data completes all of them.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_64_hexdigest

from dflash_cache.cache.files import write_table
from dflash_cache.cache.layout import Manifest, difference, jobs_path, samples_path, write_manifest
from dflash_cache.config.settings import Config
from dflash_cache.data.buckets import assign_buckets
from dflash_cache.data.plan import JobList, plan_jobs
from dflash_cache.target.data_report import write_report
from dflash_cache.target.prepare import Preparation, job_table, read_samples


def belongs(was: Manifest, prepared: Preparation, append: bool) -> bool:
    """Whether `prepared` is to be joined to the cache's parts: it is new and to be appended, or one of several."""
    known = prepared.manifest.data_fingerprint in parts_of(was)
    return len(parts_of(was)) > 1 if known else append


def parts_of(manifest: Manifest) -> tuple[str, ...]:
    """The fingerprints of the cache's parts, in their order."""
    return manifest.parts or (manifest.data_fingerprint,)


def differences_but_data(config: Config, was: Manifest, prepared: Preparation) -> list[str]:
    """As `layout.difference`, without what further data change."""
    moving = {
        name: getattr(was, name) for name in ("data_fingerprint", "num_samples", "mask_token_candidates", "parts")
    }
    if config.data.bucket_bounds is None:  # they follow from the data that the cache began with
        moving["bucket_bounds"] = was.bucket_bounds
    return difference(was, replace(prepared.manifest, **moving))


def join_parts(config: Config, was: Manifest, prepared: Preparation) -> Preparation:
    """All the cache's parts as one preparation, `prepared` the last of them if it was none yet, and then written."""
    cache_dir, parts = Path(config.cache_dir), parts_of(was)
    own = prepared.manifest.data_fingerprint
    tables = [read_samples(cache_dir, part) for part in range(len(parts))]
    manifest = was
    if own not in parts:
        tables.append(_number_on(prepared.samples, was))
        manifest = _add_part(was, prepared, (*parts, own))
        write_table(samples_path(cache_dir, len(parts)), tables[-1])
        if prepared.report is not None:
            write_report(cache_dir, len(parts), prepared.report)
    joined = Preparation(
        samples=pa.concat_tables(tables),
        bucket_N=np.concatenate([table["bucket"].to_numpy() for table in tables]),
        jobs=_join_jobs(config, was, tables),
        manifest=manifest,
    )
    write_table(jobs_path(cache_dir), job_table(joined.jobs))
    if manifest != was:
        write_manifest(cache_dir, manifest)
    return joined


def _number_on(samples: pa.Table, was: Manifest) -> pa.Table:
    """A new part's samples as they are stored: numbered after those of the cache, with their buckets."""
    lengths = samples["length"].to_numpy()
    numbers = pc.add(samples["sample"], pa.scalar(was.num_samples, pa.int64()))
    numbered = samples.set_column(0, samples.schema.field("sample"), numbers)
    return numbered.append_column("bucket", pa.array(assign_buckets(lengths, was.bucket_bounds), pa.int16()))


def _add_part(was: Manifest, prepared: Preparation, parts: tuple[str, ...]) -> Manifest:
    unused = set(prepared.manifest.mask_token_candidates)
    return replace(
        was,
        data_fingerprint=xxh3_64_hexdigest("".join(parts).encode()),
        num_samples=was.num_samples + prepared.manifest.num_samples,
        mask_token_candidates=tuple(token for token in was.mask_token_candidates if token in unused),
        parts=parts,
    )


def _join_jobs(config: Config, was: Manifest, tables: list[pa.Table]) -> JobList:
    """Each part's jobs, planned by itself, one part after the other."""
    samples, begin, bucket = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)], [np.zeros(0, np.int16)]
    for table in tables:
        offset = sum(map(len, samples))
        lengths, bucket_N = table["length"].to_numpy(), table["bucket"].to_numpy()
        jobs = plan_jobs(lengths, bucket_N, config.generate.token_budget, was.order_seed)
        samples.append(jobs.samples + offset)
        begin.append(jobs.begin[1:] + offset)
        bucket.append(jobs.bucket)
    return JobList(np.concatenate(samples), np.concatenate(begin), np.concatenate(bucket))
