"""The first stage: the target's forward passes over the job list, into shards and index.

    conversations → (answers) → samples → buckets → job list → forward → shards, index

Samples, job list and manifest stand before the first forward. A shard's index rows appear only when the shard is
whole, so a run stopped at any instant goes on with the samples that have no rows. A job that lacks some of its samples
is forwarded whole and gives the same bits; only what is missing is written.
"""

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch.distributed import DistError, HashStore, Store  # type: ignore[attr-defined]  # re-exported silently

from dflash_cache.cache.files import remove_leftovers
from dflash_cache.cache.index import cached_rows, consolidate
from dflash_cache.cache.layout import (
    Manifest,
    data_report_path,
    difference,
    is_remote,
    manifest_path,
    read_manifest,
    samples_path,
    write_config,
    write_manifest,
)
from dflash_cache.cache.lock import lock_cache
from dflash_cache.cache.rejected import read_rejected
from dflash_cache.cache.shards import ID_BYTES, MASK_BYTES
from dflash_cache.cache.staging import Staging
from dflash_cache.cache.writer import next_shard_numbers, remove_orphans
from dflash_cache.config.settings import Config
from dflash_cache.errors import CacheError, DFlashError, TargetError
from dflash_cache.target.answers import AnswersTold, answer_batches, deal_batches
from dflash_cache.target.append import belongs, differences_but_data, join_parts, parts_of
from dflash_cache.target.crew import (
    Crew,
    Launched,
    TokensTold,
    answer_dealt,
    fill_dealt,
    join_launcher,
    on_device,
    open_local_store,
    own_device,
    worker_devices,
)
from dflash_cache.target.dealer import Dealer, StoppedError
from dflash_cache.target.interrupts import terminate_like_interrupt
from dflash_cache.target.observer import Estimate, Observer
from dflash_cache.target.prepare import Loader, Preparation, prepare, write_preparation
from dflash_cache.target.respond import is_pending, list_batches, read_answers, respond
from dflash_cache.target.work import check_bad_share, missing_samples, plan_buffers, work

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 20.0  # for other machines to put what they have committed; torchrun kills after 30


def generate(config: Config, observer: Observer, append: bool = False) -> Manifest | None:
    """Fill the cache at `config.cache_dir`, or what is missing of it; returns its manifest.

    With `append`, conversations that the cache does not hold yet become a further part of it.

    Under torchrun the first process alone prepares, tells `observer` and returns the manifest; the others return None.
    Raises ConfigError, DataError, TargetError or CacheError, each before anything is written over; WriteError when the
    storage fails. What was committed stands in any case.
    """
    launched = join_launcher(config)
    if launched is not None and launched.rank > 0:
        with terminate_like_interrupt():
            launched.follow(config)
        return None
    lead = launched.lead if launched is not None else lambda *_: nullcontext()
    with terminate_like_interrupt(), lead():
        if is_remote(config.cache_dir):
            with Staging(config.cache_dir, config.remote, observer.noted) as staging, lead(_GRACE_SECONDS):
                return fill_store(config, launched, staging, observer, append)
        with lock_cache(Path(config.cache_dir)) as lock:
            if lock is None:
                observer.noted(
                    f"The storage of {config.cache_dir} knows no locks: see that no other `dflash generate` writes "
                    "there."
                )
            return fill(Run(config, launched, lock, append, None), observer)


def fill_store(
    config: Config, launched: Launched | None, staging: Staging, observer: Observer, append: bool
) -> Manifest:
    """The cache made in a local folder and put into the store shard by shard, as `cache.staging` says."""
    local = config.model_copy(update={"cache_dir": str(staging.folder)})
    manifest = fill(Run(local, launched, staging.lock, append, staging), observer)
    write_config(config.model_copy(update={"cache_dir": staging.place}), staging.folder)
    staging.finish()
    return manifest


@dataclass(frozen=True)
class Run:
    """What is to be done, this process's place if a launcher started it, what holds the cache's lock, and the way into
    a store if that is where the cache shall lie."""

    config: Config
    launched: Launched | None
    lock: int | None
    append: bool
    staging: Staging | None


