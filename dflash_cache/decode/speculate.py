"""Speculative decoding: the drafter proposes a block, the target verifies it in one pass, for one prompt or several.

The target's own token behind the accepted drafts is committed too, so every pass yields at least one token, and the
output is what the target alone would have written, or would have been as likely to write (FIELD.md, "Inference";
`choice`). Decoding plainly is the same with blocks of the anchor alone.

Acceptance length: tokens that one target pass yields, the target's own counted; the prefill's token is not.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_cache.decode.choice import Choice, Verified
from dflash_cache.decode.context import DraftContext, States
from dflash_cache.decode.rows import open_rows
from dflash_cache.drafter.model import Drafter
from dflash_cache.target.load import Target


@dataclass(frozen=True)
class Decoded:
    """tokens: the answer's ids, up to a stop token or the limit; accepted: tokens yielded by each target pass.

    margins: at every token, how far the chosen logit lies above the second best, or none where tokens are drawn;
    seconds: of the whole decoding, of several prompts the prompt's share; reread_tokens, extra_passes: what the target
    read once more because recurrent layers cannot take back rejected drafts, and its passes for that alone.
    """

    tokens: list[int]
    accepted: list[int]
    margins: list[float]
    seconds: float
    reread_tokens: int = 0
    extra_passes: int = 0


@dataclass(frozen=True)
class Limits:
    """How far each answer goes: at most max_new_tokens, or to one of stop_ids."""

    max_new_tokens: int
    stop_ids: frozenset[int]


class Plain:
    """No drafter: every block is its anchor alone."""

    takes_back = False

    def listening(self) -> AbstractContextManager[object]:
        """Nothing is caught."""
        return nullcontext()

    def read(self, counts: Sequence[int], lead: Sequence[int]) -> None:
        """Nothing is read."""

    def select(self, rows: Sequence[int]) -> None:
        """Nothing is held of the rows."""

    def propose(self, choice: Choice, anchors: list[int], rooms: list[int], prompts: list[int]) -> list[list[int]]:
        """Nothing."""
        return [[] for _ in anchors]


class Drafting:
    """A drafter at work on some rows: it reads what they commit, and drafts blocks of `block_size` slots."""

    takes_back = True

    def __init__(self, target: Target, drafter: Drafter, num_rows: int, block_size: int) -> None:
        self._target, self._drafter, self._block_size = target, drafter, block_size
        self._context = DraftContext(drafter, num_rows)
        self._states = States(target, drafter.shape.target_layer_ids)

    def listening(self) -> AbstractContextManager[object]:
        """Catch the target's states while the block runs."""
        return self._states.listening()

    def read(self, counts: Sequence[int], lead: Sequence[int]) -> None:
        """Take the states of the target's last pass, `counts` of each row, behind its `lead`."""
        states_STLH = self._states.take()
        if len(set(lead)) > 1:
            self._context.extend(states_STLH, counts, lead)
        else:
            self._context.extend(states_STLH[:, lead[0] : lead[0] + max(counts)], counts)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self._context.select(rows)

    def propose(self, choice: Choice, anchors: list[int], rooms: list[int], prompts: list[int]) -> list[list[int]]:
        """Each row's drafts behind its anchor's token.

        A block has all its slots but near the end of an answer, where what cannot be used (`rooms` tokens may still
        come, the target's own included) is not drafted, as z-lab does.
        """
        slots = [min(self._block_size, room + 1) for room in rooms]
        if max(slots) == 1:
            return [[] for _ in anchors]
        return choice.propose(self.draft(anchors, slots), [count - 1 for count in slots], prompts)

    def draft(self, anchor_tokens: list[int], slots: Sequence[int]) -> Tensor:
        """The head's logits (S, K, V) for each row's slots after its anchor, whose position is the context's length.

        `slots` counts each row's, the anchor's included. Slots of a block see each other, so rows with fewer are
        drafted by themselves; what is past a row's slots is zero.
        """
        kinds = sorted(set(slots))
        if len(kinds) == 1:
            return self._draft_alike(anchor_tokens, kinds[0])
        logits_SKV: Tensor | None = None
        for num_slots in reversed(kinds[1:] if kinds[0] == 1 else kinds):
            rows = [row for row, count in enumerate(slots) if count == num_slots]
            logits = self._draft_alike([anchor_tokens[row] for row in rows], num_slots, rows)
            if logits_SKV is None:
                logits_SKV = logits.new_zeros(len(slots), kinds[-1] - 1, logits.shape[-1])
            logits_SKV[rows, : num_slots - 1] = logits
        assert logits_SKV is not None
        return logits_SKV

    def _draft_alike(self, anchor_tokens: list[int], num_slots: int, rows: Sequence[int] | None = None) -> Tensor:
        device, lengths = self._target.device, self._context.lengths
        slots = torch.full((len(anchor_tokens), 1, num_slots), self._drafter.shape.mask_token_id, device=device)
        slots[..., 0] = torch.tensor(anchor_tokens, device=device)[:, None]
        embedded_SABH = self._target.embed(slots)
        anchors_SA = torch.tensor([lengths if rows is None else [lengths[row] for row in rows]], device=device).T
        states_SABH = self._drafter(embedded_SABH, self._context.view(rows), anchors_SA)
        return self._target.read_logits(states_SABH[:, 0, 1:])


