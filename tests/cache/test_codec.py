import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from torch import Tensor

from dflash_cache.cache.codec import TORCH_DTYPES, code_states, decode_states, encode_states
from dflash_cache.cache.shards import ShardWriter
from dflash_cache.cache.state_format import StateFormat, check_codec
from dflash_cache.config.dtypes import Codec, Dtype
from dflash_cache.config.settings import GenerateSettings
from dflash_cache.errors import ConfigError

LARGEST_CODE: dict[Codec, int] = {"int8": 127, "int4": 7}
CODECS = st.sampled_from(sorted(LARGEST_CODE))
DTYPES = st.sampled_from(sorted(TORCH_DTYPES))
OWN_ROUNDING: dict[Dtype, float] = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-24}  # half a unit, relative


def make_states(T: int, L: int, H: int, dtype: Dtype, seed: int) -> Tensor:
    """Like a language model's: a few channels, and the whole first token, are very much larger."""
    random = torch.Generator().manual_seed(seed)
    states = torch.randn(T, L, H, generator=random)
    states[:, :, torch.randint(0, H, (2,), generator=random)] *= 50
    states[0] *= 300
    return states.to(TORCH_DTYPES[dtype])


def read_bfloat16(stored: np.ndarray) -> np.ndarray:
    return (stored.view("<u2").astype(np.uint32) << 16).view(np.float32)