@dataclass(frozen=True)
class Workers:
    """Who works: this process alone, a crew that it starts, or this process and others that a launcher started.

    `share_folder`: whether all of them see the files of `config.cache_dir`.
    """

    config: Config
    loader: Loader
    store: Store
    crew: Crew | None
    launched: Launched | None
    observer: Observer
    share_folder: bool

    @property
    def number(self) -> int:
        """How many there are."""
        return len(self.crew.devices) if self.crew else self.launched.num_workers if self.launched else 1

    def answer(self, prompts: list[list[int]], folder: Path) -> list[list[int]]:
        """The target's own answers to prompts; all workers take part if they share a folder. Raises CacheError."""
        settings, progress = self.config.respond, self.observer.responding
        pending = [batch for batch in list_batches(prompts, settings) if is_pending(batch, folder)]
        if pending and not self.share_folder:
            self.observer.noted("One worker answers the prompts, for the others share no folder with it.")
        if not pending or self.number == 1 or not self.share_folder:
            return respond(self.loader.load(), prompts, settings, folder, progress)
        dealer = deal_batches(self.config, self.store, prompts, folder, pending)
        tell = AnswersTold(dealer, len(prompts) - sum(len(batch.members) for batch in pending), len(prompts), progress)
        if self.crew:
            self.crew.run(answer_dealt, dealer, tell, gives_up=True)  # a batch can take minutes
        else:
            answer_batches(self.config, self.loader.load, self.store, tell)
            while not tell():  # a worker that fails is the launcher's to notice
                time.sleep(_POLL_SECONDS)
        return read_answers(prompts, settings, folder)

    def forward(self, preparation: Preparation, dealer: Dealer, any_missing: bool) -> None:
        """The dealt jobs, until all workers have ended."""
        tell = TokensTold(dealer, self.observer, int(preparation.lengths.sum()))
        if any_missing and self.crew:
            self.loader.drop()
            self.crew.run(fill_dealt, dealer, tell)
        elif any_missing:
            work(self.config, self.loader.load(), preparation, dealer, self.observer)
        if self.launched:
            self.launched.wait_for_others(tell)


def gather(run: Run, observer: Observer) -> Workers:
    """The workers that the configuration or the launcher asks for. Raises ConfigError."""
    config, launched, share_folder = run.config, run.launched, run.launched is None or run.staging is None
    devices = worker_devices(config)
    if launched is not None:
        config = own_device(config)
        return Workers(config, Loader(config), launched.store, None, launched, observer, share_folder)
    if len(devices) == 1:
        config = on_device(config, devices[0])
        return Workers(config, Loader(config), HashStore(), None, None, observer, share_folder)
    store = open_local_store()
    return Workers(config, Loader(config), store, Crew(config, devices, store, run.lock), None, observer, share_folder)


def fill(run: Run, observer: Observer) -> Manifest:
    """Prepare, do the missing jobs with one worker or many, consolidate; the cache is locked."""
    cache_dir = Path(run.config.cache_dir)
    workers = gather(run, observer)
    preparation = claim(run, prepare(workers.config, workers.answer, observer, run.append), observer)
    if run.staging is not None:
        run.staging.put_tables()
        if run.launched is not None:
            run.staging.put_ready()  # the others see in the store which samples there are
            run.launched.share(run.staging.token)

    missing = missing_samples(cache_dir, len(preparation.bucket_N))
    estimate = estimate_size(run, preparation, missing, workers.number)
    observer.estimated(estimate)
    check_room(cache_dir, estimate.disk_bytes)
    dealer = begin_deal(workers.store, run.config, preparation, missing)
    putting = run.staging.putting(dealer.pause, dealer.stop) if run.staging is not None else nullcontext()
    with tell_what_is_safe(cache_dir, preparation), putting:
        workers.forward(preparation, dealer, bool(missing.any()))
    if run.staging is not None and run.launched is not None:
        run.staging.gather()
    consolidate(cache_dir)
    report_rejected(cache_dir, preparation, observer)
    return preparation.manifest


def claim(run: Run, prepared: Preparation, observer: Observer) -> Preparation:
    """Write manifest, samples and job list, or check that they are this very cache's; returns all that it holds.

    Raises CacheError if the cache was made with another configuration or other data.
    """
    cache_dir = Path(run.config.cache_dir)
    if not manifest_path(cache_dir).exists():
        if cached_rows(cache_dir).num_rows:  # of which data nobody can tell
            raise CacheError(
                f"The folder {cache_dir} holds cached samples but no manifest.json: restore it from a copy, or set "
                "cache_dir to another folder."
            )
        samples_path(cache_dir).unlink(missing_ok=True)
        data_report_path(cache_dir).unlink(missing_ok=True)
        write_manifest(cache_dir, prepared.manifest)
        write_preparation(cache_dir, prepared)
        return prepared
    was = read_manifest(cache_dir)
    joins = belongs(was, prepared, run.append)
    different = differences_but_data(run.config, was, prepared) if joins else difference(was, prepared.manifest)
    if different:
        place = run.staging.place if run.staging is not None else cache_dir
        advice = (
            "set cache_dir to another folder or take the configuration back"
            if run.append
            else "set cache_dir to another folder, take the configuration back, or add new conversations alone with "
            "--append"
        )
        raise CacheError(
            f"The cache at {place} was made with another configuration ({'; '.join(different)}): {advice}."
        )
    remove_leftovers(cache_dir)
    if num_orphans := remove_orphans(cache_dir):
        observer.noted(f"Removed {num_orphans} shards that a stopped run had not announced yet.")
    if joins:
        if run.staging is None and prepared.manifest.data_fingerprint not in parts_of(was):
            check_room(cache_dir, int(prepared.lengths.sum()) * stored_token_bytes(was))  # while the cache is complete
        return join_parts(run.config, was, prepared)
    write_preparation(cache_dir, prepared)
    return prepared


