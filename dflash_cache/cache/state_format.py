"""How many bytes hidden states take, in a shard and in memory, and where each lies in a row; the one place that knows.

What the codecs mean and cost is told in `codec`, which codes. This module needs no torch: who only counts is quick.
"""

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

from dflash_cache.config.dtypes import Codec, Dtype
from dflash_cache.errors import ConfigError

_ITEM_BYTES: dict[Dtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
_NAMES: dict[Dtype, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # in safetensors' headers
_BITS: dict[Codec, int] = {"int8": 8, "int4": 4}
_GROUP = 64  # channels, at most
_LEAST_GROUP = 8  # a scale and an exact number for fewer would cost more than the codes save
_SCALE_BYTES, _PLACE_BYTES = 2, 1


@dataclass(frozen=True)
class StateFormat:
    """The bytes of states (T, L, H): `num_layers` L, `hidden_size` H, the dtype they have in memory, and the codec."""

    num_layers: int
    hidden_size: int
    dtype: Dtype
    codec: Codec = "raw"

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's states as stored."""
        return self.num_layers * self.row_bytes

    @property
    def unpacked_token_bytes(self) -> int:
        """Bytes of one token's states in memory."""
        return self.num_layers * self.hidden_size * _ITEM_BYTES[self.dtype]

    @property
    def stored_tensor(self) -> tuple[str, list[int]]:
        """safetensors' name of the stored dtype, and the shape of one token."""
        if self.codec == "raw":
            return _NAMES[self.dtype], [self.num_layers, self.hidden_size]
        return "U8", [self.num_layers, self.row_bytes]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's layer as stored."""
        return self.hidden_size * _ITEM_BYTES[self.dtype] if self.codec == "raw" else self.fields[-1][1]

    @property
    def fields(self) -> list[tuple[int, int]]:
        """Begin and end, in a coded row, of codes, scales (bfloat16), largest numbers (dtype), their places (uint8)."""
        num_groups = self.hidden_size // self.group
        sizes = (_SCALE_BYTES, _ITEM_BYTES[self.dtype], _PLACE_BYTES)
        codes_bytes = self.hidden_size * self.bits // 8
        return list(pairwise(accumulate([0, codes_bytes, *(num_groups * size for size in sizes)])))

    @property
    def bits(self) -> int:
        """Of one code."""
        return _BITS[self.codec]

    @property
    def largest_code(self) -> int:
        """Codes lie between minus this and this."""
        return (1 << self.bits - 1) - 1

    @property
    def group(self) -> int:
        """Channels of one scale, a power of two."""
        return math.gcd(self.hidden_size, _GROUP)


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
