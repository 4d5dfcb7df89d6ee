"""A peer's dump as a cache: what the dump does not say comes from the target's files, the rest is held against them.

    dump → tokens, masks, shapes (scan) → samples, buckets, shards (plan) → states (copy) → cache

Manifest, samples and shard list stand before the first state is copied, so an import that was stopped at any instant
goes on with the shards that have no rows. Samples whose states turn out bad only then are left out at the end: the
numbers of the others stay as they were planned.
"""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PretrainedConfig

from dflash_cache.cache.adopt.copy import (
    CopyPlan,
    copy_job,
    expect,
    late_errors,
    note_bad_samples,
    plan_shards,
    read_left_out,
    remaining_jobs,
)
from dflash_cache.cache.adopt.deepspec import DeepSpecDump
from dflash_cache.cache.adopt.dump import Dump, Expected
from dflash_cache.cache.adopt.records import open_modelopt, open_specforge
from dflash_cache.cache.adopt.scan import BadSamples, Scan, check_masks, fingerprint_states, scan_dump
from dflash_cache.cache.adopt.source import AdoptObserver, Outline, Source
from dflash_cache.cache.adopt.vllm import VllmDump
from dflash_cache.cache.files import remove_leftovers, write_table
from dflash_cache.cache.index import consolidate
from dflash_cache.cache.layout import (
    DUMPED,
    Manifest,
    difference,
    is_remote,
    jobs_path,
    manifest_path,
    place_of,
    read_manifest,
    samples_dir,
    write_manifest,
)
from dflash_cache.cache.lock import lock_cache
from dflash_cache.cache.shards import ID_BYTES, MASK_BYTES
from dflash_cache.cache.state_format import check_codec
from dflash_cache.config.settings import Config
from dflash_cache.data.buckets import assign_buckets, quantile_bounds
from dflash_cache.data.plan import JobList
from dflash_cache.data.templates import tokenizer_fingerprint
from dflash_cache.drafter.mask_token import list_candidates
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.errors import CacheError, ConfigError, DataError
from dflash_cache.target.load import load_tokenizer
from dflash_cache.target.prepare import job_table, samples_fingerprint

UNLIMITED = 2**31 - 1


def adopt(config: Config, source: Source, observer: AdoptObserver) -> Manifest:
    """Fill the cache at `config.cache_dir` from the dump, or what is missing of it; returns its manifest.

    Raises ConfigError, TargetError, DataError or CacheError, each in one sentence.
    """
    if is_remote(config.cache_dir):
        raise ConfigError(
            f"dflash import fills a folder, and {place_of(config.cache_dir)} is none: import into a folder, then copy "
            "its files there."
        )
    cache_dir = Path(config.cache_dir)
    if cache_dir.resolve() == source.folder.resolve():
        raise ConfigError(f"The cache would lie in the dump itself, at {cache_dir}: name another folder for the cache.")
    files = TargetFiles(config.target)
    target = files.load_config()
    dump = open_dump(source)
    layer_ids = resolve_layers(source, dump, target)
    expected = Expected(len(layer_ids), target.hidden_size, target.vocab_size, dump.extra_last_layer)
    bad = BadSamples(len(dump.names), 0.0 if config.data.strict else source.max_bad_share)
    scan = scan_samples(config, source, dump, expected, bad, observer)
    plan = plan_copy(config, source, scan, make_manifest(config, source, files, scan, layer_ids), dump)
    observer.planned(
        Outline(
            num_samples=plan.samples.num_rows,
            num_tokens=int(plan.lengths.sum()),
            num_shards=plan.jobs.num_jobs,
            token_bytes=plan.manifest.states.token_bytes,
            dtype=plan.manifest.dtype,
            layer_ids=layer_ids,
        )
    )
    with lock_cache(cache_dir):
        claim(cache_dir, plan, bad)
        copy_rest(cache_dir, dump, plan, bad, observer)
        return finish(cache_dir, plan)


