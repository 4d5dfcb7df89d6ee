"""What the drafter reads: the target's states of all committed positions, as the drafter's own keys and values.

They are computed once a position. Rows of a batch may be of different lengths: the position of a token in its row is
its place in the buffers, whatever the row began with, and what a pass computed beyond the committed tokens is
overwritten by the next one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dflash_cache.drafter.model import Drafter, KeysValues
from dflash_cache.target.load import Target


class States:
    """The chosen layers' outputs of the last forward pass, caught by hooks."""

    def __init__(self, target: Target, layer_ids: Sequence[int]) -> None:
        self._by_layer: dict[int, Tensor] = {}
        self._target, self._layer_ids = target, layer_ids

    @contextmanager
    def listening(self) -> Iterator["States"]:
        """Catch states while the block runs."""
        handles = [self._target.layers[k].register_forward_hook(self._hook(k)) for k in self._layer_ids]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def take(self) -> Tensor:
        """States (S, T, L, H) of the last pass's positions."""
        return torch.stack([self._by_layer[k] for k in self._layer_ids], dim=2)

    def _hook(self, layer: int) -> Any:
        def remember(module: torch.nn.Module, args: Any, output: Any) -> None:
            self._by_layer[layer] = output[0] if isinstance(output, tuple) else output

        return remember


class DraftContext:
    """The drafter's keys and values of all rows' committed positions, in buffers that grow by doubling."""

    def __init__(self, drafter: Drafter, num_rows: int) -> None:
        self._drafter = drafter
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self.lengths = [0] * num_rows

    def extend(self, states_STLH: Tensor, counts: Sequence[int], padding: Sequence[int] | None = None) -> None:
        """Append to each row the first `counts` of its T positions, or of those that follow its `padding`."""
        first = torch.tensor(self.lengths, device=states_STLH.device)[:, None]
        if padding is not None:
            first = first - torch.tensor(padding, device=states_STLH.device)[:, None]
        new = self._drafter.read_context(states_STLH, first)
        num_rows, num_new = states_STLH.shape[:2]
        room = max(self.lengths) + num_new + 1
        if not self._buffers or room > self._buffers[0][0].shape[1]:
            self._grow(new, max(2 * room, 256))
        # Padding goes where no row ever reads: to the buffers' last place, index −1.
        places_ST = (first + torch.arange(num_new, device=first.device)).clamp(min=-1)
        rows_S1 = torch.arange(num_rows, device=first.device)[:, None]
        for (keys, values), (new_keys, new_values, _) in zip(self._buffers, new, strict=True):
            keys[rows_S1, places_ST] = new_keys
            values[rows_S1, places_ST] = new_values
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def view(self, rows: Sequence[int] | None = None) -> list[KeysValues]:
        """Keys and values of each layer, up to the longest row's; with `rows`, a copy of these alone.

        Of a sliding layer no more than blocks behind the rows see: a draft's work does not grow with the text.
        """
        lengths = self.lengths if rows is None else [self.lengths[row] for row in rows]
        picked: Any = slice(None) if rows is None else list(rows)
        views = []
        for layer, (keys, values) in zip(self._drafter.layers, self._buffers, strict=True):
            window = layer.self_attn.window
            first = 0 if window is None else max(0, min(lengths) - window + 1)
            seen = slice(first, max(lengths))
            views.append(KeysValues(keys[picked, seen], values[picked, seen], first))
        return views

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self._buffers = [(keys[list(rows)], values[list(rows)]) for keys, values in self._buffers]
        self.lengths = [self.lengths[row] for row in rows]

    def _grow(self, like: list[KeysValues], room: int) -> None:
        grown = []
        for layer, (keys, values, _) in enumerate(like):
            parts = []
            for part, tensor in enumerate((keys, values)):
                buffer = tensor.new_zeros(tensor.shape[0], room, *tensor.shape[2:])
                if self._buffers:
                    old = self._buffers[layer][part]
                    buffer[:, : old.shape[1]] = old
                parts.append(buffer)
            grown.append((parts[0], parts[1]))
        self._buffers = grown
