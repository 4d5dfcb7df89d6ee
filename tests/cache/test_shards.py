import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from xxhash import xxh3_64

from dflash_cache.cache.codec import TORCH_DTYPES
from dflash_cache.cache.shards import ShardWriter, encode_header, read_layout
from dflash_cache.cache.state_format import StateFormat
from dflash_cache.config.dtypes import Dtype
from dflash_cache.errors import CacheError

KILLED_BEFORE_THE_RENAME = """
import os, sys
from pathlib import Path
import torch
from dflash_cache.cache.state_format import StateFormat
from dflash_cache.cache.shards import ShardWriter
with ShardWriter(Path(sys.argv[1]), 0, StateFormat(2, 4, "float32")) as writer:
    writer.append(torch.arange(3), torch.ones(3, dtype=torch.bool), torch.zeros(3, 2, 4))
    os.replace = os.rename = lambda *_: os._exit(9)
    writer.commit()
"""
Sample = tuple[Tensor, Tensor, Tensor]


def make_sample(length: int, num_layers: int, hidden_size: int, dtype: Dtype, seed: int) -> Sample:
    """Random bits, so NaNs with payloads and infinities too."""
    random = torch.Generator().manual_seed(seed)
    hidden_bytes = num_layers * hidden_size * TORCH_DTYPES[dtype].itemsize
    bits = torch.randint(0, 256, (length, hidden_bytes), dtype=torch.uint8, generator=random)
    hidden = bits.view(TORCH_DTYPES[dtype]).view(length, num_layers, hidden_size)
    ids = torch.randint(0, 2**31 - 1, (length,), generator=random)
    return ids, torch.randint(0, 2, (length,), generator=random).bool(), hidden


