"""The DFlash drafter: a few Qwen3 decoder layers that draft a whole block at once from the target's states.

    context = hidden_norm(fc(captured states of all layers, side by side))      once, shared by all layers
    layer:    queries from the block's slots; keys and values from [context ; block], same projections
    logits  = target's head (norm(slots)); slot k of a block with anchor a predicts the token at a + k

The context does not pass through a layer's input norm, queries, output projection or MLP. Training and
decoding run the same code: training with many anchors a sample, decoding with one (FIELD.md, "The drafter";
paper, section 4.1). Parameter names are those of z-lab's published drafters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dflash_cache.drafter.attention import Way, attend_blocks
from dflash_cache.drafter.gate import gate
from dflash_cache.drafter.norm import RMSNorm
from dflash_cache.drafter.rope import rope_table, rotate
from dflash_cache.drafter.shape import DrafterShape
from dflash_cache.drafter.sight import Sight
from dflash_cache.drafter.trained_for import TrainedFor

_WHOLE = 64  # a context's ends lie on multiples of so many tokens: few shapes for kernels that are built for each


class KeysValues(NamedTuple):
    """Keys and values (S, T, K, D) of one layer's context, whose first token stands at `first`."""

    keys: Tensor
    values: Tensor
    first: int = 0


@dataclass(frozen=True)
class Place:
    """Where blocks stand: their anchors, the rotary table of their slots; and the way their attention is computed."""

    anchors_SA: Tensor
    table: tuple[Tensor, Tensor]
    way: Way
    _sights: dict[tuple[int | None, int], Sight] = field(default_factory=dict)

    def sight_of(self, window: int | None, first: int) -> Sight:
        """What they see in a layer with this window, of a context that begins at `first`: one for all such layers."""
        return self._sights.setdefault((window, first), Sight(self.anchors_SA, window, first))

    def table_of(self, count: int) -> tuple[Tensor, Tensor]:
        """That of each block's first `count` slots."""
        cos, sin = self.table
        return cos[..., :count, :], sin[..., :count, :]