def round_up_to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """Cut off the low half of each float32, and add one to the high half if that made it less."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    high = (bits >> 16) + ((bits & 0xFFFF) != 0)
    return high.astype("<u2")


def encode_plainly(states: np.ndarray, codec: Codec) -> np.ndarray:
    """One token's layer (H) float32 after another, group by group: the second implementation, for float32."""
    H, most = states.shape[-1], LARGEST_CODE[codec]
    size = math.gcd(H, 64)
    rows = []
    for row in states.reshape(-1, H):
        codes, scales, largest, places = np.zeros(H, np.int8), [], [], []
        for begin in range(0, H, size):
            group = row[begin : begin + size]
            place = int(np.argmax(np.abs(group)))
            others = group.copy()
            others[place] = 0
            scale = round_up_to_bfloat16(np.array([np.abs(others).max() / np.float32(most)], np.float32))
            if scale[0]:
                codes[begin : begin + size] = np.rint(others / read_bfloat16(scale))
            scales.append(scale.view(np.uint8))
            largest.append(group[place : place + 1].view(np.uint8))
            places.append(place)
        if codec == "int4":
            codes = (codes[: H // 2] & 15) | (codes[H // 2 :] << 4)
        rows += [codes.view(np.uint8), *scales, *largest, np.array(places, np.uint8)]
    return np.concatenate(rows)


def decode_plainly(rows: np.ndarray, H: int, codec: Codec) -> np.ndarray:
    """(N, H) float32 from rows (N, bytes) of a cache in bfloat16, not yet rounded to bfloat16."""
    size = math.gcd(H, 64)
    N, G = len(rows), H // size
    width = H if codec == "int8" else H // 2
    codes = rows[:, :width].view(np.int8).astype(np.int32)
    if codec == "int4":
        codes = np.concatenate([((codes & 15) ^ 8) - 8, codes >> 4], axis=1)
    scales, largest = (
        read_bfloat16(np.ascontiguousarray(rows[:, begin : begin + 2 * G])) for begin in (width, width + 2 * G)
    )
    found = codes.reshape(N, G, size).astype(np.float32) * scales[..., None]
    np.put_along_axis(found, rows[:, width + 4 * G :].astype(np.int64)[..., None], largest[..., None], axis=2)
    return found.reshape(N, H)


@settings(max_examples=60)
@given(
    codec=CODECS,
    dtype=DTYPES,
    shape=st.tuples(st.integers(1, 9), st.integers(1, 3), st.sampled_from([8, 24, 32, 64, 192, 576])),
    exponent=st.integers(-40, 30),
    seed=st.integers(0, 99),
)
def test_each_number_is_off_by_half_a_scale_and_the_largest_of_each_group_not_at_all(
    codec: Codec, dtype: Dtype, shape: tuple[int, int, int], exponent: int, seed: int
) -> None:
    T, L, H = shape
    states = (make_states(T, L, H, "float32", seed) * 2.0**exponent).to(TORCH_DTYPES[dtype])
    states = states.clamp(-torch.finfo(states.dtype).max / 2, torch.finfo(states.dtype).max / 2)
    found = code_states(StateFormat(L, H, dtype, codec), states)
    size = math.gcd(H, 64)
    own, coded = (tensor.double().view(T, L, -1, size) for tensor in (states, found))
    by_size = own.abs().sort(-1).values
    # a scale is the second largest over 127 or 7, rounded up to eight bits (or to the least number that bfloat16 has)
    scale = by_size[..., -2:-1] / LARGEST_CODE[codec] * (1 + 2**-7) + 2.0**-133
    rounding = (
        coded.abs() * OWN_ROUNDING[dtype] + float(torch.finfo(states.dtype).smallest_normal) * OWN_ROUNDING[dtype]
    )
    assert bool(((coded - own).abs() <= scale / 2 + rounding).all())
    place = own.abs().argmax(-1, keepdim=True)
    assert torch.equal(coded.gather(-1, place), own.gather(-1, place))


@settings(max_examples=25)
@given(codec=CODECS, T=st.integers(1, 5), H=st.sampled_from([8, 32, 64, 192]), seed=st.integers(0, 99))
def test_the_stored_bytes_are_those_of_a_plain_implementation(codec: Codec, T: int, H: int, seed: int) -> None:
    states = make_states(T, 2, H, "float32", seed)
    assert np.array_equal(
        encode_states(StateFormat(2, H, "float32", codec), states), encode_plainly(states.numpy(), codec)
    )


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_shard_opened_by_safetensors_is_decoded_by_plain_numpy(tmp_path: Path, codec: Codec) -> None:
    states = StateFormat(3, 576, "bfloat16", codec)
    samples = [make_states(length, 3, 576, "bfloat16", length) for length in (5, 1, 300)]
    with ShardWriter(tmp_path / "shard", 0, states) as writer:
        for sample in samples:
            writer.append(torch.arange(len(sample)), torch.ones(len(sample), dtype=torch.bool), sample)
        expected_bytes = writer.num_bytes
        writer.commit()
    rows = load_file(tmp_path / "shard")["hidden_states"]
    assert rows.shape == (306, 3, 9 * (64 + 5) if codec == "int8" else 9 * (32 + 5))
    assert (tmp_path / "shard").stat().st_size == expected_bytes == 4096 + 306 * (states.token_bytes + 5)
    plain = torch.from_numpy(decode_plainly(rows.reshape(306 * 3, -1), 576, codec)).bfloat16().view(306, 3, 576)
    assert torch.equal(plain, torch.cat([code_states(states, sample) for sample in samples]))


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_zeros_stay_zeros_and_a_lone_number_stays(codec: Codec) -> None:
    states = torch.zeros(2, 1, 128)
    states[1, 0, 70] = -3.7
    assert torch.equal(code_states(StateFormat(1, 128, "float32", codec), states), states)


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_the_dtypes_largest_numbers_stay_finite(codec: Codec, dtype: Dtype) -> None:
    most = torch.finfo(TORCH_DTYPES[dtype]).max
    states = (most * torch.linspace(-1, 1, 64, dtype=torch.float64)).to(TORCH_DTYPES[dtype]).view(1, 1, 64)
    found = code_states(StateFormat(1, 64, dtype, codec), states).double()
    assert bool(found.isfinite().all())
    assert float((found - states.double()).abs().max()) <= 1.01 * most / LARGEST_CODE[codec]


def test_long_samples_are_coded_like_their_parts() -> None:
    states = StateFormat(2, 64, "bfloat16", "int4")
    sample = make_states(5000, 2, 64, "bfloat16", 0)
    parts = [encode_states(states, part) for part in sample.split([1, 2999, 2000])]
    assert np.array_equal(encode_states(states, sample), np.concatenate(parts))


def test_a_flipped_place_changes_only_its_own_group() -> None:
    states = StateFormat(1, 128, "bfloat16", "int8")
    sample = make_states(1, 1, 128, "bfloat16", 0)
    stored = encode_states(states, sample).copy()
    stored[-1] ^= 0xC0  # the place in the second group
    found = torch.empty_like(sample)
    decode_states(states, stored, found)
    assert torch.equal(found, code_states(states, sample))


@pytest.mark.parametrize(("codec", "bits"), [("int8", 8.625), ("int4", 4.625), ("raw", 16)])
def test_a_number_takes_the_bits_that_the_codec_promises(codec: Codec, bits: float) -> None:
    assert StateFormat(5, 4096, "bfloat16", codec).token_bytes == 5 * 4096 * bits / 8


def test_a_hidden_size_that_cannot_be_cut_into_groups_is_refused() -> None:
    assert check_codec("int4", 24) == "int4"
    assert check_codec("raw", 7) == "raw"
    with pytest.raises(ConfigError) as caught:
        check_codec("int4", 28)
    assert str(caught.value) == (
        "generate.codec int4 needs a hidden size that is a multiple of 8, the target's is 28: set generate.codec to "
        "none."
    )


def test_none_is_the_configurations_word_for_raw() -> None:
    assert [GenerateSettings(codec=name).codec for name in ("none", None, "int8")] == ["raw", "raw", "int8"]
