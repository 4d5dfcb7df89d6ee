import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_cache.cache.codec import TORCH_DTYPES, code_states
from dflash_cache.cache.index import commit_fragment, consolidate
from dflash_cache.cache.layout import Manifest, read_manifest, shard_name, shard_path, write_manifest
from dflash_cache.cache.reader import CacheReader
from dflash_cache.cache.shards import ShardWriter
from dflash_cache.cache.state_format import StateFormat
from dflash_cache.config.dtypes import Codec, Dtype
from dflash_cache.errors import CacheError

Sample = tuple[Tensor, Tensor, Tensor]
L, H = 2, 4
MANIFEST = Manifest(
    tool_version="0.1.0",
    target_model="models/smol",
    target_revision=None,
    target_fingerprint="aa",
    tokenizer_fingerprint="bb",
    template_fingerprint="cc",
    mask_rule="assistant turns",
    layer_ids=(1, 3),
    target_num_layers=5,
    hidden_size=H,
    vocab_size=100,
    dtype="bfloat16",
    bucket_bounds=(64,),
    max_length=64,
    data_fingerprint="dd",
    num_samples=7,
    order_seed=0,
)


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def make_sample(length: int, dtype: Dtype, seed: int) -> Sample:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(length, L, H, generator=random).to(TORCH_DTYPES[dtype])
    ids = torch.randint(1, 100, (length,), generator=random)
    return ids, torch.randint(0, 2, (length,), generator=random).bool(), hidden


def make_cache(cache_dir: Path, lengths: Sequence[int], dtype: Dtype = "bfloat16", per_shard: int = 3) -> list[Sample]:
    """A cache of samples 0, 10, 20, …, `per_shard` in each shard, its index one fragment a shard."""
    write_manifest(cache_dir, replace(MANIFEST, dtype=dtype))
    samples = [make_sample(length, dtype, seed) for seed, length in enumerate(lengths)]
    for shard, begin in enumerate(range(0, len(samples), per_shard)):
        part = samples[begin : begin + per_shard]
        with ShardWriter(shard_path(cache_dir, 0, shard), 0, StateFormat(L, H, dtype)) as writer:
            placed = [writer.append(*sample) for sample in part]
            writer.commit()
        rows = {
            "sample": [10 * (begin + i) for i in range(len(part))],
            "bucket": [0] * len(part),
            "shard": [shard_name(0, shard)] * len(part),
            "row": [row for row, _ in placed],
            "length": [len(ids) for ids, _, _ in part],
            "loss_tokens": [int(mask.sum()) for _, mask, _ in part],
            "checksum": pa.array([checksum for _, checksum in placed], pa.uint64()),
            "job": [shard] * len(part),
        }
        commit_fragment(cache_dir, pa.table(rows), str(shard))
    return samples


def assert_batch_equals(cache_dir: Path, samples: list[Sample], rows: list[int]) -> None:
    with CacheReader(cache_dir) as reader:
        batch = reader.read_batch(np.array(rows))
    T = max(len(samples[row][0]) for row in rows)
    assert batch.hidden_STLH.shape == (len(rows), T, L, H)
    assert batch.input_ids.shape == batch.loss_mask.shape == (len(rows), T)
    assert (batch.sample.dtype, batch.length.dtype, batch.input_ids.dtype) == (torch.int64,) * 3
    assert batch.loss_mask.dtype == torch.bool
    assert batch.sample.tolist() == [10 * row for row in rows]
    for s, row in enumerate(rows):
        ids, mask, hidden = samples[row]
        n = len(ids)
        assert batch.length[s] == n
        assert torch.equal(batch.input_ids[s, :n], ids)
        assert torch.equal(batch.loss_mask[s, :n], mask)
        assert batch.hidden_STLH.dtype == hidden.dtype
        assert torch.equal(batch.hidden_STLH[s, :n].view(torch.uint8), hidden.view(torch.uint8))
        padding = (batch.hidden_STLH[s, n:], batch.input_ids[s, n:], batch.loss_mask[s, n:])
        assert not any(part.any() for part in padding)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_batch_holds_the_written_bits_and_zeros_elsewhere(tmp_path: Path, dtype: Dtype) -> None:
    samples = make_cache(tmp_path, [5, 1, 17, 8, 3, 9, 2], dtype)
    assert_batch_equals(tmp_path, samples, [6, 2, 0, 3, 3, 1])
    consolidate(tmp_path)
    assert_batch_equals(tmp_path, samples, [1, 4])


@settings(max_examples=15)
@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=9), per_shard=st.integers(1, 4), data=st.data())
def test_any_rows_of_any_lengths_come_back(lengths: list[int], per_shard: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=12))
    with tempfile.TemporaryDirectory() as folder:
        samples = make_cache(Path(folder), lengths, per_shard=per_shard)
        assert_batch_equals(Path(folder), samples, rows)


