"""The target's side of decoding: prompts and blocks go in, logits come out, and what was not accepted is taken back.

One row is any target's: transformers' own cache takes back rejected positions, of sliding windows and of linear
attention too. Several rows go on at different paces. They are padded on the left to begin with; after each pass the
cache is cut to the row that went furthest, and what shorter rows did not accept stays as a hole that their mask hides.
Holes cost memory and time, but nothing is ever moved. A token's position is told, not counted in columns; so this is
right only where every layer attends to the whole text, by mask and position. Other targets are refused.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dflash_cache.errors import ConfigError
from dflash_cache.target.kv_cache import make_cache
from dflash_cache.target.load import Target, cache_argument


class Rows(Protocol):
    """The rows that still go on; `padding` counts what stands before each prompt."""

    padding: list[int]

    def read_prompts(self) -> Tensor:
        """Logits (S, 1, V) behind each prompt."""
        ...

    def read_blocks(self, blocks: list[list[int]]) -> Tensor:
        """Logits (S, T, V) behind every token of the rows' blocks, T the longest; past a row's end they say nothing."""
        ...

    def keep(self, counts: Sequence[int]) -> None:
        """Take back all but the first `counts` positions of each row's last block."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone, ascending."""
        ...


def open_rows(target: Target, prompts: list[list[int]], takes_back: bool) -> Rows:
    """Rows for these prompts; `takes_back`: positions may be rejected. Raises ConfigError as `check_batches` does."""
    if len(prompts) == 1:
        return OneRow(target, prompts[0], takes_back)
    check_batches(target)
    return PaddedRows(target, prompts)


def check_batches(target: Target) -> None:
    """Raise ConfigError if a layer of the target is of a kind that rows of different lengths cannot share."""
    cache = DynamicCache(config=target.model.config)
    kinds: set[type | None] = {type(layer) for layer in cache.layers}
    kinds = kinds or {cache.layer_class_to_replicate}
    if kinds != {DynamicLayer}:
        names = sorted(kind.__name__ for kind in kinds - {DynamicLayer} if kind is not None)
        raise ConfigError(
            f"eval.batch_size is more than 1, but the target ({target.config.model_type}) has layers that do not "
            f"attend to the whole text ({', '.join(names)}): set it to 1 for this target."
        )


class OneRow:
    """A prompt by itself, without mask or padding."""

    def __init__(self, target: Target, prompt: list[int], takes_back: bool) -> None:
        self.padding = [0]
        self._target, self._prompt, self._num_new = target, prompt, 0
        self._cache = DynamicCache(config=target.model.config)
        self._takes_back = takes_back
        self._cache_name = cache_argument(target.model)  # asked once: to inspect a signature takes a while
        if takes_back:
            self._cache.activate_past_recording()  # type: ignore[no-untyped-call]  # sliding windows and linear attention

    def read_prompts(self) -> Tensor:
        """Logits (1, 1, V)."""
        return self._forward(self._prompt, 1)

    def read_blocks(self, blocks: list[list[int]]) -> Tensor:
        """Logits (1, T, V)."""
        return self._forward(blocks[0], 0)

    def keep(self, counts: Sequence[int]) -> None:
        """Crop the cache; with nothing to remove too, for a recording cache sheds then what it no longer needs."""
        if self._takes_back:
            self._cache.crop(counts[0] - self._num_new)

    def select(self, rows: Sequence[int]) -> None:
        """There is but one."""

    def _forward(self, ids: list[int], num_logits: int) -> Tensor:
        self._num_new = len(ids)
        ids_1T = torch.tensor([ids], device=self._target.device)
        cache = {self._cache_name: self._cache}
        output = self._target.model(ids_1T, use_cache=True, logits_to_keep=num_logits, **cache)
        logits_1TV: Tensor = output.logits
        return logits_1TV


class PaddedRows:
    """Several prompts: `_mask_ST` says which columns of the cache are valid, `_lengths` how many of each row."""

    def __init__(self, target: Target, prompts: list[list[int]]) -> None:
        longest = max(map(len, prompts))
        self.padding = [longest - len(prompt) for prompt in prompts]
        self._target, self._prompts = target, prompts
        self._cache = make_cache(target.model.config)
        self._cache_name = cache_argument(target.model)
        self._lengths = torch.zeros(len(prompts), 1, dtype=torch.long, device=target.device)
        self._mask_ST = torch.zeros(len(prompts), 0, dtype=torch.long, device=target.device)
        self._num_new = 0

    def read_prompts(self) -> Tensor:
        """Logits (S, 1, V)."""
        ids = [[0] * pad + prompt for pad, prompt in zip(self.padding, self._prompts, strict=True)]
        mask_ST = [[0] * pad + [1] * len(prompt) for pad, prompt in zip(self.padding, self._prompts, strict=True)]
        self._mask_ST = torch.tensor(mask_ST, device=self._target.device)
        positions_ST = (self._mask_ST.cumsum(dim=-1) - 1).clamp(min=0)
        self._lengths = self._mask_ST.sum(dim=-1, keepdim=True)
        return self._forward(ids, positions_ST, 1)

    def read_blocks(self, blocks: list[list[int]]) -> Tensor:
        """Logits (S, T, V)."""
        width = max(map(len, blocks))
        ids = [[*block, *[0] * (width - len(block))] for block in blocks]
        self._mask_ST = torch.cat([self._mask_ST, self._mask_ST.new_ones(len(blocks), width)], dim=1)
        return self._forward(ids, self._lengths + torch.arange(width, device=self._lengths.device), 0)

    def keep(self, counts: Sequence[int]) -> None:
        """Cut to the row that goes furthest, and hide what the others did not accept."""
        furthest = max(counts)
        surplus = self._num_new - furthest
        self._cache.crop(-surplus)
        kept_S1 = torch.tensor(counts, device=self._lengths.device)[:, None]
        begin = self._mask_ST.shape[1] - self._num_new
        new_ST = (torch.arange(furthest, device=kept_S1.device) < kept_S1).long()
        self._mask_ST = torch.cat([self._mask_ST[:, :begin], new_ST], dim=1)
        self._lengths = self._lengths + kept_S1

    def select(self, rows: Sequence[int]) -> None:
        """Drop the other rows from the cache too."""
        picked = torch.tensor(rows, device=self._lengths.device)
        self._cache.batch_select_indices(picked)
        self._mask_ST, self._lengths = self._mask_ST[picked], self._lengths[picked]

    def _forward(self, ids: list[list[int]], positions_ST: Tensor, num_logits: int) -> Tensor:
        self._num_new = len(ids[0])
        output = self._target.model(
            input_ids=torch.tensor(ids, device=self._target.device),
            attention_mask=self._mask_ST,
            position_ids=positions_ST,
            use_cache=True,
            logits_to_keep=num_logits,
            **{self._cache_name: self._cache},
        )
        logits_STV: Tensor = output.logits
        return logits_STV
