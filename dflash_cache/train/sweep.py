"""Many drafters over one cache: one after the other, one a device, or together, reading each batch once.

Each run of a sweep is a run like any other: a folder of its own, resumable by itself, with the bits that it has when
trained alone. A sweep that was stopped or killed goes on with the same call: what is complete is found complete.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

from dflash_cache.cache.shared_reads import SharedReads
from dflash_cache.config.sweep import Sweep, SweepRun
from dflash_cache.drafter.device import list_devices
from dflash_cache.errors import DFlashError, RunError
from dflash_cache.train.loop import advance, train
from dflash_cache.train.metrics import Sink
from dflash_cache.train.processes import Outcome, TrainingProcess, threads_for, wait_for_any
from dflash_cache.train.setup import TrainingRun, open_reader, open_run
from dflash_cache.train.signals import StopRequest

OpenSinks = Callable[[SweepRun], AbstractContextManager[Sequence[Sink]]]
# Runs that agree in these ask for the same batches at the same steps.
_SAME_READS = (
    "token_budget", "max_samples", "accumulation", "min_buffer", "validation_share", "order", "seed", "epochs",
    "max_steps", "validate_every", "verify_checksums", "direct_io",
)  # fmt: skip


def run_sweep(sweep: Sweep, open_sinks: OpenSinks) -> dict[str, Outcome]:
    """Train all runs, until the last is complete or a signal asks to stop; each run's outcome by its name.

    A run that fails, or is refused before it begins, does not stop the others. Raises CacheError if the cache cannot
    be read.
    """
    if sweep.settings.mode == "devices":
        return _train_on_devices(sweep, open_sinks)
    outcomes = {run.name: Outcome("stopped") for run in sweep.runs}
    with StopRequest() as stop:
        for group in group_runs(sweep):
            if not stop.requested:
                outcomes |= _train_together(group, open_sinks, stop)
    return outcomes


def group_runs(sweep: Sweep) -> list[list[SweepRun]]:
    """Runs that are trained together, in the order of each group's first: those that read the same batches, or one."""
    if sweep.settings.mode != "together":
        return [[run] for run in sweep.runs]
    groups: dict[tuple[object, ...], list[SweepRun]] = {}
    for run in sweep.runs:
        key = tuple(getattr(run.config.train, name) for name in _SAME_READS)
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def _train_together(group: list[SweepRun], open_sinks: OpenSinks, stop: StopRequest) -> dict[str, Outcome]:
    """Step by step in turn; a run that a kill left behind the others first catches up with them by itself."""
    outcomes = {run.name: Outcome("stopped") for run in group}
    with ExitStack() as stack:
        reader = stack.enter_context(open_reader(group[0].config))
        names: list[str] = []
        opened: list[TrainingRun] = []
        sinks: list[Sequence[Sink]] = []
        for each in group:
            try:
                run = stack.enter_context(open_run(each.config, reader=reader))
                sinks.append(stack.enter_context(open_sinks(each)))
            except DFlashError as error:
                outcomes[each.name] = Outcome("failed", str(error))
            else:
                names.append(each.name)
                opened.append(run)
        _share_frozen(opened)
        reads = SharedReads(reader, len(opened))
        furthest = max((run.step for run in opened), default=0)
        going: dict[int, Iterator[None]] = {
            place: _catch_up_and_go_on(run, sinks[place], stop, furthest, partial(reads.take, place))
            for place, run in enumerate(opened)
        }
        for steps in going.values():
            stack.enter_context(closing(steps))  # type: ignore[type-var]  # a generator
        while going:
            for place, steps in list(going.items()):
                try:
                    next(steps)
                    continue
                except StopIteration:
                    run = opened[place]
                    outcomes[names[place]] = Outcome("complete" if run.step == run.num_steps else "stopped")
                except RunError as error:
                    outcomes[names[place]] = Outcome("failed", str(error))
                del going[place]
                reads.leave(place)
    return outcomes


def _catch_up_and_go_on(
    run: TrainingRun, sinks: Sequence[Sink], stop: StopRequest, furthest: int, take: Callable[..., Any]
) -> Iterator[None]:
    """The steps that the others have taken all at once, with reads of its own; then yields after each shared one."""
    with closing(advance(run, sinks, stop)) as steps:  # type: ignore[type-var]  # a generator
        while run.step < furthest and not stop.requested:
            next(steps)
    run.read_batch = take
    yield from () if stop.requested else advance(run, sinks, stop)


def _share_frozen(runs: Sequence[TrainingRun]) -> None:
    """One copy of the target's embedding and head where all runs take the same."""
    for run in runs[1:]:
        first = runs[0]
        same = (run.drafter.shape.embedding_scale, run.config.train.dtype, run.device)
        if same == (first.drafter.shape.embedding_scale, first.config.train.dtype, first.device):
            run.frozen = replace(first.frozen, teacher=run.frozen.teacher)  # not all of them distil


def _train_on_devices(sweep: Sweep, open_sinks: OpenSinks) -> dict[str, Outcome]:
    """As many runs at a time as there are devices, each in a process; a device that is free takes the next run."""
    free = list_devices(sweep.settings.devices, "The sweep's devices")
    num_devices = len(free)
    outcomes = {run.name: Outcome("stopped") for run in sweep.runs}
    left, working = list(sweep.runs), dict[TrainingProcess, tuple[str, str]]()
    with StopRequest() as stop:
        while working or (left and not stop.requested):
            while left and free and not stop.requested:
                run, device = left.pop(0), free.pop(0)
                process = TrainingProcess(_train_alone, [run, device, open_sinks], threads_for(device, num_devices), {})
                working[process] = run.name, device
            for process in wait_for_any(list(working), stop):
                name, device = working.pop(process)
                free.append(device)
                outcomes[name] = process.end()
    return outcomes


def _train_alone(run: SweepRun, device: str, open_sinks: OpenSinks) -> bool:
    settings = run.config.train.model_copy(update={"device": device})
    with open_sinks(run) as sinks:
        return train(run.config.model_copy(update={"train": settings}), sinks)
