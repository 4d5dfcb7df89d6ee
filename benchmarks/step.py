"""One training step of the drafter (forward and backward), ours against one written plainly, side by side.

The plain one does what peers do: a dense mask over [context | all blocks], logits of every slot kept until the
backward pass. Both run alternately in one process, so that the ratio survives a machine whose speed drifts.

    python benchmarks/step.py [--samples 4 --length 256 --anchors 40 --repeat 3]
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from dflash_cache.config.settings import ObjectiveSettings
from dflash_cache.drafter.anchors import Blocks, make_blocks, pad_anchors
from dflash_cache.drafter.attention import rotary_table, rotate
from dflash_cache.drafter.frozen import FrozenTarget
from dflash_cache.drafter.loss import block_loss
from dflash_cache.drafter.model import Drafter, DraftLayer
from dflash_cache.drafter.objective import weigh_slots
from dflash_cache.drafter.shape import DrafterShape

SMOLLM2 = DrafterShape(
    hidden_size=576, num_layers=3, num_attention_heads=9, num_key_value_heads=3, head_dim=64, intermediate_size=1536,
    rms_norm_eps=1e-5, rope_theta=100000.0, vocab_size=49152, max_position_embeddings=8192, block_size=8,
    mask_token_id=16, target_layer_ids=(1, 8, 14, 20, 27), target_num_layers=30,
)  # fmt: skip


def our_step(drafter: Drafter, frozen: FrozenTarget, states: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The step as training runs it, in float32."""
    slots = frozen.embed_blocks(blocks.tokens_SA, drafter.shape)
    out = drafter(slots, drafter.read_context(states), blocks.anchors_SA)
    loss = block_loss(out, blocks, frozen.head_VH, partial(weigh_slots, settings=ObjectiveSettings()))
    return loss.loss_sum / loss.weight_sum


def plain_step(drafter: Drafter, frozen: FrozenTarget, states: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The same loss with a dense mask and full logits."""
    S, T = states.shape[:2]
    A, B = blocks.anchors_SA.shape[1], drafter.shape.block_size
    context = drafter.hidden_norm(drafter.fc(states.flatten(-2)))
    slots = frozen.embed_blocks(blocks.tokens_SA, drafter.shape).flatten(1, 2)
    before = torch.arange(T) < blocks.anchors_SA[..., None]
    own = torch.eye(A, dtype=torch.bool).repeat_interleave(B, 0).repeat_interleave(B, 1).expand(S, -1, -1)
    mask = torch.cat([before.repeat_interleave(B, 1), own], dim=2)[:, None]
    slot_positions = (blocks.anchors_SA[..., None] + torch.arange(B)).flatten(1)
    positions = torch.cat([torch.arange(T).expand(S, -1), slot_positions], dim=1)
    for layer in drafter.layers:
        slots = _plain_layer(layer, slots, context, mask, positions, drafter.shape)
    logits = drafter.norm(slots).view(S, A, B, -1)[:, :, 1:] @ frozen.head_VH.T
    ce = F.cross_entropy(logits.flatten(0, 2), blocks.labels_SAK.flatten(), reduction="none").view_as(blocks.mask_SAK)
    weights = weigh_slots(ce.detach().flatten(0, 1), blocks.mask_SAK.flatten(0, 1), ObjectiveSettings())
    return (weights * ce.flatten(0, 1)).sum() / weights.sum()


def _plain_layer(
    layer: DraftLayer,
    slots: torch.Tensor,
    context: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    shape: DrafterShape,
) -> torch.Tensor:
    attention, D = layer.self_attn, shape.head_dim
    normed = layer.input_layernorm(slots)
    both = torch.cat([context, normed], dim=1)
    Q = slots.shape[1]
    table = rotary_table(positions, D, shape.rope_theta)
    query = rotate(attention.q_norm(attention.q_proj(normed).unflatten(-1, (-1, D))), tuple(t[:, -Q:] for t in table))
    key = rotate(attention.k_norm(attention.k_proj(both).unflatten(-1, (-1, D))), table)
    value = attention.v_proj(both).unflatten(-1, (-1, D))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    slots = slots + attention.o_proj(mixed.transpose(1, 2).flatten(2))
    return slots + layer.mlp(layer.post_attention_layernorm(slots))


def measure(step: Callable[..., torch.Tensor], drafter: Drafter, *inputs: object) -> tuple[float, torch.Tensor]:
    """Seconds of one forward and backward, and the gradient of `fc`."""
    drafter.zero_grad(set_to_none=True)
    started = time.perf_counter()
    step(drafter, *inputs).backward()
    gradient = drafter.fc.weight.grad
    assert gradient is not None
    return time.perf_counter() - started, gradient.clone()


def main() -> None:
    """Print one JSON object with both rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("samples", 4), ("length", 256), ("anchors", 40), ("repeat", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    S, T, A = arguments.samples, arguments.length, arguments.anchors
    drafter = Drafter(SMOLLM2)
    drafter.initialize(torch.Generator().manual_seed(0))
    table = torch.randn(SMOLLM2.vocab_size, SMOLLM2.hidden_size) * 0.1
    frozen = FrozenTarget(table, table, 1.0)
    states = torch.randn(S, T, 5, SMOLLM2.hidden_size)
    ids = torch.randint(0, SMOLLM2.vocab_size, (S, T))
    anchors = [torch.randperm(T - 9)[:A].sort().values.numpy() for _ in range(S)]
    blocks = make_blocks(ids, torch.ones(S, T, dtype=torch.bool), pad_anchors(anchors), SMOLLM2.block_size)
    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(arguments.repeat + 1):  # the first round warms up
        found = {}
        for name, step in (("ours", our_step), ("plain", plain_step)):
            took, found[name] = measure(step, drafter, frozen, states, blocks)
            seconds[name].append(took)
        torch.testing.assert_close(found["ours"], found["plain"], rtol=1e-3, atol=1e-5)
    best = {name: min(times[1:]) for name, times in seconds.items()}
    rates = {name: S * A / took for name, took in best.items()}
    print(json.dumps({"blocks_per_second": rates, "over_plain": rates["ours"] / rates["plain"]}))


if __name__ == "__main__":
    main()
