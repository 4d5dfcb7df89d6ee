"""What the slots of draft blocks see: the one definition behind every way of attention.

Slot j of the block with anchor a stands at a + j. In a layer with full attention it sees the context's positions before
a, and all slots of its block. In a sliding layer with window W it sees what lies at most W − 1 positions before it:

    context:  p < a  and  a + j − p < W          block:  slots i ≤ j

So transformers, z-lab's package, SGLang and vLLM compute `sliding_attention`, which in their drafters is causal inside
the block unless a config says otherwise (z-lab's dflash 0.1.0, `model.py`; SGLang, `models/dflash.py` and
`speculative/dflash_utils.py`; vLLM, `models/qwen3_dflash.py`). A window is at least a block long, so it cuts the
context alone. speculators 0.9.0 (`models/dflash/attention.py`) differs at the far end when it trains: there every slot
sees the W positions before the anchor.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")


@dataclass(frozen=True)
class Sight:
    """What blocks at `anchors_SA` see in layers of one kind, whose context begins at position `first`.

    window: of a sliding layer, None where attention is full.
    """

    anchors_SA: Tensor
    window: int | None = None
    first: int = 0
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def hidden_context(self, num_slots: int, num_tokens: int) -> Tensor:
        """True where one of the blocks' first slots does not see one of the context's tokens (S, A, C, T).

        C is 1 where attention is full: all slots of a block see the same.
        """
        positions_T = self.first + torch.arange(num_tokens, device=self.anchors_SA.device)
        hidden_SACT = positions_T >= self.anchors_SA[..., None, None]
        if self.window is None:
            return hidden_SACT
        slots_SAC = self.anchors_SA[..., None] + torch.arange(num_slots, device=self.anchors_SA.device)
        return hidden_SACT | (positions_T <= slots_SAC[..., None] - self.window)

    def hidden_block(self, num_slots: int, block_size: int) -> Tensor | None:
        """True where one of the first slots does not see one of its block (C, B); None where it sees all."""
        if self.window is None:
            return None
        slots = torch.arange(block_size, device=self.anchors_SA.device)
        return slots > slots[:num_slots, None]

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` makes: at the first call with this key, then the same again, for all layers of a step."""
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found
