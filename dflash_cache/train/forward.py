"""The drafter's forward pass in training, as one module, and the loss at its end.

One module, because what shards a drafter's weights has to know when a pass begins and when its backward has ended
(`sharding`), and the drafter has two ways in: the context's and the blocks'.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from dflash_cache.config.settings import ObjectiveSettings
from dflash_cache.drafter.anchors import Blocks, make_blocks
from dflash_cache.drafter.chunk import Extra, SoftLabels
from dflash_cache.drafter.frozen import FrozenTarget
from dflash_cache.drafter.loss import BlockLoss, block_loss
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.objective import weigh_slots
from dflash_cache.drafter.streak import count_streaks
from dflash_cache.train.stream import MicroBatch


@contextmanager
def shared_casts() -> Iterator[None]:
    """In the block autocast's copies of the weights serve all passes with gradients; no weight may change meanwhile.

    Autocast forgets them when the outermost of its blocks ends, so this counts as one, but casts nothing by itself.
    A pass without gradients would leave copies without them: it has to stay outside.
    """
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


class DraftPass(nn.Module):
    """Context and blocks of a micro-batch through the drafter."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(
        self, states_STLH: Tensor, slots_SABH: Tensor, anchors_SA: Tensor, max_slots: int | None = None
    ) -> Tensor:
        """Normalised slot states (S, A, B, H), or the first of each block (see `Drafter`)."""
        context = self.drafter.read_context(states_STLH, anchors_SA=anchors_SA)
        out: Tensor = self.drafter(slots_SABH, context, anchors_SA, max_slots)
        return out


def draft_loss(
    draft: DraftPass,
    frozen: FrozenTarget,
    micro_batch: MicroBatch,
    objective: ObjectiveSettings,
    cap_weight: float = 0.0,
) -> BlockLoss:
    """The summed, weighted loss of a placed micro-batch's blocks; matrix products in the frozen head's dtype."""
    blocks, states_SABH = _draft_blocks(draft, frozen, micro_batch, micro_batch.anchors_SA, objective.max_slots)
    weigh = partial(weigh_slots, settings=objective)
    soft = None
    if objective.distill > 0:
        assert frozen.teacher is not None
        assert micro_batch.last_STH is not None
        soft = SoftLabels(micro_batch.last_STH, frozen.teacher, objective.distill)
    return block_loss(states_SABH, blocks, frozen.head, weigh, objective.max_slots, Extra(cap_weight, soft))


@torch.no_grad()
def draft_streaks(draft: DraftPass, frozen: FrozenTarget, micro_batch: MicroBatch, anchors_SA: Tensor) -> Tensor:
    """How many drafts are right in a row (S, A) of the placed micro-batch's blocks at these anchors, padded with −1."""
    blocks, states_SABH = _draft_blocks(draft, frozen, micro_batch, anchors_SA)
    return count_streaks(states_SABH, blocks, frozen.head)


def _draft_blocks(
    draft: DraftPass, frozen: FrozenTarget, micro_batch: MicroBatch, anchors_SA: Tensor, max_slots: int | None = None
) -> tuple[Blocks, Tensor]:
    """The blocks at these anchors, and the drafter's states of their slots."""
    dtype, batch, shape = frozen.dtype, micro_batch.batch, draft.drafter.shape
    blocks = make_blocks(batch.input_ids, batch.loss_mask, anchors_SA, shape.block_size)
    with torch.autocast(frozen.device.type, dtype, enabled=dtype != torch.float32):
        slots_SABH = frozen.embed_blocks(blocks.tokens_SA, shape)
        return blocks, draft(batch.hidden_STLH, slots_SABH, blocks.anchors_SA, max_slots)