def bits_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_shard_opened_by_safetensors_holds_the_same_bits(tmp_path: Path, dtype: Dtype) -> None:
    path = tmp_path / "bucket-3" / "shard.safetensors"
    samples = [make_sample(length, 3, 8, dtype, length) for length in (5, 1, 9)]
    with ShardWriter(path, 3, StateFormat(3, 8, dtype)) as writer:
        placed = [writer.append(*sample) for sample in samples]
        expected_bytes = writer.num_bytes
        writer.commit()
    tensors = load_file(path)
    assert tensors["hidden_states"].dtype == TORCH_DTYPES[dtype]
    assert bits_of(tensors["hidden_states"]) == b"".join(bits_of(hidden) for _, _, hidden in samples)
    assert torch.equal(tensors["input_ids"], torch.cat([ids for ids, _, _ in samples]).int())
    assert torch.equal(tensors["loss_mask"], torch.cat([mask for _, mask, _ in samples]).to(torch.uint8))
    assert [row for row, _ in placed] == [0, 5, 6]
    for (ids, mask, hidden), (_, checksum) in zip(samples, placed, strict=True):
        stored = bits_of(hidden) + bits_of(ids.int()) + bits_of(mask.to(torch.uint8))
        assert checksum == xxh3_64(stored).intdigest()
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "dflash-cache", "version": "1", "bucket": "3"}
    assert path.stat().st_size == expected_bytes


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    num_layers=st.integers(1, 3),
    hidden_size=st.integers(1, 9),
    dtype=st.sampled_from(sorted(TORCH_DTYPES)),
)
def test_samples_lie_contiguously_from_byte_4096(
    lengths: list[int], num_layers: int, hidden_size: int, dtype: Dtype
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.safetensors"
        samples = [make_sample(length, num_layers, hidden_size, dtype, seed) for seed, length in enumerate(lengths)]
        with ShardWriter(path, 0, StateFormat(num_layers, hidden_size, dtype)) as writer:
            rows = [writer.append(*sample)[0] for sample in samples]
            writer.commit()
        data, stored = path.read_bytes(), load_file(path)["hidden_states"]
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    assert 8 + header_bytes == 4096
    assert list(header) == ["__metadata__", "hidden_states", "input_ids", "loss_mask"]
    token_bytes = num_layers * hidden_size * TORCH_DTYPES[dtype].itemsize
    for row, (ids, _, hidden) in zip(rows, samples, strict=True):
        begin = 4096 + row * token_bytes
        assert data[begin : begin + len(ids) * token_bytes] == bits_of(hidden)
        assert bits_of(stored[row : row + len(ids)]) == bits_of(hidden)


def test_a_part_of_a_padded_batch_is_stored_like_its_copy(tmp_path: Path) -> None:
    batch = torch.randn(2, 6, 3, 4)
    ids, mask = torch.arange(12).view(2, 6), torch.ones(2, 6, dtype=torch.uint8)
    checksums = []
    for name, part in (("view", batch[1, 1:5]), ("copy", batch[1, 1:5].clone()), ("strided", batch[1, 1:5])):
        hidden = part.transpose(0, 1).contiguous().transpose(0, 1) if name == "strided" else part
        with ShardWriter(tmp_path / name, 0, StateFormat(3, 4, "float32")) as writer:
            checksums.append(writer.append(ids[1, 1:5], mask[1, 1:5], hidden)[1])
            writer.commit()
    assert len(set(checksums)) == 1
    assert len({(tmp_path / name).read_bytes() for name in ("view", "copy", "strided")}) == 1


@pytest.mark.parametrize("fail", [True, False])
def test_an_abandoned_writer_leaves_nothing(tmp_path: Path, fail: bool) -> None:
    def write() -> None:
        with ShardWriter(tmp_path / "shard", 0, StateFormat(2, 4, "float32")) as writer:
            writer.append(*make_sample(3, 2, 4, "float32", 0))
            if fail:
                raise RuntimeError("the target fell over")

    if fail:
        with pytest.raises(RuntimeError, match="the target fell over"):
            write()
    else:
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_process_killed_between_write_and_rename_leaves_no_visible_shard(tmp_path: Path) -> None:
    path = tmp_path / "shard-000000.safetensors"
    done = subprocess.run([sys.executable, "-c", KILLED_BEFORE_THE_RENAME, str(path)], check=False)
    assert done.returncode == 9
    assert not path.exists()
    assert list(tmp_path.glob("*.safetensors")) == []
    assert len(list(tmp_path.iterdir())) == 1


def test_a_sample_of_another_shape_or_dtype_is_our_own_mistake(tmp_path: Path) -> None:
    ids, mask, hidden = make_sample(3, 2, 4, "float32", 0)
    with ShardWriter(tmp_path / "shard", 0, StateFormat(2, 4, "float32")) as writer:
        for wrong in ((ids[1:], mask, hidden), (ids, mask, hidden[:, :1]), (ids[:0], mask[:0], hidden[:0])):
            with pytest.raises(ValueError, match="shapes"):
                writer.append(*wrong)
        with pytest.raises(ValueError, match=r"torch\.float16, the shard holds float32"):
            writer.append(ids, mask, hidden.half())
        with pytest.raises(ValueError, match="without samples"):
            writer.commit()


def test_a_header_that_does_not_fit_is_refused() -> None:
    assert len(encode_header({"input_ids": ("I32", [3])}, {"format": "x" * 3000})) == 4096
    with pytest.raises(CacheError, match="must fit into 4,088"):
        encode_header({"input_ids": ("I32", [3])}, {"format": "x" * 4096})


def test_a_foreign_or_cut_file_is_no_shard(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    with ShardWriter(path, 0, StateFormat(2, 4, "float32")) as writer:
        writer.append(*make_sample(3, 2, 4, "float32", 0))
        writer.commit()
    whole = path.read_bytes()
    swapped = whole.replace(b'"input_ids"', b'"INPUT_IDS"')
    shifted = whole.replace(b'"shape":[3,2,4]', b'"shape":[3,4,4]')
    cases = [(b"", "begin"), (whole[:-1], "4,206 bytes"), (swapped, "damaged"), (shifted, "not a shard's")]
    for content, words in cases:
        path.write_bytes(content)
        descriptor = os.open(path, os.O_RDONLY)
        with pytest.raises(ValueError, match=words):
            read_layout(descriptor)
        os.close(descriptor)


def test_a_shard_cut_back_is_the_shard_without_what_was_cut(tmp_path: Path) -> None:
    samples = [make_sample(length, 2, 4, "float32", length) for length in (3, 5, 2, 4)]
    with ShardWriter(tmp_path / "cut", 0, StateFormat(2, 4, "float32")) as writer:
        for sample in samples[:3]:
            writer.append(*sample)
        writer.cut(3)
        writer.append(*samples[3])
        writer.commit()
    with ShardWriter(tmp_path / "plain", 0, StateFormat(2, 4, "float32")) as writer:
        for sample in (samples[0], samples[3]):
            writer.append(*sample)
        writer.commit()
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "plain").read_bytes()
