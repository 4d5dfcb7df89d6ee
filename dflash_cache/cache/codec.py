"""How hidden states lie in a shard: as they are (`raw`), or in 8 or 4 bits a number; the one place that knows bytes.

The numbers of a token's layer are coded in groups of 64 neighbouring channels: the largest of a group is kept exactly,
the others are whole multiples, −127…127 or −7…7, of the group's scale, which is rounded up to bfloat16. So each is off
by half a scale at most (beside the dtype's own rounding). Hidden states need the exact numbers: a few channels are tens
of times as large as the rest, in all tokens, and thousands of times in the first. Measured on SmolLM2-135M (layers 1,
8, 14, 20, 27), the median relative error of a token's layer:

    bits a number    8, one scale a layer   8, groups of 64   8 here   4, groups of 64   4, groups of 32   4 here
    relative error   0.027…0.039            0.014             0.005    0.22              0.16              0.07…0.10

and for the first tokens, without their largest 2 % of channels, 0.23 with groups of 64 in 8 bits, 0.01 here. With a
hidden size of 64 · n a number takes 8.625 or 4.625 bits (bfloat16). A token's layer is one row of bytes: codes, scales,
the largest numbers, their places. So a sample stays one contiguous range, and no scale waits in the writer's memory;
rows do not lie on pages then, so direct I/O reads them as usual.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_cache.config.dtypes import Codec, Dtype
from dflash_cache.errors import ConfigError

TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_CODES: dict[Dtype, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_BITS: dict[Codec, int] = {"int8": 8, "int4": 4}
_GROUP = 64  # channels, at most
_LEAST_GROUP = 8  # a scale and an exact number for fewer would cost more than the codes save
_CHUNK_NUMBERS = 1 << 18  # coded at once: they stay in the processor's cache


@dataclass(frozen=True)
class StateFormat:
    """The bytes of states (T, L, H): `num_layers` L, `hidden_size` H, the dtype they have in memory, and the codec."""

    num_layers: int
    hidden_size: int
    dtype: Dtype
    codec: Codec = "raw"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in memory."""
        return TORCH_DTYPES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's states as stored."""
        return self.num_layers * self._row_bytes

    @property
    def unpacked_token_bytes(self) -> int:
        """Bytes of one token's states in memory."""
        return self.num_layers * self.hidden_size * self.torch_dtype.itemsize

    @property
    def stored_tensor(self) -> tuple[str, list[int]]:
        """safetensors' name of the stored dtype, and the shape of one token."""
        if self.codec == "raw":
            return _CODES[self.dtype], [self.num_layers, self.hidden_size]
        return "U8", [self.num_layers, self._row_bytes]

    def encode(self, states_TLH: Tensor) -> np.ndarray:
        """The bytes to be stored, flat; `raw` shares the memory of contiguous states on the CPU.

        Coded states must be finite. Synchronises a device that they lie on.
        """
        if self.codec == "raw":
            return as_bytes(states_TLH.detach().cpu().contiguous())
        T, L, H = states_TLH.shape
        rows = torch.empty(T, L, self._row_bytes, dtype=torch.uint8)
        for begin, end in self._chunks(T):
            self._encode_rows(states_TLH[begin:end].reshape(end - begin, L, H), rows[begin:end])
        return as_bytes(rows)

    def decode(self, stored: np.ndarray, states_TLH: Tensor) -> None:
        """Fill contiguous states from their coded bytes; releases the GIL. Not for `raw`, which has nothing to do."""
        T, L, _ = states_TLH.shape
        rows = torch.from_numpy(stored).view(T, L, self._row_bytes)
        for begin, end in self._chunks(T):
            self._decode_rows(rows[begin:end], states_TLH[begin:end])

    def code(self, states_TLH: Tensor) -> Tensor:
        """States as they come out of a shard, on the device of those that went in; `raw` gives them back."""
        if self.codec == "raw":
            return states_TLH
        found = torch.empty(states_TLH.shape, dtype=self.torch_dtype)
        self.decode(self.encode(states_TLH), found)
        return found.to(states_TLH.device)

    def _encode_rows(self, states_TLH: Tensor, rows: Tensor) -> None:
        T, L, H = states_TLH.shape
        own = states_TLH.view(T, L, -1, self._group)
        groups = own.to(torch.float32, copy=True)
        place = groups.abs().max(-1, keepdim=True).indices  # the first of equals
        groups.scatter_(-1, place, 0.0)
        scale = _round_up(groups.abs().amax(-1, keepdim=True) / self._largest_code)
        codes = groups.div_(torch.where(scale == 0, 1.0, scale.float())).round_()
        most = torch.finfo(self.torch_dtype).max
        if float(scale.max()) * self._largest_code > most:  # half a scale more must not become infinite
            limit = (most / scale.float()).floor_()
            codes = torch.minimum(torch.maximum(codes, -limit), limit)
        fields = (self._pack(codes.view(T, L, H).to(torch.int8)), scale, own.gather(-1, place), place.to(torch.uint8))
        for (begin, end), field in zip(self._fields, fields, strict=True):
            rows[..., begin:end] = field.contiguous().view(T, L, -1).view(torch.uint8)

    def _decode_rows(self, rows: Tensor, states_TLH: Tensor) -> None:
        T, L, H = states_TLH.shape
        codes, scale, largest, place = (
            rows[..., begin:end].clone(memory_format=torch.contiguous_format)  # a field may begin at any byte
            for begin, end in self._fields
        )
        self._unpack(codes.view(torch.int8), states_TLH)
        states_TLH.view(T, L, -1, self._group).mul_(scale.view(torch.bfloat16).unsqueeze(-1))
        # A flipped bit of a place, read unchecked, stays in its group.
        within = place.view(-1).bitwise_and_(self._group - 1).long()
        target = torch.arange(0, T * L * H, self._group).add_(within)
        states_TLH.view(-1).index_copy_(0, target, largest.view(self.torch_dtype).view(-1))

    def _pack(self, codes_TLH: Tensor) -> Tensor:
        """In 4 bits: the first half of the channels in the low nibbles, the second in the high ones."""
        if self._bits == 8:
            return codes_TLH
        low, high = codes_TLH.chunk(2, dim=-1)
        return (low & 15) | (high << 4)

    def _unpack(self, packed: Tensor, states_TLH: Tensor) -> None:
        if self._bits == 8:
            states_TLH.copy_(packed)
            return
        low, high = states_TLH.chunk(2, dim=-1)
        low.copy_((packed << 4) >> 4)  # the second shift brings the sign
        high.copy_(packed >> 4)

    def _chunks(self, num_tokens: int) -> list[tuple[int, int]]:
        step = max(1, _CHUNK_NUMBERS // (self.num_layers * self.hidden_size))
        return [(begin, min(begin + step, num_tokens)) for begin in range(0, num_tokens, step)]

    @property
    def _bits(self) -> int:
        return _BITS[self.codec]

    @property
    def _largest_code(self) -> int:
        return (1 << self._bits - 1) - 1

    @property
    def _group(self) -> int:
        return math.gcd(self.hidden_size, _GROUP)

    @property
    def _fields(self) -> list[tuple[int, int]]:
        """Begin and end in a row of codes, scales (bfloat16), largest numbers (the dtype) and their places (uint8)."""
        num_groups = self.hidden_size // self._group
        sizes = [self.hidden_size * self._bits // 8, *(num_groups * n for n in (2, self.torch_dtype.itemsize, 1))]
        ends = np.cumsum(sizes).tolist()
        return list(zip([0, *ends], ends, strict=False))

    @property
    def _row_bytes(self) -> int:
        return self.hidden_size * self.torch_dtype.itemsize if self.codec == "raw" else self._fields[-1][1]


def check_codec(codec: Codec, hidden_size: int) -> Codec:
    """The codec, if it can hold states of that size. Raises ConfigError if not."""
    if not is_codable(codec, hidden_size):
        raise ConfigError(
            f"generate.codec {codec} needs a hidden size that is a multiple of {_LEAST_GROUP}, the target's is "
            f"{hidden_size}: set generate.codec to none."
        )
    return codec


def is_codable(codec: Codec, hidden_size: int) -> bool:
    """Whether the codec can hold states of that size."""
    return codec == "raw" or math.gcd(hidden_size, _GROUP) >= _LEAST_GROUP


def as_bytes(tensor: Tensor) -> np.ndarray:
    """The bytes of a contiguous CPU tensor of any dtype as a flat uint8 array sharing its memory."""
    return tensor.view(-1).view(torch.uint8).numpy()


def _round_up(quantum: Tensor) -> Tensor:
    """The next bfloat16 that is not less; `quantum` float32, not negative."""
    nearest = quantum.bfloat16()
    return (nearest.view(torch.int16) + (nearest.float() < quantum).to(torch.int16)).view(torch.bfloat16)