def decode_plainly(target: Target, prompts: list[list[int]], limits: Limits, choice: Choice) -> list[Decoded]:
    """The target's own answers, a token a pass. Several prompts: ConfigError if the target is not fit for batches."""
    return decode_with(target, prompts, limits, choice, Plain())


def decode_speculatively(
    target: Target, prompts: list[list[int]], limits: Limits, choice: Choice, drafter: Drafter, block_size: int = 0
) -> list[Decoded]:
    """The answers with the drafter's help, which is on the target's device, in its dtype.

    Blocks have `block_size` slots, or as many as the drafter was trained on.
    """
    drafting = Drafting(target, drafter, len(prompts), block_size or drafter.shape.block_size)
    return decode_with(target, prompts, limits, choice, drafting)


@torch.inference_mode()
def decode_with(
    target: Target, prompts: list[list[int]], limits: Limits, choice: Choice, drafting: Plain | Drafting
) -> list[Decoded]:
    """The answers with drafts from wherever `drafting` has them."""
    started = time.perf_counter()
    answers = [_Answer(limits) for _ in prompts]
    rows = open_rows(target, prompts, drafting.takes_back)
    going = [*range(len(prompts))]  # each row's prompt
    with drafting.listening():
        logits_STV = rows.read_prompts()
        drafting.read([*map(len, prompts)], rows.lead)
        for answer, first in zip(answers, choice.verify([[] for _ in going], logits_STV, going), strict=True):
            answer.begin(first)
        while left := [row for row, prompt in enumerate(going) if not answers[prompt].is_whole]:
            if len(left) < len(going):
                rows.select(left)
                drafting.select(left)
                going = [going[row] for row in left]
            anchors = [answers[prompt].tokens[-1] for prompt in going]
            drafts = drafting.propose(choice, anchors, [answers[prompt].room for prompt in going], going)
            logits_STV = rows.read_blocks([[anchor, *draft] for anchor, draft in zip(anchors, drafts, strict=True)])
            found = choice.verify(drafts, logits_STV, going)
            counts = [len(verified.tokens) for verified in found]
            rows.keep(counts)
            drafting.read(counts, rows.lead)
            for prompt, verified in zip(going, found, strict=True):
                answers[prompt].take(verified)
    seconds = (time.perf_counter() - started) / len(prompts)
    reread = rows.reread
    return [
        Decoded(answer.tokens, answer.accepted, answer.margins, seconds, reread.tokens, reread.passes)
        for answer in answers
    ]


class _Answer:
    """An answer as it grows, never past a stop token or the limit."""

    def __init__(self, limits: Limits) -> None:
        self.tokens: list[int] = []
        self.accepted: list[int] = []
        self.margins: list[float] = []
        self._limits = limits

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self._limits.max_new_tokens - len(self.tokens)

    @property
    def is_whole(self) -> bool:
        """Whether it has ended."""
        return not self.room or self.tokens[-1] in self._limits.stop_ids

    def begin(self, verified: Verified) -> None:
        """The prefill's token, which no block yielded."""
        self.tokens += verified.tokens
        self.margins += verified.margins

    def take(self, verified: Verified) -> None:
        """What a pass yielded, up to a stop token or the limit."""
        ends = (place for place, token in enumerate(verified.tokens, 1) if token in self._limits.stop_ids)
        kept = min(next(ends, len(verified.tokens)), self.room)
        self.tokens += verified.tokens[:kept]
        self.margins += verified.margins[:kept]
        self.accepted.append(kept)
