"""Which sample goes into which shard, and how far ahead states are read."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.cache.adopt import copy
from dflash_cache.cache.adopt.copy import CopyPlan, plan_shards, read_states
from dflash_cache.cache.adopt.dump import DumpedSample, SampleError, natural_key
from dflash_cache.cache.adopt.records import open_specforge
from dflash_cache.cache.layout import Manifest


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3)), min_size=1, max_size=60),
    st.integers(1, 9),
    st.integers(1, 400),
)
def test_every_sample_is_in_one_shard_of_its_bucket_and_there_are_no_more_shards_than_needed(
    samples: list[tuple[int, int]], token_bytes: int, shard_bytes: int
) -> None:
    length, bucket = (np.array(column) for column in zip(*samples, strict=True))
    jobs = plan_shards(length, bucket, token_bytes, shard_bytes)
    assert sorted(jobs.samples.tolist()) == list(range(len(samples)))
    sizes: dict[int, list[int]] = {}
    for job in range(jobs.num_jobs):
        members = jobs.samples_of(job)
        assert len(members)
        assert (np.diff(members) > 0).all()
        assert (bucket[members] == jobs.bucket[job]).all()
        size = length[members] * token_bytes
        assert size[:-1].sum() < shard_bytes
        sizes.setdefault(int(jobs.bucket[job]), []).append(int(size.sum()))
    for shards in sizes.values():
        assert len(shards) <= -(-sum(shards) // shard_bytes)


@given(st.lists(st.integers(0, 10**9), min_size=1, unique=True))
def test_numbers_in_names_sort_as_numbers(numbers: list[int]) -> None:
    names = sorted((f"rows_{n // 20 * 20}-{n // 20 * 20 + 20}/data_{n}.ckpt" for n in numbers), key=natural_key)
    assert [int(name.split("_")[-1].removesuffix(".ckpt")) for name in names] == sorted(numbers)


@dataclass
class MemoryDump:
    """Samples of zeros and ones; counts the bytes whose reading has begun."""

    lengths: list[int]
    begun_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    layer_ids: tuple[int, ...] | None = (0, 1)
    extra_last_layer: bool = False
    absent: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return [str(i) for i in range(len(self.lengths))]

    def open_sample(self, name: str) -> DumpedSample:
        length = self.lengths[int(name)]

        def load() -> torch.Tensor:
            with self.lock:
                self.begun_bytes += length * 16
            return torch.full((length, 8), float(name != "5"), dtype=torch.bfloat16)

        ids = torch.ones(length, dtype=torch.int64)
        return DumpedSample(ids, ids, (length, 8), torch.bfloat16, load)


def make_plan(lengths: list[int]) -> CopyPlan:
    manifest = Manifest(
        tool_version="1", target_model="t", target_revision=None, target_fingerprint="f", tokenizer_fingerprint="f",
        template_fingerprint="f", mask_rule="r", layer_ids=(0, 1), target_num_layers=4, hidden_size=4, vocab_size=9,
        dtype="bfloat16", bucket_bounds=(64,), max_length=64, data_fingerprint="f", num_samples=len(lengths),
        order_seed=0,
    )  # fmt: skip
    columns = {"source": [str(i) for i in range(len(lengths))], "length": lengths}
    samples = pa.table(
        columns
        | {
            "input_ids": pa.array([[1] * n for n in lengths], pa.list_(pa.int32())),
            "loss_mask": [[True] * n for n in lengths],
        }
    )
    buckets = np.zeros(len(lengths), np.int16)
    return CopyPlan(manifest, samples, buckets, plan_shards(np.array(lengths), buckets, 16, 1 << 20))


def test_states_come_in_order_and_are_read_ahead_within_the_bound(monkeypatch) -> None:
    lengths = [1 + 7 * i % 50 for i in range(40)]
    monkeypatch.setattr(copy, "READ_AHEAD_BYTES", 100 * 16)
    dump, taken = MemoryDump(lengths), 0
    for i, states in enumerate(read_states(dump, make_plan(lengths), list(range(40)))):
        taken += lengths[i] * 16
        with dump.lock:
            assert dump.begun_bytes - taken <= 100 * 16 + max(lengths) * 16
        if i == 5:
            assert isinstance(states, SampleError)
            assert states.reason == "states with rows of zeros"
        else:
            assert states.shape == (lengths[i], 2, 4)
    assert dump.begun_bytes == sum(lengths) * 16


def test_a_sample_that_changes_between_the_two_looks_is_refused() -> None:
    dump, plan = MemoryDump([4, 9, 6]), make_plan([4, 9, 6])
    dump.lengths[1] = 8
    one, two, three = read_states(dump, plan, [0, 1, 2])
    assert isinstance(one, torch.Tensor)
    assert isinstance(three, torch.Tensor)
    assert isinstance(two, SampleError)
    assert two.reason == "a sample that has changed since the first look"


def test_trailing_padding_is_cut_but_not_a_zero_inside_or_under_the_mask(tmp_path: Path) -> None:
    ids = torch.tensor([0, 4, 0, 5, 0, 0, 0])
    for name, mask, kept in (("a", [0] * 7, 4), ("b", [0, 0, 0, 0, 1, 0, 0], 5), ("c", [0, 0, 0, 0, 0, 0, 1], 7)):
        record = {"input_ids": ids, "loss_mask": torch.tensor(mask), "hidden_states": torch.rand(1, 7, 6)}
        torch.save(record, tmp_path / f"{name}.ckpt")
        sample = open_specforge(tmp_path).open_sample(f"{name}.ckpt")
        assert sample.input_ids.tolist() == ids[:kept].tolist()
        assert sample.shape == (kept, 6)
        assert torch.equal(sample.load(), record["hidden_states"][0, :kept])