def open_dump(source: Source) -> Dump:
    """The dump, its samples listed. Raises DataError if there is none of its format."""
    if not source.folder.is_dir():
        raise DataError(f"There is no folder {source.folder}: name the folder of the dump.")
    openers: dict[str, Callable[[], Dump]] = {
        "vllm": lambda: VllmDump(source.folder, source.dataset),
        "specforge": lambda: open_specforge(source.folder),
        "modelopt": lambda: open_modelopt(source.folder),
        "deepspec": lambda: DeepSpecDump(source.folder),
    }
    return openers[source.format]()


def resolve_layers(source: Source, dump: Dump, target: PretrainedConfig) -> tuple[int, ...]:
    """The dump's layers in our numbers. Raises ConfigError if nobody says them, or if they cannot be right."""
    given, said = source.layer_ids, dump.layer_ids
    if given is None and said is None:
        raise ConfigError(
            f"A dump of {source.format} does not say which layers it holds: give --layer-ids (and --numbering)."
        )
    if given is not None and said is not None and given != said:
        raise ConfigError(f"The dump says that it holds layers {list(said)}, not {list(given)}: leave out --layer-ids.")
    layer_ids = given or said or ()
    depth = target.num_hidden_layers
    if list(layer_ids) != sorted(set(layer_ids)) or not 0 <= layer_ids[0] <= layer_ids[-1] < depth:
        raise ConfigError(
            f"The layers {list(layer_ids)} (decoder layers counted from 0) must ascend and lie between 0 and "
            f"{depth - 1}, for the target has {depth}: mend --layer-ids or --numbering."
        )
    if source.format == "modelopt" and layer_ids[-1] == depth - 1:
        raise ConfigError(
            f"Model Optimizer's HF dumper stores layer {depth - 1}, the last one, after the final norm, and a cache "
            "holds states before it: leave this layer out of the dump."
        )
    return layer_ids


def scan_samples(
    config: Config, source: Source, dump: Dump, expected: Expected, bad: BadSamples, observer: AdoptObserver
) -> Scan:
    """The dump's samples within the configuration's lengths, told to the observer. Raises DataError."""
    data = config.data
    if "max_length" not in data.model_fields_set:
        data = data.model_copy(update={"max_length": UNLIMITED})
    scan = scan_dump(dump, expected, data, bad, observer.scanning)
    if not source.full_masks:
        check_masks(scan.samples)
    if dump.absent:
        observer.skipped({"rows without states": len(dump.absent)}, {"rows without states": dump.absent[0]})
    observer.skipped(bad.reasons | scan.counts.skipped, bad.first | scan.counts.first_skipped)
    return scan


def make_manifest(
    config: Config, source: Source, files: TargetFiles, scan: Scan, layer_ids: tuple[int, ...]
) -> Manifest:
    """What the cache will be. Template and mask rule are the dump's, so `plan_copy` names the dump in their place."""
    target = files.load_config()
    tokenizer = load_tokenizer(config.target)
    lengths = scan.samples["length"].to_numpy()
    longest = config.data.max_length if "max_length" in config.data.model_fields_set else int(lengths.max())
    bounds = config.data.bucket_bounds or quantile_bounds(lengths, config.data.num_buckets, longest)
    used_ids = pc.unique(pc.list_flatten(scan.samples["input_ids"])).to_numpy()
    return Manifest(
        tool_version=version("dflash-cache"),
        target_model=config.target.model,
        target_revision=config.target.revision,
        target_fingerprint=files.fingerprint(),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        template_fingerprint="",
        mask_rule=f"{DUMPED} {source.format}",
        layer_ids=layer_ids,
        target_num_layers=target.num_hidden_layers,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        dtype=scan.dtype,
        codec=check_codec(config.generate.codec, target.hidden_size),
        bucket_bounds=tuple(bounds),
        max_length=longest,
        data_fingerprint=samples_fingerprint(scan.samples),
        num_samples=scan.samples.num_rows,
        order_seed=config.generate.order_seed,
        mask_token_candidates=tuple(
            list_candidates(target.vocab_size, len(tokenizer), tokenizer.all_special_ids, used_ids)
        ),
        settings=config.model_dump(mode="json") | {"import": {"folder": str(source.folder), "format": source.format}},
    )


