"""DFlash's training loss written plainly from its formulas (FIELD.md), to compare the real one with.

One sample at a time, all blocks in one sequence, a dense mask over [context | all blocks], full logits, autograd
through everything. It shares no code with `dflash_cache.drafter` but the tensors' names.
"""

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x (T, heads, D): pairs (i, i + D/2) turned by position · theta^(−2i/D)."""
    D = x.shape[-1]
    out = torch.empty_like(x)
    for i in range(D // 2):
        angle = positions.to(x.dtype) * theta ** (-2 * i / D)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        out[..., i] = x[..., i] * cos - x[..., i + D // 2] * sin
        out[..., i + D // 2] = x[..., i + D // 2] * cos + x[..., i] * sin
    return out


def sample_logits(
    w: dict[str, Tensor], shape, states_TLH: Tensor, ids_T: Tensor, anchors: list[int], embedding_VH: Tensor
) -> Tensor:
    """Logits (A, B, V) of all blocks of one sample, by dense attention over [context | all blocks]."""
    T, B, D, eps = len(ids_T), shape.block_size, shape.head_dim, shape.rms_norm_eps
    context = rms_norm(states_TLH.reshape(T, -1) @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    slot_ids = [int(ids_T[a]) if j == 0 else shape.mask_token_id for a in anchors for j in range(B)]
    slot_positions = torch.tensor([a + j for a in anchors for j in range(B)])
    slots = embedding_VH[torch.tensor(slot_ids)]
    Q = len(slot_ids)
    full = torch.zeros(Q, T + Q, dtype=torch.bool)
    for q in range(Q):
        full[q, : anchors[q // B]] = True
        full[q, T + q // B * B : T + (q // B + 1) * B] = True
    distance = slot_positions[:, None] - torch.cat([torch.arange(T), slot_positions])
    for n in range(shape.num_layers):
        slides = bool(shape.layer_types) and shape.layer_types[n] == "sliding_attention"
        allowed = full & (distance >= 0) & (distance < shape.sliding_window) if slides else full
        layer = {name.removeprefix(f"layers.{n}."): tensor for name, tensor in w.items() if f"layers.{n}." in name}
        normed = rms_norm(slots, layer["input_layernorm.weight"], eps)
        both = torch.cat([context, normed])
        query = (normed @ layer["self_attn.q_proj.weight"].T).view(Q, -1, D)
        key = (both @ layer["self_attn.k_proj.weight"].T).view(T + Q, -1, D)
        value = (both @ layer["self_attn.v_proj.weight"].T).view(T + Q, -1, D)
        query = rope(rms_norm(query, layer["self_attn.q_norm.weight"], eps), slot_positions, shape.rope_theta)
        key = rms_norm(key, layer["self_attn.k_norm.weight"], eps)
        key = rope(key, torch.cat([torch.arange(T), slot_positions]), shape.rope_theta)
        group = query.shape[1] // key.shape[1]
        heads = []
        for h in range(query.shape[1]):
            scores = query[:, h] @ key[:, h // group].T / math.sqrt(D)
            heads.append(scores.masked_fill(~allowed, -math.inf).softmax(-1) @ value[:, h // group])
        slots = slots + torch.cat(heads, -1) @ layer["self_attn.o_proj.weight"].T
        normed = rms_norm(slots, layer["post_attention_layernorm.weight"], eps)
        gate = normed @ layer["mlp.gate_proj.weight"].T
        up = normed @ layer["mlp.up_proj.weight"].T
        slots = slots + (gate * torch.sigmoid(gate) * up) @ layer["mlp.down_proj.weight"].T
    return rms_norm(slots, w["norm.weight"], eps).view(len(anchors), B, -1)


def block_terms(logits_BV: Tensor, ids: list[int], mask: list[bool], anchor: int) -> list[Tensor]:
    """Cross-entropies of a block's supervised slots 1…, up to the first unsupervised one."""
    terms = []
    for k in range(1, len(logits_BV)):
        if anchor + k >= len(ids) or not mask[anchor + k]:
            break
        terms.append(-torch.log_softmax(logits_BV[k], -1)[ids[anchor + k]])
    return terms


def weights(kind: str, ce: list[float], gamma: float, alpha: float) -> list[float]:
    """DESIGN.md's table, one block at a time; `ce` are the block's supervised slots."""
    p = [math.exp(-c) for c in ce]
    s = [(1 - alpha) * x + alpha for x in p]
    n = len(ce)
    if kind == "uniform":
        return [1.0] * n
    if kind == "decay":
        return [math.exp(-k / gamma) for k in range(n)]
    if kind == "streak":
        return [math.exp(-k / gamma) * math.prod(s[:k]) for k in range(n)]
    return [sum(math.prod(s[: m + 1]) for m in range(k, n)) for k in range(n)]
