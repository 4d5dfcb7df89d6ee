"""Several workers, one a device: processes of our own on one machine, or those that torchrun started on several.

One prepares the cache; the others, who share nothing with it but the storage and a store of counters, read samples and
jobs from the cache itself. A worker that dies ends the run: the others stop after the job they are at and commit. Those
of a launcher need no shared folder if the cache lies in an object store: each puts what it makes.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]  # re-exported silently
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing import get_context

from dflash_cache.cache.layout import is_remote
from dflash_cache.cache.staging import Staging
from dflash_cache.config.settings import Config
from dflash_cache.drafter.device import list_devices
from dflash_cache.errors import CacheError, ConfigError, DFlashError
from dflash_cache.target.answers import ANNOUNCED, answer_batches
from dflash_cache.target.dealer import Dealer, StoppedError
from dflash_cache.target.interrupts import heed_interrupts, hold_interrupts, terminate_like_interrupt
from dflash_cache.target.observer import Observer
from dflash_cache.target.prepare import Loader, read_preparation
from dflash_cache.target.work import work

_LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.2
_MEETING = timedelta(seconds=10)  # the store listens before any worker starts; meanwhile the cache stays locked
_INTERRUPTED = 130
_TOKEN = "staging/token"  # what joins the other workers to the first one's marker
_ENDED_BY_US = (_INTERRUPTED, -signal.SIGTERM)


def worker_devices(config: Config) -> list[str]:
    """The device of each worker, as `target.device` takes them. Raises ConfigError."""
    text = config.generate.devices
    if text is None:
        return [config.target.device]
    devices = list_devices(text, "generate.devices")
    if config.target.device_map is not None:
        raise ConfigError("generate.devices and target.device_map exclude each other: one worker drives the whole map.")
    return devices


@dataclass(frozen=True)
class Crew:
    """One worker process a device: which, with what configuration, and the store of counters that they ask.

    lock: the descriptor of the cache's lock, which they hold on to, so that it outlives whoever started them.
    """

    config: Config
    devices: Sequence[str]
    store: TCPStore
    lock: int | None

    def run(self, task: "Task", dealer: Dealer, tell: Callable[[], object], gives_up: bool = False) -> None:
        """All workers at `task` until `dealer` has no more; `tell` is called now and then, and at the end.

        Raises CacheError when a worker fails or dies; the others then end after what they are at, or give it up if
        `gives_up`, and at once if they have not begun. KeyboardInterrupt likewise.
        """
        context: BaseContext = get_context("spawn")  # a fork would not survive an initialised GPU
        address = (self.store.port, self._inheritable_lock(context))
        processes = [
            context.Process(  # type: ignore[attr-defined]  # every context has it
                target=_run_worker,
                args=(task, on_device(self.config, device), address, rank, len(self.devices)),
                name=f"worker {rank} ({device})",
            )
            for rank, device in enumerate(self.devices)
        ]
        for rank in range(len(processes)):  # of an earlier task
            self.store.delete_key(_begun(rank))
        try:
            with hold_interrupts():  # a worker that is importing would show where it was
                for process in processes:
                    process.start()
            _watch(processes, tell)
        finally:
            dealer.stop()
            started = [(rank, process) for rank, process in enumerate(processes) if process.pid is not None]
            for rank, process in started:
                if process.is_alive() and (gives_up or not self.store.check([_begun(rank)])):
                    process.terminate()
            for _, process in started:
                process.join()
        ended = {rank: process for rank, process in enumerate(processes) if process.exitcode}
        failed = {rank: process for rank, process in ended.items() if process.exitcode not in _ENDED_BY_US} or ended
        if failed:
            raise CacheError(" ".join(_describe_end(self.store, rank, process) for rank, process in failed.items()))

    def _inheritable_lock(self, context: BaseContext) -> "_Inherited | None":
        if self.lock is None or context.get_start_method() == "fork":  # a fork inherits every descriptor
            return None
        return _Inherited(self.lock)


Task = Callable[[Config, Loader, Store], None]


def fill_dealt(config: Config, loader: Loader, store: Store) -> None:
    """A worker's task: the jobs of the cache."""
    work(config, loader.load(), read_preparation(config), Dealer(store), Observer())


def put_dealt(rank: int, config: Config, loader: Loader, store: Store) -> None:
    """A launched worker's task where the cache lies in a store: jobs into a folder of its own, and from there."""
    dealer = Dealer(store, place=str(rank))
    dealer.pause(False)
    with Staging(config.cache_dir, config.remote, joins=(store.get(_TOKEN).decode(), rank)) as staging:
        local = config.model_copy(update={"cache_dir": str(staging.folder)})
        with staging.putting(dealer.pause, dealer.stop):
            work(local, loader.load(), read_preparation(local), dealer, Observer())
        staging.clear()


def answer_dealt(config: Config, loader: Loader, store: Store) -> None:
    """A worker's task: the target's own answers."""
    answer_batches(config, loader.load, store)