def stored_token_bytes(manifest: Manifest) -> int:
    """Bytes of a token in a shard."""
    return manifest.states.token_bytes + ID_BYTES + MASK_BYTES


def check_room(cache_dir: Path, needed_bytes: int) -> None:
    """Raise CacheError if the storage has less room."""
    free_bytes = shutil.disk_usage(cache_dir).free
    if needed_bytes > free_bytes:
        raise CacheError(
            f"The cache needs {math.ceil(needed_bytes / 1e6):,} MB more and {cache_dir} has {free_bytes // 10**6:,} MB "
            "free: make room, name another cache_dir, or cache fewer conversations or layers (data, "
            "target.num_layers)."
        )


def estimate_size(run: Run, preparation: Preparation, missing: np.ndarray, num_workers: int) -> Estimate:
    """Size of the whole cache and of what is missing, against the space free where it lies, or is made."""
    config = run.config
    manifest, lengths = preparation.manifest, preparation.lengths
    token_bytes, remaining_tokens = stored_token_bytes(manifest), int(lengths[missing].sum())
    disk_bytes = remaining_tokens * token_bytes
    if run.staging is not None:  # beside the shards that wait, each worker has one open in each bucket
        open_shards = num_workers * len(manifest.bucket_bounds)
        disk_bytes = min(disk_bytes, config.remote.staging_bytes + open_shards * config.generate.shard_bytes)
    return Estimate(
        num_samples=len(lengths),
        num_tokens=int(lengths.sum()),
        remaining_tokens=remaining_tokens,
        token_bytes=token_bytes,
        disk_bytes=disk_bytes,
        free_bytes=shutil.disk_usage(config.cache_dir).free,
        num_workers=num_workers,
        buffer_bytes=num_workers * plan_buffers(config, preparation).num_bytes,
    )


def begin_deal(store: Store, config: Config, preparation: Preparation, missing: np.ndarray) -> Dealer:
    """Lay out the jobs that hold a missing sample. Raises TargetError if too many samples are known to be bad."""
    cache_dir, jobs = Path(config.cache_dir), preparation.jobs
    num_bad = read_rejected(cache_dir).num_rows
    check_bad_share(num_bad, len(missing), config.generate.max_bad_share)
    remaining = np.flatnonzero(np.logical_or.reduceat(missing[jobs.samples], jobs.begin[:-1]))
    dealer = Dealer(store)
    numbers = next_shard_numbers(cache_dir, len(preparation.manifest.bucket_bounds))
    dealer.begin(remaining, numbers, int(preparation.lengths[~missing].sum()), num_bad)
    return dealer


@contextmanager
def tell_what_is_safe(cache_dir: Path, preparation: Preparation) -> Iterator[None]:
    """Add to an error of the block how much of the cache is committed."""
    try:
        yield
    except (CacheError, TargetError, StoppedError, DistError) as error:
        if not isinstance(error, DFlashError):
            error = CacheError("The launcher's store is gone: run the same command again.")
        rows = cached_rows(cache_dir)
        lengths = preparation.lengths
        raise type(error)(
            f"{error} Committed so far: {rows.num_rows:,} of {len(lengths):,} samples, "
            f"{int(rows['length'].to_numpy().sum(dtype=np.int64)):,} of {int(lengths.sum()):,} tokens."
        ) from error


def report_rejected(cache_dir: Path, preparation: Preparation, observer: Observer) -> None:
    """Tell the observer how many samples were left out for which reason, and the source of the first."""
    rejected = read_rejected(cache_dir).to_pydict()
    reasons: dict[str, int] = {}
    first: dict[str, str] = {}
    for sample, reason in zip(rejected["sample"], rejected["reason"], strict=True):
        reasons[reason] = reasons.get(reason, 0) + 1
        first.setdefault(reason, f"sample {sample}, {preparation.samples['source'][sample].as_py()}")
    observer.rejected(reasons, first)