def plan_copy(config: Config, source: Source, scan: Scan, manifest: Manifest, dump: Dump) -> CopyPlan:
    """Buckets and shards; the manifest gets the fingerprint of the dump's states."""
    lengths = scan.samples["length"].to_numpy()
    bucket_N = assign_buckets(lengths, manifest.bucket_bounds)
    token_bytes = manifest.states.token_bytes + ID_BYTES + MASK_BYTES
    states = fingerprint_states(dump, expect(manifest, dump), scan.samples)
    return CopyPlan(
        manifest=replace(manifest, template_fingerprint=f"of the dump with states {states}"),
        samples=scan.samples.append_column("bucket", pa.array(bucket_N, pa.int16())),
        bucket_N=bucket_N,
        jobs=plan_shards(lengths, bucket_N, token_bytes, config.generate.shard_bytes),
    )


def claim(cache_dir: Path, plan: CopyPlan, bad: BadSamples) -> None:
    """Write manifest, samples and shard list, or check that the cache there is this very import's. CacheError."""
    if not manifest_path(cache_dir).exists():
        write_manifest(cache_dir, plan.manifest)
    found = read_manifest(cache_dir)
    different = difference(found, plan.manifest)
    if different and difference(found, without_left_out(cache_dir, plan).manifest):
        raise CacheError(
            f"The cache at {cache_dir} was made from something else ({'; '.join(different)}): name another folder for "
            "the cache, or take dump and options back."
        )
    remove_leftovers(cache_dir)
    if not different:
        note_bad_samples(cache_dir, bad.errors)
        write_tables(cache_dir, plan)


def copy_rest(cache_dir: Path, dump: Dump, plan: CopyPlan, bad: BadSamples, observer: AdoptObserver) -> None:
    """Copy the shards that have no rows yet. Raises CacheError if they do not fit, DataError if too many are bad."""
    remaining = remaining_jobs(cache_dir, plan).tolist()
    total = int(plan.lengths.sum())
    missing = sum(int(plan.lengths[plan.jobs.samples_of(job)].sum()) for job in remaining)
    needed, free = (
        missing * (plan.manifest.states.token_bytes + ID_BYTES + MASK_BYTES),
        shutil.disk_usage(cache_dir).free,
    )
    if needed > free:
        raise CacheError(
            f"The cache needs {math.ceil(needed / 1e6):,} MB more and {cache_dir} has {free // 10**6:,} MB free: make "
            "room, or name another folder for the cache."
        )
    done = total - missing
    observer.copying(done, total)
    for error in late_errors(cache_dir):
        bad.add(error)
    known = len(bad.errors)
    for job in remaining:
        for tokens in copy_job(cache_dir, dump, plan, job, bad):
            done += tokens
            observer.copying(done, total)
    late = BadSamples(bad.total, 1.0, {error.source: error for error in bad.errors[known:]})
    observer.skipped(late.reasons, late.first)


def finish(cache_dir: Path, plan: CopyPlan) -> Manifest:
    """One index, and a manifest that counts what is there; last, so that no reader takes a part for the whole."""
    consolidate(cache_dir)
    final = without_left_out(cache_dir, plan)
    if final is not plan:
        write_tables(cache_dir, final)
        write_manifest(cache_dir, final.manifest)
    return final.manifest


def without_left_out(cache_dir: Path, plan: CopyPlan) -> CopyPlan:
    """The plan without the samples that were found bad while copying; the very plan if there were none."""
    listed = read_left_out(cache_dir)["sample"].drop_null()
    if not len(listed):
        return plan
    keep_N = ~np.isin(plan.samples["sample"].to_numpy(), listed.to_numpy())
    samples = plan.samples.filter(pa.array(keep_N))
    kept = keep_N[plan.jobs.samples]
    begin = np.concatenate([[0], np.cumsum(kept)])[plan.jobs.begin]
    manifest = replace(plan.manifest, num_samples=samples.num_rows, data_fingerprint=samples_fingerprint(samples))
    jobs = JobList(plan.jobs.samples[kept], begin, plan.jobs.bucket)
    return CopyPlan(manifest, samples, plan.bucket_N[keep_N], jobs)


def write_tables(cache_dir: Path, plan: CopyPlan) -> None:
    """The samples, and the list of shards."""
    write_table(samples_dir(cache_dir) / "samples.parquet", plan.samples)
    write_table(jobs_path(cache_dir), job_table(plan.jobs))
