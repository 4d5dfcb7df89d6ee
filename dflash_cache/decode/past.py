"""Taking back the last positions that a target's cache has read.

Attention's keys and values are cut; those of a sliding window and a convolution's inputs too, for their layers hold on
to what leaves the window until they are cut (`activate_past_recording` and `crop` of transformers). A recurrent state
(gated delta nets, state-space layers) has every token mixed into it, and nothing can be cut from it: it is kept as it
was at a mark, and the whole cache goes back to that mark. Kept are these states alone, never the keys that grow.
"""

from typing import Any

from torch import Tensor
from transformers import DynamicCache

from dflash_cache.errors import TargetError
from dflash_cache.target.load import Target

# By name, for not every version of transformers has them all.
ATTENTION = {"DynamicLayer", "RoomyLayer", "DynamicIndexedLayer", "DummyLayer"}  # no more is needed than to cut
RECORDING = {
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
}

States = dict[int, Tensor | None]  # of one layer, by number


def layer_kinds(target: Target) -> dict[str, type]:
    """The classes of the target's cache layers, by name."""
    cache = DynamicCache(config=target.model.config)
    kinds: set[Any] = {type(layer) for layer in cache.layers} or {cache.layer_class_to_replicate}
    return {kind.__name__: kind for kind in kinds if kind is not None}


def check_layers(target: Target) -> None:
    """Raise TargetError if a layer of the target is of a kind that nothing is known to be taken back from."""
    strange = [
        name
        for name, kind in sorted(layer_kinds(target).items())
        if name not in ATTENTION and not (name in RECORDING and hasattr(kind, "activate_past_recording"))
    ]
    if strange:
        raise TargetError(
            f"The target ({target.config.model_type}) has layers from whose cache this version cannot take back "
            f"rejected drafts ({', '.join(strange)}): use another target, or a newer transformers."
        )


class Past:
    """A cache that has read a prompt, and from here on can go back.

    Cost: a copy of the recurrent layers' states at each mark, and one at each return.
    """

    def __init__(self, cache: DynamicCache) -> None:
        layers: list[Any] = cache.layers
        self._recurrent = [layer for layer in layers if _is_recurrent(layer)]
        # Where all that a layer holds is kept at the mark, nothing is left to cut.
        self._cut_layers = [
            layer for layer in layers if not (_is_recurrent(layer) and type(layer).__name__ == "LinearAttentionLayer")
        ]
        self._recording = [layer for layer in self._cut_layers if type(layer).__name__ in RECORDING]
        for layer in self._recording:
            layer.activate_past_recording()
        self._marked: list[tuple[States, States]] = []
        self._mark()

    @property
    def can_cut(self) -> bool:
        """Whether any number of positions can be taken back, or only all since the mark."""
        return not self._recurrent

    def stay(self) -> None:
        """All that was read is right: the mark is here."""
        for layer in self._recording:
            layer.crop(0)  # drops what it no longer needs
        self._mark()

    def cut(self, count: int) -> None:
        """Take back the last `count` positions, where `can_cut`."""
        for layer in self._cut_layers:
            layer.crop(-count)

    def go_back(self, count: int) -> None:
        """Take back all `count` positions since the mark."""
        self.cut(count)
        for layer, (convolved, recurrent) in zip(self._recurrent, self._marked, strict=True):
            layer.conv_states, layer.recurrent_states = _copy(convolved), _copy(recurrent)

    def _mark(self) -> None:
        # Copies: layers write into their states.
        self._marked = [(_copy(layer.conv_states), _copy(layer.recurrent_states)) for layer in self._recurrent]


def _is_recurrent(layer: Any) -> bool:
    """Whether a layer that has read something holds a recurrent state."""
    return any(getattr(layer, "is_recurrent_states_initialized", {}).values())


def _copy(states: States) -> States:
    return {place: None if state is None else state.clone() for place, state in states.items()}
