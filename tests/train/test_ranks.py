"""Runs on one, two and four ranks: the same curves; killed or stopped anywhere, and resumed: the same bits."""

import os
import shutil
import signal
import threading
import weakref
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train.rank_runs import (
    COMPLETE,
    KILLED,
    NUM_WITHOUT_ANCHORS,
    REFUSED,
    STOPPED,
    Fate,
    final_state,
    read_log,
    run_ranks,
)

from dflash_cache.cache.reader import CacheReader
from dflash_cache.data import plan
from dflash_cache.data.held_out import split_rows
from dflash_cache.drafter.anchors import draw_anchors
from dflash_cache.errors import RunError
from dflash_cache.train import loop, setup
from dflash_cache.train.checkpoint import BEST, best_path, checkpoints_dir, latest_path
from dflash_cache.train.loop import train
from dflash_cache.train.ranks import Ranks, _split_bytes, join_ranks
from dflash_cache.train.stream import MicroBatch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def assert_same_bits(one, other) -> None:
    (step, tensors), (other_step, other_tensors) = final_state(one), final_state(other)
    assert step == other_step
    assert tensors.keys() == other_tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, other_tensors[name]), name


def losses(config) -> list[float]:
    return [record["loss"] for record in read_log(config)]


def test_some_micro_batches_of_these_runs_have_no_anchor(base_config) -> None:
    with CacheReader(Path(base_config.cache_dir)) as reader:
        batch = reader.read_batch(np.arange(len(reader.index.sample)))
    masks = [mask[:length] for mask, length in zip(batch.loss_mask.numpy(), batch.length.tolist(), strict=True)]
    assert sum(len(draw_anchors(mask, 6, (0, 0, 0))) == 0 for mask in masks) == NUM_WITHOUT_ANCHORS


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_killed_after_each_of_its_steps_ends_with_the_same_bits(configure, world_size) -> None:
    whole, parts = (configure(name, accumulation=4 // world_size) for name in ("whole", "parts"))
    assert run_ranks([whole] * world_size) == [(COMPLETE, "")] * world_size
    num_steps, _ = final_state(whole)
    assert num_steps >= 8
    for step in range(1, num_steps):
        fate = Fate(rank=step % world_size, step=step)
        for rank, (code, text) in enumerate(run_ranks([parts] * world_size, fate)):
            if rank == fate.rank:
                assert code == KILLED
            else:
                assert code == REFUSED
                assert text.startswith(f"Rank {rank} has lost another rank (")
                assert text.endswith("start all of them again, the run goes on from its last checkpoint.")
    assert run_ranks([parts] * world_size) == [(COMPLETE, "")] * world_size
    assert_same_bits(whole, parts)
    assert read_log(whole) == read_log(parts)


def test_a_signal_on_any_rank_stops_all_after_the_same_step_and_one_rank_goes_on_with_the_same_steps(configure) -> None:
    whole, stopped = configure("whole", accumulation=2), configure("stopped", accumulation=2)
    alone = configure("stopped", accumulation=4)
    assert run_ranks([whole] * 2) == [(COMPLETE, "")] * 2
    assert run_ranks([stopped] * 2, Fate(rank=1, step=3, number=signal.SIGTERM)) == [(STOPPED, "")] * 2
    assert final_state(stopped)[0] == 3
    assert run_ranks([alone]) == [(COMPLETE, "")]
    for one, other in zip(read_log(whole), read_log(alone), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert (one["kind"], one["step"], one["blocks"]) == (other["kind"], other["step"], other["blocks"])
        batch = one.get("batch", {})
        composition = {name: value for name, value in batch.items() if not name.endswith("_loss")}
        assert composition == {name: other["batch"][name] for name in composition}
    (_, tensors), (_, others) = final_state(whole), final_state(alone)
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-4, atol=1e-5)


def test_one_two_and_four_ranks_have_the_same_loss_curves_and_records(configure) -> None:
    runs = [configure(f"ranks-{world_size}", accumulation=4 // world_size) for world_size in (1, 2, 4)]
    for world_size, config in zip((1, 2, 4), runs, strict=True):
        assert run_ranks([config] * world_size) == [(COMPLETE, "")] * world_size
    assert len({round(loss, 3) for loss in losses(runs[0])}) > 4  # a curve, not a constant
    for one, other in pairwise(runs):
        assert losses(one) == pytest.approx(losses(other), abs=1e-4)
        for record, twin in zip(read_log(one), read_log(other), strict=True):
            assert record["position_accuracy"] == pytest.approx(twin["position_accuracy"])
            if record["kind"] == "validation":
                assert (record["passes"], record["acceptance_estimate"]) == (
                    twin["passes"],
                    twin["acceptance_estimate"],
                )
                assert record["answer_acceptance_estimate"] == pytest.approx(twin["answer_acceptance_estimate"])


def test_ranks_of_different_runs_are_refused_with_the_difference(configure) -> None:
    begun = configure("begun", accumulation=2)
    assert run_ranks([begun] * 2, Fate(rank=0, step=2, number=signal.SIGTERM)) == [(STOPPED, "")] * 2
    fresh = configure("fresh", accumulation=2)
    expected = (
        "Rank 1 sees another run than rank 0 (checkpoint: on rank 0 2, on rank 1 0): give all ranks the same "
        "configuration, and cache_dir and run_dir on storage that all of them share."
    )
    assert run_ranks([begun, fresh]) == [(REFUSED, expected)] * 2


def test_a_run_resumed_with_other_steps_is_refused(configure) -> None:
    two = configure("run", accumulation=2)
    assert run_ranks([two] * 2, Fate(rank=0, step=1, number=signal.SIGTERM)) == [(STOPPED, "")] * 2
    ((code, text),) = run_ranks([two])
    assert code == REFUSED
    assert "train.accumulation × ranks: was 4, is 2" in text


def test_a_run_that_ends_inside_an_epoch_reads_nothing_more(configure) -> None:
    assert train(configure("run", max_steps=1), [])
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_a_single_process_joins_nobody_and_sums_are_what_they_were(monkeypatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_ranks("cpu") as ranks:
        assert ranks == Ranks(torch.device("cpu"), 0, 1)
        parameter = torch.nn.Parameter(torch.ones(3))
        ranks.sum_gradients([parameter])
        assert parameter.grad is None  # an optimizer leaves it alone
        tensor = torch.tensor([1.5])
        ranks.sum([tensor])
        assert tensor.tolist() == [1.5]
        assert ranks.gather("x") == ["x"]
        assert (ranks.any(True), ranks.any(False)) == (True, False)
    assert not torch.distributed.is_initialized()


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 60))
def test_tensors_are_summed_in_order_in_pieces_of_the_largest_size_allowed(sizes, max_bytes) -> None:
    tensors = [torch.zeros(size) for size in sizes]
    buckets = list(_split_bytes(tensors, max_bytes))
    assert [id(tensor) for bucket in buckets for tensor in bucket] == [id(tensor) for tensor in tensors]
    for bucket, following in pairwise([*buckets, [torch.zeros(100)]]):
        assert sum(tensor.nbytes for tensor in bucket) <= max_bytes or len(bucket) == 1
        assert sum(tensor.nbytes for tensor in bucket) + following[0].nbytes > max_bytes


def test_a_run_whose_permutations_come_out_differently_is_refused(configure, monkeypatch) -> None:
    config = configure("run", max_steps=2)
    train(config, [])
    monkeypatch.setattr(plan, "_generator", lambda *key: np.random.Generator(np.random.Philox(key)))  # another numpy
    with pytest.raises(RunError, match=r"has another order .* \(order of the first epoch: was \w{16}, is \w{16}\): go"):
        train(config, [])


def test_a_rank_that_finds_a_damaged_sample_says_so_and_ends_all(configure, tmp_path) -> None:
    config = configure("run", accumulation=2)
    cache = tmp_path / "damaged"
    shutil.copytree(config.cache_dir, cache)
    with CacheReader(cache) as reader:
        index = reader.index
    trained, _ = split_rows(index.sample, config.train.validation_share, config.train.seed)
    broken = trained[index.row[trained] == 0][0]  # its states are the first in its shard
    shard = cache / index.shard_names[index.shard[broken]]
    data = bytearray(shard.read_bytes())
    data[5000] ^= 1
    shard.write_bytes(data)
    outcomes = run_ranks([config.model_copy(update={"cache_dir": str(cache)})] * 2)
    assert [code for code, _ in outcomes] == [REFUSED, REFUSED]
    lost, damage = sorted((text for _, text in outcomes), key=lambda text: text.startswith("Sample"))
    assert damage.startswith(f"Sample {broken} cannot be read from shard ")
    assert "has lost another rank" in lost


class Interrupted(BaseException):
    """As a kill: nothing of ours catches it."""


def test_a_run_killed_between_its_best_checkpoint_and_the_mark_has_the_mark_when_it_goes_on(
    configure, monkeypatch
) -> None:
    whole, parts = (configure(name, max_steps=3, validate_every=3) for name in ("whole", "parts"))
    assert train(whole, [])

    def die(*_: object) -> None:
        raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(loop, "mark_best", die)
        train(parts, [])
    assert final_state(parts)[0] == 3
    assert best_path(Path(parts.run_dir)) is None
    assert train(parts, [])
    marks = [(checkpoints_dir(Path(config.run_dir)) / BEST).read_text() for config in (whole, parts)]
    assert marks[0] == marks[1]
    assert best_path(Path(parts.run_dir)) == latest_path(Path(parts.run_dir))


@pytest.mark.parametrize("read_ahead_bytes", [1, 100_000])
def test_states_in_memory_stay_within_the_bytes_set_or_those_of_one_step(
    configure, monkeypatch, read_ahead_bytes
) -> None:
    config = configure("run", read_ahead_bytes=read_ahead_bytes, reader_threads=1, validation_share=0.0)
    load = loop.load_micro_batch
    alive: weakref.WeakSet[MicroBatch] = weakref.WeakSet()
    held: list[int] = []

    def load_and_count(*arguments) -> MicroBatch:
        micro_batch = load(*arguments)
        alive.add(micro_batch)
        held.append(sum(each.batch.hidden_STLH.nbytes for each in list(alive)))
        return micro_batch

    monkeypatch.setattr(loop, "load_micro_batch", load_and_count)
    monkeypatch.setattr(MicroBatch, "__hash__", object.__hash__)
    records: list[dict] = []
    train(config, [records.append])
    with CacheReader(Path(config.cache_dir)) as reader:
        token_bytes = reader.read_batch(np.array([0])).hidden_STLH[0, 0].nbytes
    steps = [record["tokens"] / record["batch"]["padding_efficiency"] * token_bytes for record in records]
    assert max(held) <= max(read_ahead_bytes, *steps) + 1
    assert len(held) == sum(record["batch"]["micro_batches"] for record in records)


def test_an_epochs_list_is_made_when_training_comes_to_it_and_resuming_makes_the_same(configure, monkeypatch) -> None:
    planned: list[int] = []
    plan_epoch = setup.plan_epoch

    def record(lengths, buckets, limits, seed, epoch):
        planned.append(epoch)
        return plan_epoch(lengths, buckets, limits, seed, epoch)

    monkeypatch.setattr(setup, "plan_epoch", record)
    config, whole = configure("run", validation_share=0.0), configure("whole", validation_share=0.0)
    assert train(configure("run", validation_share=0.0, epochs=2), [stop_at(2)]) is False
    assert set(planned) == {0}
    lists = Path(config.run_dir) / "plans"
    assert [path.name for path in lists.iterdir()] == ["epoch-000.parquet"]
    assert train(config, [])
    assert set(planned) == {0, 1}
    assert train(whole, [])
    for name in ("epoch-000.parquet", "epoch-001.parquet"):
        assert (lists / name).read_bytes() == (Path(whole.run_dir) / "plans" / name).read_bytes()
    assert_same_bits(config, whole)


def stop_at(step: int):
    """A sink that asks this process to stop."""

    def sink(record) -> None:
        if record["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return sink