class _Inherited:
    """A descriptor that the started process gets a copy of, open until it ends."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (DupFd(self.descriptor),)


def _receive(duplicate: Any) -> _Inherited:
    return _Inherited(duplicate.detach())


def open_local_store() -> TCPStore:
    """A store of counters for processes of this machine; it lives as long as the object."""
    return TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)


def on_device(config: Config, device: str) -> Config:
    """The configuration with another target.device."""
    target = config.target.model_copy(update={"device": device})
    return config.model_copy(update={"target": target})


def _run_worker(task: Task, config: Config, address: tuple[int, Any], rank: int, num_workers: int) -> None:
    """What a worker process does; it tells its error through the store, and ends with a code that is not 0."""
    port, _lock = address
    try:
        store = TCPStore(_LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=_MEETING)
    except DistError:  # whoever started this worker is gone, and has no use for what it would do
        sys.exit(_INTERRUPTED)
    try:
        with terminate_like_interrupt():
            store.set(_begun(rank), "")
            heed_interrupts()
            if config.target.device == "cpu":  # workers on one CPU share its cores
                torch.set_num_threads(max(1, torch.get_num_threads() // num_workers))
            task(config, Loader(config), store)
    except DFlashError as error:
        store.set(f"error/{rank}", str(error))
        sys.exit(2)
    except (KeyboardInterrupt, StoppedError):
        sys.exit(_INTERRUPTED)


def _begun(rank: int) -> str:
    return f"begun/{rank}"


def _watch(processes: Sequence[BaseProcess], tell: Callable[[], object]) -> None:
    """Show progress until all have ended, or the first has failed."""
    while running := [process for process in processes if process.is_alive()]:
        wait([process.sentinel for process in running], timeout=_POLL_SECONDS)
        tell()
        if any(process.exitcode for process in processes):
            return


class TokensTold:
    """Tells the observer the tokens of all workers, when they have changed."""

    def __init__(self, dealer: Dealer, observer: Observer, total_tokens: int) -> None:
        self._dealer, self._observer, self._total_tokens = dealer, observer, total_tokens
        self._told = -1

    def __call__(self) -> None:
        """Look, and tell."""
        done = self._dealer.add_tokens(0)
        if done != self._told:
            self._observer.forwarding(done, self._total_tokens)
            self._told = done


def _describe_end(store: Store, rank: int, process: BaseProcess) -> str:
    code = process.exitcode or 0
    if store.check([f"error/{rank}"]):
        return str(store.get(f"error/{rank}").decode())
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"{process.name.capitalize()} {how}: run the same command again."


@dataclass(frozen=True)
class Launched:
    """This process's place among those that torchrun (or anything that sets its variables) started."""

    store: Store
    rank: int
    num_workers: int

    def follow(self, config: Config) -> None:
        """Work as one of the others: answer if there is what to answer, then do jobs once the first has prepared."""
        config = own_device(config)
        loader, has_answered = Loader(config), False
        try:
            while not self.store.check(["jobs"]):
                if self.store.check(["failed"]):
                    raise CacheError("The first worker could not prepare the cache: see its message.")
                if not has_answered and self.store.check([ANNOUNCED]):
                    answer_dealt(config, loader, self.store)
                    has_answered = True
                time.sleep(_POLL_SECONDS)
            if is_remote(config.cache_dir):
                put_dealt(self.rank, config, loader, self.store)
            else:
                fill_dealt(config, loader, self.store)
            self.store.add("ended", 1)
        except (DistError, StoppedError):
            raise CacheError("The first worker is gone: run the same command again.") from None
        finally:
            with suppress(DistError):
                self.store.add("gone", 1)

    @contextmanager
    def lead(self, grace_seconds: float = 0.0) -> Iterator[None]:
        """If the block fails, tell the others, who end after the job they are at, and wait so long for them at most."""
        try:
            yield
        except BaseException as error:
            with suppress(DistError):
                if isinstance(error, DFlashError):
                    self.store.set("failed", str(error))
                Dealer(self.store).stop()
                deadline = time.monotonic() + grace_seconds
                while self.store.add("gone", 0) < self.num_workers - 1 and time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS)
            raise

    def share(self, token: str) -> None:
        """Let the others put what they make into the store of the cache that this one writes."""
        self.store.set(_TOKEN, token)

    def wait_for_others(self, tell: Callable[[], object]) -> None:
        """Until all others have ended well; one that fails is the launcher's to notice."""
        while self.store.add("ended", 0) < self.num_workers - 1:
            tell()
            time.sleep(_POLL_SECONDS)


def join_launcher(config: Config) -> Launched | None:
    """This process's place under torchrun, or None if nothing launched it. Raises ConfigError."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    if config.generate.devices is not None:
        raise ConfigError("generate.devices and torchrun exclude each other: leave --devices out, torchrun gives them.")
    if config.target.device_map is not None and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "With target.device_map one worker drives all devices of a machine: start torchrun with --nproc-per-node 1."
        )
    store, rank, num_workers = next(rendezvous("env://"))
    return Launched(store, rank, num_workers)


def own_device(config: Config) -> Config:
    """Under torchrun: the configuration with the GPU of this process's local rank for `auto`."""
    if config.target.device != "auto" or not torch.cuda.is_available() or config.target.device_map is not None:
        return config
    return on_device(config, f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}")
