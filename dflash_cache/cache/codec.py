"""Hidden states coded in 8 or 4 bits a number, or left as they are (`raw`).

The numbers of a token's layer are coded in groups of 64 neighbouring channels: the largest of a group is kept exactly,
the others are whole multiples, −127…127 or −7…7, of the group's scale, which is rounded up to bfloat16. So each is off
by half a scale at most (beside the dtype's own rounding). Hidden states need the exact numbers: a few channels are tens
of times as large as the rest, in all tokens, and thousands of times in the first. Measured on SmolLM2-135M (layers 1,
8, 14, 20, 27), the median relative error of a token's layer:

    bits a number    8, one scale a layer   8, groups of 64   8 here   4, groups of 64   4, groups of 32   4 here
    relative error   0.027…0.039            0.014             0.005    0.22              0.16              0.07…0.10

and for the first tokens, without their largest 2 % of channels, 0.23 with groups of 64 in 8 bits, 0.01 here. With a
hidden size of 64 · n a number takes 8.625 or 4.625 bits (bfloat16). A token's layer is one row of bytes: codes, scales,
the largest numbers, their places. So a sample stays one contiguous range, and no scale waits in the writer's memory.
"""

import numpy as np
import torch
from torch import Tensor

from dflash_cache.cache.state_format import StateFormat
from dflash_cache.config.dtypes import Dtype

TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_CHUNK_NUMBERS = 1 << 18  # coded at once: they stay in the processor's cache


def encode_states(form: StateFormat, states_TLH: Tensor) -> np.ndarray:
    """The bytes to be stored, flat; `raw` shares the memory of contiguous states on the CPU.

    Coded states must be finite. Synchronises a device that they lie on.
    """
    states_TLH = states_TLH.detach().cpu().contiguous()
    if form.codec == "raw":
        return as_bytes(states_TLH)
    T, L, _ = states_TLH.shape
    rows = torch.empty(T, L, form.row_bytes, dtype=torch.uint8)
    for begin, end in _cut(form, T):
        _encode_rows(form, states_TLH[begin:end], rows[begin:end])
    return as_bytes(rows)


def decode_states(form: StateFormat, stored: np.ndarray, states_TLH: Tensor) -> None:
    """Fill contiguous states from their coded bytes; releases the GIL. Not for `raw`, which has nothing to do."""
    T, L, _ = states_TLH.shape
    rows = torch.from_numpy(stored).view(T, L, form.row_bytes)
    for begin, end in _cut(form, T):
        _decode_rows(form, rows[begin:end], states_TLH[begin:end])


def code_states(form: StateFormat, states_TLH: Tensor) -> Tensor:
    """States as they come out of a shard, on the device of those that went in; `raw` gives them back."""
    if form.codec == "raw":
        return states_TLH
    found = torch.empty(states_TLH.shape, dtype=TORCH_DTYPES[form.dtype])
    decode_states(form, encode_states(form, states_TLH), found)
    return found.to(states_TLH.device)


def as_bytes(tensor: Tensor) -> np.ndarray:
    """The bytes of a contiguous CPU tensor of any dtype as a flat uint8 array sharing its memory."""
    return tensor.view(-1).view(torch.uint8).numpy()


def _encode_rows(form: StateFormat, states_TLH: Tensor, rows: Tensor) -> None:
    T, L, H = states_TLH.shape
    own = states_TLH.view(T, L, -1, form.group)
    groups = own.to(torch.float32, copy=True)
    place = groups.abs().max(-1, keepdim=True).indices  # the first of equals
    groups.scatter_(-1, place, 0.0)
    scale = _round_up(groups.abs().amax(-1, keepdim=True) / form.largest_code)
    codes = groups.div_(torch.where(scale == 0, 1.0, scale.float())).round_()
    most = torch.finfo(own.dtype).max
    if float(scale.max()) * form.largest_code > most:  # half a scale more must not become infinite
        limit = (most / scale.float()).floor_()
        codes = torch.minimum(torch.maximum(codes, -limit), limit)
    packed = _pack(form, codes.view(T, L, H).to(torch.int8))
    fields = (packed, scale, own.gather(-1, place), place.to(torch.uint8))
    for (begin, end), field in zip(form.fields, fields, strict=True):
        rows[..., begin:end] = field.contiguous().view(T, L, -1).view(torch.uint8)


def _decode_rows(form: StateFormat, rows: Tensor, states_TLH: Tensor) -> None:
    T, L, H = states_TLH.shape
    codes, scale, largest, place = (
        rows[..., begin:end].clone(memory_format=torch.contiguous_format)  # a field may begin at any byte
        for begin, end in form.fields
    )
    _unpack(form, codes.view(torch.int8), states_TLH)
    states_TLH.view(T, L, -1, form.group).mul_(scale.view(torch.bfloat16).unsqueeze(-1))
    # A flipped bit of a place, read unchecked, stays in its group.
    within = place.view(-1).bitwise_and_(form.group - 1).long()
    target = torch.arange(0, T * L * H, form.group).add_(within)
    states_TLH.view(-1).index_copy_(0, target, largest.view(states_TLH.dtype).view(-1))


def _pack(form: StateFormat, codes_TLH: Tensor) -> Tensor:
    """In 4 bits: the first half of the channels in the low nibbles, the second in the high ones."""
    if form.bits == 8:
        return codes_TLH
    low, high = codes_TLH.chunk(2, dim=-1)
    return (low & 15) | (high << 4)


def _unpack(form: StateFormat, packed: Tensor, states_TLH: Tensor) -> None:
    if form.bits == 8:
        states_TLH.copy_(packed)
        return
    low, high = states_TLH.chunk(2, dim=-1)
    low.copy_((packed << 4) >> 4)  # the second shift brings the sign
    high.copy_(packed >> 4)


def _cut(form: StateFormat, num_tokens: int) -> list[tuple[int, int]]:
    step = max(1, _CHUNK_NUMBERS // (form.num_layers * form.hidden_size))
    return [(begin, min(begin + step, num_tokens)) for begin in range(0, num_tokens, step)]


def _round_up(quantum: Tensor) -> Tensor:
    """The next bfloat16 that is not less; `quantum` float32, not negative."""
    nearest = quantum.bfloat16()
    return (nearest.view(torch.int16) + (nearest.float() < quantum).to(torch.int16)).view(torch.bfloat16)
