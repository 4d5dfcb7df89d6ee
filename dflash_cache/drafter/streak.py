"""How far a block's drafts are right: what greedy decoding would accept of it, where the answer is known.

Slot k counts only where all before it are right, so the head is read slot by slot, for the blocks that are still right:
about as many rows as tokens are accepted, instead of blocks × slots. A cap or a scale on the logits leaves the argmax
as it is (`head`), so there is one way for all heads.
"""

import torch
from torch import Tensor

from dflash_cache.drafter.anchors import Blocks
from dflash_cache.drafter.head import Head
from dflash_cache.drafter.pieces import count_parts, read_head


@torch.no_grad()
def count_streaks(states_SABH: Tensor, blocks: Blocks, head: Head) -> Tensor:
    """Of each block, how many drafts from its first slot on are the labels (S, A), int64; 0 without supervision.

    `states_SABH` are the drafter's normalised slots, all of a block. Synchronises the device once a slot.
    """
    states_NBH = states_SABH.flatten(0, 1)
    labels_NK, mask_NK = blocks.labels_SAK.flatten(0, 1), blocks.mask_SAK.flatten(0, 1)
    streak_N = torch.zeros(len(mask_NK), dtype=torch.int64, device=mask_NK.device)
    right_R = torch.arange(len(mask_NK), device=mask_NK.device)
    for k in range(mask_NK.shape[1]):
        asked_R = right_R[mask_NK[right_R, k]]
        if len(asked_R) == 0:
            break
        chosen = [
            read_head(head, states_NBH[part, k + 1], labels_NK[part, k], wants_mean=False).chosen_R
            for part in asked_R.tensor_split(count_parts(len(asked_R)))
        ]
        right_R = asked_R[torch.cat(chosen)]
        streak_N[right_R] = k + 1
    return streak_N.view(blocks.anchors_SA.shape)
