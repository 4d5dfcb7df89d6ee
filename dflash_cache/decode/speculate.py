"""Speculative decoding, one prompt at a time: the drafter proposes a block, the target verifies it in one pass.

The target's choice at the first mismatch is committed too, so every pass yields at least one token, and the output is
what the target alone would have written (FIELD.md, "Inference"). The drafter reads the target's states of all
committed positions through its own keys and values, computed once a position.

Acceptance length: tokens that one target pass yields, the target's own counted; the prefill's token is not.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from dflash_cache.drafter.model import Drafter
from dflash_cache.target.load import Target, cache_argument


@dataclass(frozen=True)
class Decoded:
    """tokens: the answer's ids, up to a stop token or the limit; accepted: tokens yielded by each target pass.

    margins: at every token, how far the chosen logit lies above the second best; seconds: of the whole decoding.
    """

    tokens: list[int]
    accepted: list[int]
    margins: list[float]
    seconds: float


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
        """States (1, T, L, H) of the last pass's positions."""
        return torch.stack([self._by_layer[k] for k in self._layer_ids], dim=2)

    def _hook(self, layer: int) -> Any:
        def remember(module: torch.nn.Module, args: Any, output: Any) -> None:
            self._by_layer[layer] = output[0] if isinstance(output, tuple) else output

        return remember


class DraftContext:
    """The drafter's keys and values of all committed positions, in buffers that grow by doubling."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self.length = 0

    def extend(self, states_1TLH: Tensor) -> None:
        """Append T positions."""
        new = self._drafter.read_context(states_1TLH, self.length)
        end = self.length + states_1TLH.shape[1]
        if not self._buffers or end > self._buffers[0][0].shape[1]:
            self._grow(new, max(2 * end, 256))
        for (keys, values), (new_keys, new_values) in zip(self._buffers, new, strict=True):
            keys[:, self.length : end] = new_keys
            values[:, self.length : end] = new_values
        self.length = end

    def view(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (1, length, K, D) of each layer."""
        return [(keys[:, : self.length], values[:, : self.length]) for keys, values in self._buffers]

    def _grow(self, like: list[tuple[Tensor, Tensor]], room: int) -> None:
        grown = []
        for layer, pair in enumerate(like):
            parts = []
            for part, tensor in enumerate(pair):
                buffer = tensor.new_zeros(1, room, *tensor.shape[2:])
                if self._buffers:
                    buffer[:, : self.length] = self._buffers[layer][part][:, : self.length]
                parts.append(buffer)
            grown.append((parts[0], parts[1]))
        self._buffers = grown


@torch.inference_mode()
def decode_plainly(target: Target, prompt_ids: list[int], max_new_tokens: int, stop_ids: frozenset[int]) -> Decoded:
    """The target's own greedy answer, a token a pass."""
    started = time.perf_counter()
    cache = DynamicCache(config=target.model.config)
    tokens: list[int] = []
    margins: list[float] = []
    ids = torch.tensor([prompt_ids], device=target.device)
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in stop_ids):
        logits = run(target, ids, cache, 1)
        choices, gaps = choose(logits)
        tokens += choices
        margins += gaps
        ids = torch.tensor([choices], device=target.device)
    return Decoded(tokens, [1] * (len(tokens) - 1), margins, time.perf_counter() - started)


@torch.inference_mode()
def decode_speculatively(
    target: Target, drafter: Drafter, prompt_ids: list[int], max_new_tokens: int, stop_ids: frozenset[int]
) -> Decoded:
    """The same answer with the drafter's help; `drafter` is on the target's device, in its dtype."""
    started = time.perf_counter()
    cache = DynamicCache(config=target.model.config)
    cache.activate_past_recording()  # type: ignore[no-untyped-call]  # sliding windows and linear attention can take back what was not accepted
    context = DraftContext(drafter)
    accepted: list[int] = []
    with States(target, drafter.shape.target_layer_ids).listening() as states:
        ids = torch.tensor([prompt_ids], device=target.device)
        logits = run(target, ids, cache, 1)
        context.extend(states.take())
        tokens, margins = choose(logits)
        while len(tokens) < max_new_tokens and tokens[-1] not in stop_ids:
            num_slots = min(drafter.shape.block_size, max_new_tokens - len(tokens) + 1)
            drafts = draft_block(target, drafter, context, tokens[-1], num_slots)
            ids = torch.tensor([[tokens[-1], *drafts]], device=target.device)
            logits = run(target, ids, cache)
            choices, gaps = choose(logits)
            num_right = count_agreeing(drafts, choices)
            cache.crop(num_right - len(drafts))
            context.extend(states.take()[:, : num_right + 1])
            ends = (i for i, token in enumerate(choices[: num_right + 1]) if token in stop_ids)
            kept = min(1 + next(ends, num_right), max_new_tokens - len(tokens))
            tokens += choices[:kept]
            margins += gaps[:kept]
            accepted.append(kept)
    return Decoded(tokens, accepted, margins, time.perf_counter() - started)


def run(target: Target, ids_1T: Tensor, cache: DynamicCache, keep: int = 0) -> Tensor:
    """Logits (T, V) of the new positions, or of the last `keep` ones; their keys and values go into the cache."""
    output = target.model(ids_1T, use_cache=True, logits_to_keep=keep, **{cache_argument(target.model): cache})
    logits_TV: Tensor = output.logits[0]
    return logits_TV


def draft_block(
    target: Target, drafter: Drafter, context: DraftContext, anchor_token: int, num_slots: int
) -> list[int]:
    """Greedy drafts of the slots after the anchor, whose position is the context's length.

    A block has all its slots but near the end of an answer, where what cannot be used is not drafted (as z-lab does).
    """
    slots = torch.full((1, 1, num_slots), drafter.shape.mask_token_id, device=target.device)
    slots[..., 0] = anchor_token
    embedded_SABH = target.embed(slots)
    anchors_SA = torch.tensor([[context.length]], device=target.device)
    states_SABH = drafter(embedded_SABH, context.view(), anchors_SA)
    logits = target.read_logits(states_SABH[0, 0, 1:])
    drafts: list[int] = logits.argmax(-1).tolist()
    return drafts


def choose(logits_TV: Tensor) -> tuple[list[int], list[float]]:
    """Greedy tokens of T positions, and each one's lead over the second best. Synchronises the device."""
    best = logits_TV.float().topk(2, dim=-1)
    leads = best.values[:, 0] - best.values[:, 1]
    return best.indices[:, 0].tolist(), leads.tolist()


def count_agreeing(drafts: list[int], choices: list[int]) -> int:
    """Length of the longest prefix of `drafts` that the target chooses too."""
    count = 0
    while count < len(drafts) and drafts[count] == choices[count]:
        count += 1
    return count