def test_direct_reads_give_the_same_bits_whether_rows_lie_on_pages_or_not(tmp_path: Path) -> None:
    for name, hidden_size in (("pages", 1024), ("odd", 36)):
        cache_dir = tmp_path / name
        manifest = replace(MANIFEST, hidden_size=hidden_size)
        write_manifest(cache_dir, manifest)
        states = torch.randn(9, L, hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
        ids, mask = torch.arange(9), torch.ones(9, dtype=torch.bool)
        with ShardWriter(shard_path(cache_dir, 0, 0), 0, StateFormat(L, hidden_size, "bfloat16")) as writer:
            placed = [writer.append(ids[:n], mask[:n], states[:n]) for n in (9, 4, 7)]
            writer.commit()
        columns = {"sample": [0, 1, 2], "row": [0, 9, 13], "length": [9, 4, 7], "loss_tokens": [9, 4, 7]}
        constant = {"bucket": [0] * 3, "shard": [shard_name(0, 0)] * 3, "job": [0] * 3}
        checksums = pa.array([checksum for _, checksum in placed], pa.uint64())
        commit_fragment(cache_dir, pa.table({**columns, **constant, "checksum": checksums}), "a")
        with CacheReader(cache_dir, direct_io=True) as direct, CacheReader(cache_dir) as plain:
            for rows in ([2, 0, 1], [1], [1, 2]):
                found, expected = direct.read_batch(np.array(rows)), plain.read_batch(np.array(rows))
                assert all(
                    torch.equal(*pair) for pair in zip(vars(found).values(), vars(expected).values(), strict=True)
                )
            assert torch.equal(plain.read_batch(np.array([2])).hidden_STLH[0], states[:7])


def is_in_page_cache(path: Path, offset: int) -> bool:
    """Asks for one byte without waiting for the disk; the kernel then fetches it, so ask once."""
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False


@pytest.mark.parametrize(("codec", "hidden_size"), [("int8", 1024), ("int4", 1024), ("raw", 1000), ("raw", 1024)])
def test_direct_reads_leave_the_page_cache_alone_whatever_the_codec(
    tmp_path: Path, codec: Codec, hidden_size: int
) -> None:
    form = StateFormat(L, hidden_size, "bfloat16", codec)
    lengths = [800, 1, 1500, 701]
    write_manifest(tmp_path, replace(MANIFEST, hidden_size=hidden_size, codec=codec))
    path = shard_path(tmp_path, 0, 0)
    with ShardWriter(path, 0, form) as writer:
        states = torch.randn(1500, L, hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
        placed = [writer.append(torch.arange(n), torch.ones(n, dtype=torch.bool), states[:n]) for n in lengths]
        writer.commit()
    constant = {"bucket": [0] * 4, "shard": [shard_name(0, 0)] * 4, "job": [0] * 4, "sample": [0, 1, 2, 3]}
    columns = {"row": [row for row, _ in placed], "length": lengths, "loss_tokens": lengths}
    checksums = pa.array([checksum for _, checksum in placed], pa.uint64())
    commit_fragment(tmp_path, pa.table({**constant, **columns, "checksum": checksums}), "a")
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system knows no direct I/O")
    middle = 4096 + 1200 * form.token_bytes
    rows = np.array([2, 0, 3, 1])
    with CacheReader(tmp_path, direct_io=True) as direct, CacheReader(tmp_path) as plain:
        found = direct.read_batch(rows)
        assert not is_in_page_cache(path, middle)
        expected = plain.read_batch(rows)
        assert is_in_page_cache(path, middle)
    assert torch.equal(found.hidden_STLH.view(torch.uint8), expected.hidden_STLH.view(torch.uint8))
    assert torch.equal(found.hidden_STLH[0], code_states(form, states))


def test_the_readers_columns_are_those_of_the_index(tmp_path: Path) -> None:
    samples = make_cache(tmp_path, [5, 1, 17, 8])
    with CacheReader(tmp_path) as reader:
        assert reader.manifest == read_manifest(tmp_path)
        assert reader.index.sample.tolist() == [0, 10, 20, 30]
        assert reader.index.length.tolist() == [5, 1, 17, 8]
        assert reader.index.loss_tokens.tolist() == [int(mask.sum()) for _, mask, _ in samples]
        with pytest.raises(ValueError, match="read-only"):
            reader.index.length[0] = 3
        fingerprint = reader.fingerprint
    consolidate(tmp_path)
    assert CacheReader(tmp_path).fingerprint == fingerprint


@pytest.mark.parametrize("tensor", ["hidden", "ids", "mask"])
def test_one_flipped_bit_is_caught_with_shard_and_sample_named(tmp_path: Path, tensor: str) -> None:
    make_cache(tmp_path, [5, 4, 3])
    path = shard_path(tmp_path, 0, 0)
    # Of sample 10 (tokens 5 to 8 of 12): its last byte of each tensor.
    offset = {"hidden": 4096 + 9 * L * H * 2 - 1, "ids": 4096 + 12 * L * H * 2 + 9 * 4 - 1}.get(tensor, 0)
    offset = offset or 4096 + 12 * L * H * 2 + 12 * 4 + 9 - 1
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)
    with CacheReader(tmp_path) as reader:
        reader.read_batch(np.array([0, 2]))
        with pytest.raises(CacheError) as caught:
            reader.read_batch(np.array([0, 1, 2]))
    assert str(caught.value) == (
        f"Sample 10 cannot be read from shard bucket-0/shard-000000.safetensors of {tmp_path} "
        "(its checksum is not the index's): restore the shard from a copy, or run `dflash verify --full --repair` "
        "and then `dflash generate`, which redoes what is damaged."
    )
    with CacheReader(tmp_path, verify_checksums=False) as reader:
        reader.read_batch(np.array([0, 1, 2]))


@pytest.mark.parametrize("remaining", [0, 7, 4000, 4100, -1])
def test_a_truncated_shard_is_caught_with_shard_and_sample_named(tmp_path: Path, remaining: int) -> None:
    make_cache(tmp_path, [5, 4, 3, 2])
    path = shard_path(tmp_path, 0, 0)
    os.truncate(path, remaining if remaining >= 0 else path.stat().st_size - 1)
    with CacheReader(tmp_path, verify_checksums=False) as reader:
        reader.read_batch(np.array([3]))
        with pytest.raises(CacheError, match=r"Sample 20 cannot be read from shard bucket-0/shard-000000\.safetensors"):
            reader.read_batch(np.array([3, 2]))


def test_a_shard_cut_while_it_is_open_is_caught(tmp_path: Path) -> None:
    make_cache(tmp_path, [5, 4, 3])
    with CacheReader(tmp_path, verify_checksums=False) as reader:
        reader.read_batch(np.array([0]))
        os.truncate(shard_path(tmp_path, 0, 0), 4096 + 6 * L * H * 2)
        with pytest.raises(CacheError, match=r"Sample 10 .*the shard ends too early"):
            reader.read_batch(np.array([1]))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_cache(tmp_path, [5, 4, 3, 2])
    shard_path(tmp_path, 0, 1).unlink()
    with CacheReader(tmp_path) as reader, pytest.raises(CacheError, match=r"Sample 30 .*\(the shard is missing\)"):
        reader.read_batch(np.array([3]))


def test_a_shard_that_contradicts_manifest_or_index_is_refused(tmp_path: Path) -> None:
    make_cache(tmp_path, [5, 4, 3, 2])
    shard_path(tmp_path, 0, 1).replace(shard_path(tmp_path, 0, 0))
    with CacheReader(tmp_path) as reader, pytest.raises(CacheError, match="holds 2 tokens, the index points up to 5"):
        reader.read_batch(np.array([0]))
    write_manifest(tmp_path, replace(MANIFEST, hidden_size=H + 1))
    with CacheReader(tmp_path) as reader, pytest.raises(CacheError, match="the manifest says"):
        reader.read_batch(np.array([0]))


def test_an_absent_or_unfinished_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="There is no cache at"):
        CacheReader(tmp_path)
    write_manifest(tmp_path, MANIFEST)
    with pytest.raises(CacheError, match="holds no samples yet"):
        CacheReader(tmp_path)


