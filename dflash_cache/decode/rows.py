"""The target's side of decoding: prompts and blocks go in, logits come out, and what was not accepted is taken back.

One row is any target's whose cache `past` knows how to take back. Where that is not position by position, as with
recurrent layers, the cache goes back to before the block, and the accepted tokens are read again in front of the next
one: a pass over a few tokens more costs less than a pass more, until they are too many (`WIDEST`).

Several rows go on at different paces. They are padded on the left to begin with; after each pass the cache is cut to
the row that went furthest, and what shorter rows did not accept stays as a hole that their mask hides. Holes cost
memory and time, but nothing is ever moved. A token's position is told, not counted in columns; so this is right only
where every layer attends to the whole text, by mask and position. A sliding window is counted in columns: there
shorter rows are moved to the right instead, so that all end alike and padding stays on the left. Other targets are
refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from dflash_cache.decode.past import Past, check_layers, layer_kinds
from dflash_cache.errors import ConfigError
from dflash_cache.target.kv_cache import make_cache
from dflash_cache.target.load import Target, cache_argument

# Tokens of a pass up to which what is to be read again goes in front of the next block. Recurrent layers compute in
# chunks of 64, so that up to there a pass costs little more.
WIDEST = 64
SLIDING = "DynamicSlidingWindowLayer"


@dataclass
class Reread:
    """What taking back cost the target: tokens that it read once more, and passes that read nothing else."""

    tokens: int = 0
    passes: int = 0


class Rows(Protocol):
    """The rows that still go on.

    `lead` counts what stood before each row's prompt or block in the last pass: padding, or tokens read again.
    """

    lead: list[int]
    reread: Reread

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
    """Rows for these prompts; `takes_back`: positions may be rejected. Raises as `check_layers`, `check_batches`."""
    if takes_back or len(prompts) > 1:
        check_layers(target)
    if len(prompts) == 1:
        return OneRow(target, prompts[0], takes_back)
    check_batches(target)
    return PaddedRows(target, prompts)


def check_batches(target: Target) -> None:
    """Raise ConfigError if a layer of the target is of a kind that rows of different lengths cannot share."""
    others = sorted(layer_kinds(target).keys() - {"DynamicLayer", SLIDING})
    text_config = target.model.config.get_text_config(decoder=True)
    if others or getattr(text_config, "attention_chunk_size", None) is not None:  # chunks begin at columns, not tokens
        raise ConfigError(
            f"eval.batch_size is more than 1, but the target ({target.config.model_type}) has layers that rows of "
            f"different lengths cannot share ({', '.join(others) or 'chunked attention'}): set it to 1 for this target."
        )


class OneRow:
    """A prompt by itself, without mask or padding.

    `_again` are committed tokens that the recurrent layers have yet to read: those since the cache's mark.
    """

    def __init__(self, target: Target, prompt: list[int], takes_back: bool) -> None:
        self.lead, self.reread = [0], Reread()
        self._target, self._prompt, self._takes_back = target, prompt, takes_back
        self._cache = DynamicCache(config=target.model.config)
        self._cache_name = cache_argument(target.model)  # asked once: to inspect a signature takes a while
        self._past: Past | None = None
        self._block: list[int] = []
        self._again: list[int] = []
        self._length = 0  # of what the cache holds

    def read_prompts(self) -> Tensor:
        """Logits (1, 1, V)."""
        logits_1TV = self._forward(self._prompt, 1)
        self._past = Past(self._cache) if self._takes_back else None
        return logits_1TV

    def read_blocks(self, blocks: list[list[int]]) -> Tensor:
        """Logits (1, T, V)."""
        self._block = blocks[0]
        if self._again and len(self._again) + len(self._block) > WIDEST:
            self._catch_up()
        self.lead = [len(self._again)]
        self.reread.tokens += len(self._again)
        return self._forward([*self._again, *self._block], len(self._block))

    def keep(self, counts: Sequence[int]) -> None:
        """Cut the cache, or go back to before the block and what was read again with it."""
        if self._past is None:
            return
        rejected = len(self._block) - counts[0]
        if not rejected:
            self._again = []
            self._past.stay()
        elif self._past.can_cut:
            self._past.cut(rejected)
            self._length -= rejected
        else:
            num_read = len(self._again) + len(self._block)
            self._past.go_back(num_read)
            self._length -= num_read
            self._again = [*self._again, *self._block[: counts[0]]]

    def select(self, rows: Sequence[int]) -> None:
        """There is but one."""

    def _catch_up(self) -> None:
        """Read what is to be read again in a pass of its own."""
        assert self._past is not None  # there is nothing to be read again without
        self._forward(self._again, 1)
        self._past.stay()
        self.reread.passes += 1
        self.reread.tokens += len(self._again)
        self._again = []

    def _forward(self, ids: list[int], num_logits: int) -> Tensor:
        begin, self._length = self._length, self._length + len(ids)
        output = self._target.model(
            input_ids=torch.tensor([ids], device=self._target.device),
            # Told, for there are models (Bamba) that count from 0 in every pass.
            position_ids=torch.arange(begin, self._length, device=self._target.device)[None],
            use_cache=True,
            logits_to_keep=num_logits,
            **{self._cache_name: self._cache},
        )
        logits_1TV: Tensor = output.logits
        return logits_1TV


class PaddedRows:
    """Several prompts: `_mask_ST` says which columns of the cache are valid, `_lengths` how many of each row.

    `_aligns`: rows are moved to end alike, at the cost of a copy of all keys and values, rather than left with holes.
    """

    def __init__(self, target: Target, prompts: list[list[int]]) -> None:
        longest = max(map(len, prompts))
        self.lead, self.reread = [longest - len(prompt) for prompt in prompts], Reread()
        self._target, self._prompts = target, prompts
        self._aligns = SLIDING in layer_kinds(target)
        # Room for keys to come would be made anew after every move.
        self._cache = (DynamicCache if self._aligns else make_cache)(config=target.model.config)
        self._cache_name = cache_argument(target.model)
        self._lengths = torch.zeros(len(prompts), 1, dtype=torch.long, device=target.device)
        self._mask_ST = torch.zeros(len(prompts), 0, dtype=torch.long, device=target.device)
        self._num_new = 0

    def read_prompts(self) -> Tensor:
        """Logits (S, 1, V)."""
        ids = [[0] * pad + prompt for pad, prompt in zip(self.lead, self._prompts, strict=True)]
        mask_ST = [[0] * pad + [1] * len(prompt) for pad, prompt in zip(self.lead, self._prompts, strict=True)]
        self._mask_ST = torch.tensor(mask_ST, device=self._target.device)
        positions_ST = (self._mask_ST.cumsum(dim=-1) - 1).clamp(min=0)
        self._lengths = self._mask_ST.sum(dim=-1, keepdim=True)
        logits_S1V = self._forward(ids, positions_ST, 1)
        if self._aligns:
            self._cache.activate_past_recording()  # type: ignore[no-untyped-call]  # earlier it would keep whole prompts
        return logits_S1V

    def read_blocks(self, blocks: list[list[int]]) -> Tensor:
        """Logits (S, T, V)."""
        width, self.lead = max(map(len, blocks)), [0] * len(blocks)
        ids = [[*block, *[0] * (width - len(block))] for block in blocks]
        self._mask_ST = torch.cat([self._mask_ST, self._mask_ST.new_ones(len(blocks), width)], dim=1)
        return self._forward(ids, self._lengths + torch.arange(width, device=self._lengths.device), 0)

    def keep(self, counts: Sequence[int]) -> None:
        """Cut to the row that goes furthest; of the others, move the end there or hide what they did not accept."""
        furthest = max(counts)
        kept_S1 = torch.tensor(counts, device=self._lengths.device)[:, None]
        self._lengths = self._lengths + kept_S1
        if len(set(counts)) > 1:
            if self._aligns:
                self._move_up(furthest - kept_S1)
            else:
                self._hide(kept_S1)
        surplus = self._num_new - furthest
        if surplus or self._aligns:  # a window that records drops what it no longer needs
            self._cache.crop(-surplus)
        self._mask_ST = self._mask_ST[:, : self._mask_ST.shape[1] - surplus]

    def _hide(self, kept_S1: Tensor) -> None:
        begin = self._mask_ST.shape[1] - self._num_new
        new_ST = torch.arange(self._num_new, device=kept_S1.device) < kept_S1
        self._mask_ST = torch.cat([self._mask_ST[:, :begin], new_ST.long()], dim=1)

    def _move_up(self, behind_S1: Tensor) -> None:
        layers: list[Any] = self._cache.layers
        for layer in layers:
            layer.keys, layer.values = _move(layer.keys, behind_S1), _move(layer.values, behind_S1)
        self._mask_ST = _move(self._mask_ST[:, None, :, None], behind_S1)[:, 0, :, 0]

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


def _move(states_SKTD: Tensor, by_S1: Tensor) -> Tensor:
    """Each row's positions moved to the right by its number; zeros come in, and what goes out at the end is lost."""
    from_ST = torch.arange(states_SKTD.shape[2], device=states_SKTD.device) - by_S1.to(states_SKTD.device)
    moved_SKTD = states_SKTD.gather(2, from_ST.clamp(min=0)[:, None, :, None].expand_as(states_SKTD))
    return moved_SKTD * (from_ST >= 0)[:, None, :, None]
