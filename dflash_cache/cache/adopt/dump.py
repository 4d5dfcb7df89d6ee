"""What a peer's dump is to us: named samples, each with tokens, a loss mask and states that are read when wanted.

Peers check little when they write and nothing when they read, and the usual fault of a dump is silent: states of
other layers, shorter than the tokens (prefix caching), of zeros (hybrid models), of another batch's order. So every
sample is held against what the target says before it enters a cache, and what does not fit is refused by name with
a reason that can be counted.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dflash_cache.cache.codec import TORCH_DTYPES
from dflash_cache.config.dtypes import Dtype
from dflash_cache.data.conversations import RecordError
from dflash_cache.data.templates import Tokens

_CHUNK_TOKENS = 64
_NAMES: dict[torch.dtype, Dtype] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class SampleError(RecordError):
    """One sample of a dump cannot be used: `source` is its name, `reason` what it is counted under."""

    def __init__(self, name: str, reason: str, detail: str = "") -> None:
        super().__init__(name, reason, detail, "dump it again, or let --max-bad-share leave out such samples")
        self.detail = detail


@dataclass(frozen=True)
class DumpedSample:
    """One sample as dumped: input_ids (T) and loss_mask (T), integers; states of `shape` and `dtype`, not yet read.

    `shape` is (T, layers, hidden) or (T, layers · hidden); `load` reads the states, in that shape, on the CPU.
    """

    input_ids: Tensor
    loss_mask: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]


class Dump(Protocol):
    """A folder of a peer's: `names` in the order of the samples, the same at every opening.

    `absent` are samples that the dump knows of but does not hold; `layer_ids` what it says of itself, in our numbers;
    `extra_last_layer`: states may end with the last layer's, besides those that were asked for.
    """

    @property
    def names(self) -> Sequence[str]: ...  # noqa: D102

    @property
    def absent(self) -> Sequence[str]: ...  # noqa: D102

    @property
    def layer_ids(self) -> tuple[int, ...] | None: ...  # noqa: D102

    @property
    def extra_last_layer(self) -> bool: ...  # noqa: D102

    def open_sample(self, name: str) -> DumpedSample:
        """The sample, its states unread. Raises SampleError if it cannot be read, DataError if no sample can be."""
        ...


@dataclass(frozen=True)
class Expected:
    """What the target says every sample must be; `extra_last_layer` as in `Dump`."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    extra_last_layer: bool = False


def check_sample(name: str, sample: DumpedSample, expected: Expected) -> Tokens:
    """The sample's ids (T) int32 and mask (T) bool. Raises SampleError on whatever can be seen without its states."""
    ids, mask = sample.input_ids, sample.loss_mask
    if ids.ndim != 1 or not len(ids) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise SampleError(name, "token ids that are no list of whole numbers", f"{ids.dtype}, {tuple(ids.shape)}")
    ids = ids.to(torch.int64)  # torch has no smallest and largest of uint16, uint32 and uint64
    if tuple(mask.shape) != tuple(ids.shape):
        raise SampleError(
            name, "a loss mask of another length than the tokens", f"shape {tuple(mask.shape)}, {len(ids)} tokens"
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise SampleError(name, "a loss mask with other numbers than 0 and 1")
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= expected.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise SampleError(
            name, "a token id outside the target's vocabulary", f"{wrong}, of {expected.vocab_size:,} ids"
        )
    _check_shape(name, sample, expected, len(ids))
    return Tokens(ids.numpy().astype(np.int32), mask.to(torch.bool).numpy())


def name_dtype(name: str, dtype: torch.dtype) -> Dtype:
    """The dtype as a manifest names it. Raises SampleError if a cache cannot hold it."""
    if dtype not in _NAMES:
        raise SampleError(name, f"states in a dtype that a cache does not hold ({', '.join(TORCH_DTYPES)})")
    return _NAMES[dtype]


def load_states(name: str, sample: DumpedSample, expected: Expected, length: int) -> Tensor:
    """States (length, L, H), contiguous, of the first `length` tokens. Raises SampleError if they cannot be right.

    A row (a token's states of one layer) must be finite and not all zero: no layer of a transformer puts out zeros,
    but a hole in a dump does.
    """
    states_TLH = sample.load().reshape(sample.shape[0], -1, expected.hidden_size)[:length, : expected.num_layers]
    # in chunks that stay in the processor's cache: 5 GB/s, against 0.4 for isfinite over the whole
    peak_TL = torch.cat([chunk.abs().amax(-1) for chunk in torch.split(states_TLH, _CHUNK_TOKENS)])
    if not bool(torch.isfinite(peak_TL).all()):
        raise SampleError(name, "states that are not finite", _first_place(~torch.isfinite(peak_TL)))
    if not bool(peak_TL.all()):
        raise SampleError(name, "states with rows of zeros", _first_place(peak_TL == 0))
    return states_TLH.contiguous()


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts names such that numbers in them count as numbers: data_2 before data_10."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part)


def _check_shape(name: str, sample: DumpedSample, expected: Expected, length: int) -> None:
    shape, hidden = sample.shape, expected.hidden_size
    if len(shape) not in (2, 3):
        raise SampleError(name, "states of no known shape", f"{shape}")
    if shape[0] != length:
        raise SampleError(
            name, "states of another length than the tokens", f"states of {shape[0]} tokens, {length} token ids"
        )
    width = int(np.prod(shape[1:]))
    allowed = [expected.num_layers * hidden] + [(expected.num_layers + 1) * hidden] * expected.extra_last_layer
    if width not in allowed or shape[-1] not in (hidden, width):
        raise SampleError(
            name,
            "states of another number of layers or hidden size",
            f"{' × '.join(map(str, shape[1:]))} numbers a token instead of {expected.num_layers} × {hidden}",
        )


def _first_place(wrong_TL: Tensor) -> str:
    token, layer = wrong_TL.nonzero()[0].tolist()
    return f"the first at token {token}, layer {layer} of those dumped"