def test_positions_outside_the_index_are_our_own_mistake(tmp_path: Path) -> None:
    make_cache(tmp_path, [5, 4])
    with CacheReader(tmp_path) as reader:
        for rows in ([], [-1], [2], [[0]]):
            with pytest.raises(IndexError):
                reader.read_batch(np.array(rows, dtype=np.int64))
    with pytest.raises(ValueError, match="the reader is closed"):
        reader.read_batch(np.array([0]))


def test_batches_padded_to_a_multiple_hold_the_same_and_zeros(tmp_path: Path) -> None:
    make_cache(tmp_path, [1 + i % 13 for i in range(40)], per_shard=2)
    with CacheReader(tmp_path) as reader, CacheReader(tmp_path, pad_to=8) as padding:
        for rows in (np.array([0]), np.array([3, 7, 5]), np.array([12, 25, 38])):
            for _ in range(2):  # the second time into memory that held the first
                one, other = reader.read_batch(rows), padding.read_batch(rows)
                T, padded = one.input_ids.shape[1], other.input_ids.shape[1]
                assert padded == -(-T // 8) * 8
                for name in ("input_ids", "loss_mask", "hidden_STLH"):
                    assert torch.equal(getattr(other, name)[:, :T], getattr(one, name))
                    assert not getattr(other, name)[:, T:].any()
                padding.read_batch(np.array([12, 12, 12]))


def test_threads_that_share_a_reader_get_the_same_bits_and_few_descriptors_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cache(tmp_path, [1 + i % 13 for i in range(40)], per_shard=2)
    random = np.random.default_rng(0)
    batches = [random.integers(0, 40, size=7) for _ in range(60)]
    before = count_descriptors()
    with CacheReader(tmp_path) as reader:
        expected = [reader.read_batch(rows) for rows in batches]
    monkeypatch.setattr("dflash_cache.cache.reader._MAX_OPEN_SHARDS", 3)
    with CacheReader(tmp_path) as reader, ThreadPoolExecutor(6) as threads:
        found = list(threads.map(reader.read_batch, batches * 4))
        assert count_descriptors() <= before + 3
    assert count_descriptors() == before
    for one, other in zip(expected * 4, found, strict=True):
        assert all(
            torch.equal(left, right) for left, right in zip(vars(one).values(), vars(other).values(), strict=True)
        )