class DraftAttention(nn.Module):
    """Grouped-query attention with RMS norm per head on queries and keys, then rope."""

    def __init__(self, shape: DrafterShape, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.head_dim = shape.head_dim
        self.num_kv_heads = shape.num_key_value_heads
        query_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def keys_values(self, states: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and plain values (…, K, D) of states (…, H), context and block alike."""
        heads = (*states.shape[:-1], self.num_kv_heads, self.head_dim)
        keys = rotate(self.k_norm(self.k_proj(states).view(heads)), table)
        values: Tensor = self.v_proj(states).view(heads)
        return keys.to(values.dtype), values

    def forward(self, slots_SABH: Tensor, context: KeysValues, place: "Place", count: int) -> Tensor:
        """Attention output (S, A, C, H) of the block's first `count` slots, which see all of them."""
        S, A = slots_SABH.shape[:2]
        block = self.keys_values(slots_SABH, place.table)
        query = self.q_proj(slots_SABH[:, :, :count]).view(S, A, count, -1, self.head_dim)
        query = rotate(self.q_norm(query), place.table_of(count)).to(block[0].dtype)
        query = query.view(S, A, count, self.num_kv_heads, -1, self.head_dim)
        sight = place.sight_of(self.window, context.first)
        mixed = attend_blocks(query, (context.keys, context.values), block, sight, place.way)
        out: Tensor = self.o_proj(mixed.reshape(S, A, count, -1))
        return out


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """down(silu(gate) · up)."""
        gated = gate(self.gate_proj(states), self.up_proj(states))
        out: Tensor = self.down_proj(gated)
        return out


class DraftLayer(nn.Module):
    """One pre-norm decoder layer over the block's slots."""

    def __init__(self, shape: DrafterShape, window: int | None) -> None:
        super().__init__()
        self.self_attn = DraftAttention(shape, window)
        self.mlp = DraftMLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, slots_SABH: Tensor, context: KeysValues, place: "Place", count: int) -> Tensor:
        """The states of the block's first `count` slots after this layer."""
        attended = self.self_attn(self.input_layernorm(slots_SABH), context, place, count)
        slots_SACH = slots_SABH[:, :, :count] + attended
        out: Tensor = slots_SACH + self.mlp(self.post_attention_layernorm(slots_SACH))
        return out


class Drafter(nn.Module):
    """The trainable part: no embedding and no head, both are the target's and frozen (see `frozen`).

    trained_for: its target, where that is recorded; attention: the way it is computed; recomputes: whether a layer
    keeps its inputs alone for the backward pass, and is computed a second time there.
    """

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.attention: Way = "auto"
        self.recomputes = False
        self.trained_for: TrainedFor | None = None
        self.shape = shape
        num_captured = len(shape.target_layer_ids)
        self.fc = nn.Linear(num_captured * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers: Sequence[DraftLayer] = nn.ModuleList(  # type: ignore[assignment]  # it is one, by duck
            [DraftLayer(shape, shape.window_of(number)) for number in range(shape.num_layers)]
        )
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def initialize(self, generator: torch.Generator) -> None:
        """Normal(0, initializer_range) matrices and unit norms, as transformers initialises Qwen3."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=self.shape.initializer_range, generator=generator)
            else:
                nn.init.ones_(parameter)

    def read_context(
        self, states_STLH: Tensor, first_position: int | Tensor = 0, anchors_SA: Tensor | None = None
    ) -> list[KeysValues]:
        """Keys and values of the context in every layer.

        `states_STLH` are the captured states of T consecutive positions, the first at `first_position`, which may
        be each sample's own (S, 1). With `anchors_SA`, and states from position 0 on, nothing is computed for tokens
        that are before or behind all that the blocks at these anchors see in a layer.
        """
        T = states_STLH.shape[1]
        spans = [(0, T)] * len(self.layers) if anchors_SA is None else self._find_seen(anchors_SA, T)
        begin, end = min(begin for begin, _ in spans), max(end for _, end in spans)
        context = self.hidden_norm(self.fc(states_STLH[:, begin:end].flatten(-2)))
        positions = first_position + torch.arange(begin, end, device=context.device)
        table = rope_table(positions, self.shape.head_dim, self.shape.rope_theta, self.shape.rope_scaling)
        layers = []
        for layer, (first, _) in zip(self.layers, spans, strict=True):
            own_table = (table[0][..., first - begin :, :], table[1][..., first - begin :, :])
            layers.append(KeysValues(*layer.self_attn.keys_values(context[:, first - begin :], own_table), first))
        return layers

    def _find_seen(self, anchors_SA: Tensor, num_tokens: int) -> list[tuple[int, int]]:
        """Begin and end of what any block sees in each layer, widened to whole pieces, at least one."""
        earliest, latest = torch.stack(  # a block at 0, as padding is, sees nothing; on a GPU this waits for it
            [anchors_SA.where(anchors_SA > 0, num_tokens).min(), anchors_SA.max()]
        ).tolist()
        end = min(num_tokens, max(1, -(-latest // _WHOLE)) * _WHOLE)
        begins = []
        for layer in self.layers:
            window = layer.self_attn.window
            begin = 0 if window is None else min(max(0, earliest - window + 1), end - 1)
            begins.append(begin // _WHOLE * _WHOLE)
        return [(begin, end) for begin in begins]

    def forward(
        self, embedded_SABH: Tensor, context: list[KeysValues], anchors_SA: Tensor, max_slots: int | None = None
    ) -> Tensor:
        """Normalised slot states (S, A, B, H), ready for the target's head.

        `embedded_SABH` are the embeddings of [anchor's token, mask, …]; a block sees the context positions
        before its anchor (`anchors_SA`, positions in the sample), and slot j stands at anchor + j. With `max_slots`
        only the anchor's and that many further slots come out: the last layer computes no others.
        """
        num_slots = embedded_SABH.shape[2]
        last = num_slots if max_slots is None else min(num_slots, max_slots + 1)
        offsets = torch.arange(embedded_SABH.shape[2], device=anchors_SA.device)
        positions = anchors_SA[..., None] + offsets
        table = rope_table(positions, self.shape.head_dim, self.shape.rope_theta, self.shape.rope_scaling)
        place = Place(anchors_SA, table, self.attention)
        slots = embedded_SABH
        for number, (layer, keys_values) in enumerate(zip(self.layers, context, strict=True), 1):
            inputs = (slots, keys_values, place, last if number == len(context) else num_slots)
            if self.recomputes and torch.is_grad_enabled():
                slots = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)  # nothing is random
            else:
                slots = layer(*inputs)
        out: Tensor = self.norm(slots)
        return out
