"""A key-value cache for decoding a token at a time: new entries go into room made before.

Transformers' dynamic cache concatenates, which copies all keys and values of every layer for every token.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

ROOM = 64  # positions added at once: one copy in 64 tokens, for at most 63 unused positions


def make_cache(config: PretrainedConfig) -> DynamicCache:
    """A dynamic cache whose full-attention layers are roomy; layers of other kinds stay transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]  # type: ignore[no-untyped-call]
    if cache.layer_class_to_replicate is DynamicLayer:  # layers made at their first use
        cache.layer_class_to_replicate = RoomyLayer
    return cache


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers
    """Keys and values (S, K, T, D) as the first T positions of larger tensors."""

    _room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and return all keys and values."""
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        if self._room is None or self._room[0].shape[-2] < end or not self._is_in_room():
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self._room = self._make_room(key_states, begin, end), self._make_room(value_states, begin, end)
            if self.keys is not None and self.values is not None and begin:
                self._room[0][..., :begin, :] = self.keys
                self._room[1][..., :begin, :] = self.values
        keys, values = self._room
        keys[..., begin:end, :] = key_states
        values[..., begin:end, :] = value_states
        self.keys, self.values = keys[..., :end, :], values[..., :end, :]
        return self.keys, self.values

    def _is_in_room(self) -> bool:
        """Whether the present keys are the room's first positions still, and not a selection or a copy of them."""
        room = self._room
        return (
            room is not None
            and self.keys is not None
            and (self.keys.data_ptr() == room[0].data_ptr() and self.keys.shape[:-2] == room[0].shape[:-2])
        )

    @staticmethod
    def _make_room(states: Tensor, begin: int, end: int) -> Tensor:
        # The first tokens come all at once, and only later ones one at a time: then room pays.
        positions = end + (ROOM if begin else 0)
        return torch.empty(*states.shape[:-2], positions, states.shape[-1], dtype=states.dtype, device=states.device)
