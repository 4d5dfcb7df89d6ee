"""How tokens are chosen: what the drafter proposes, and how much of it the target lets stand.

Greedy: a draft stands if it is the target's own choice. Sampling: by the rule that keeps the target's distribution
(Leviathan et al., arXiv 2211.17192, algorithm 1). Drafts are drawn from the drafter's q; each stands with probability
min(1, p/q), p the target's; the first that does not is replaced by a draw from max(0, p − q), normalised; after a
block that stands whole, one more token is drawn from p. Temperature applies to p and q alike.

Every draw is the inverse of a cumulative distribution at a uniform number, and each prompt has a generator of its own
on the CPU: what a prompt is answered does not depend on the device's generator, nor on the batch it is in.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Verified(NamedTuple):
    """tokens: the drafts that stand, and the target's own one; margins: each one's lead over the second best."""

    tokens: list[int]
    margins: list[float]


class Choice(Protocol):
    """A way to choose. `prompts` are the rows' prompts, by their place in the batch as it began."""

    def propose(self, logits_SKV: Tensor, counts: Sequence[int], prompts: Sequence[int]) -> list[list[int]]:
        """Each row's drafts, for the first `counts` of K slots. Synchronises the device."""
        ...

    def verify(self, drafts: list[list[int]], logits_STV: Tensor, prompts: Sequence[int]) -> list[Verified]:
        """What stands, by the target's logits behind the anchor (t = 0) and every draft. Synchronises the device."""
        ...


class Greedy:
    """The likeliest token everywhere."""

    def propose(self, logits_SKV: Tensor, counts: Sequence[int], prompts: Sequence[int]) -> list[list[int]]:
        """The drafter's likeliest tokens."""
        drafts: list[list[int]] = logits_SKV.argmax(-1).tolist()
        return [row[:count] for row, count in zip(drafts, counts, strict=True)]

    def verify(self, drafts: list[list[int]], logits_STV: Tensor, prompts: Sequence[int]) -> list[Verified]:
        """The longest prefix that the target would have written, and its next choice."""
        best = logits_STV.float().topk(2, dim=-1)
        leads = (best.values[..., 0] - best.values[..., 1]).tolist()
        verified = []
        for draft, choices, margins in zip(drafts, best.indices[..., 0].tolist(), leads, strict=True):
            end = count_agreeing(draft, choices) + 1
            verified.append(Verified(choices[:end], margins[:end]))
        return verified


class Sampling:
    """Draws from softmax(logits / temperature), `seeds` giving each prompt its own; margins are not known."""

    def __init__(self, temperature: float, seeds: Sequence[int]) -> None:
        self._temperature = temperature
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._drafted_SKV: Tensor | None = None

    def propose(self, logits_SKV: Tensor, counts: Sequence[int], prompts: Sequence[int]) -> list[list[int]]:
        """Drafts drawn from q, which is kept to verify them by."""
        drafted_SKV = self._soften(logits_SKV)
        for row, count in enumerate(counts):
            drafted_SKV[row, count:] = 0  # past a row's slots nothing is drafted
        self._drafted_SKV = drafted_SKV
        drafts: list[list[int]] = draw(drafted_SKV, self._draw_uniforms(counts, prompts, logits_SKV.device)).tolist()
        return [row[:count] for row, count in zip(drafts, counts, strict=True)]

    def verify(self, drafts: list[list[int]], logits_STV: Tensor, prompts: Sequence[int]) -> list[Verified]:
        """The drafts that stand by min(1, p/q), and a token from max(0, p − q), or from p if all stand."""
        device, counts = logits_STV.device, [len(row) for row in drafts]
        wanted_STV = self._soften(logits_STV)
        drafted_STV = torch.zeros_like(wanted_STV)
        if any(counts):
            assert self._drafted_SKV is not None  # they were proposed here
            drafted_STV[:, :-1] = self._drafted_SKV
        padded = [[*row, *[0] * (wanted_STV.shape[1] - 1 - len(row))] for row in drafts]
        ids_SK = torch.tensor(padded, dtype=torch.long, device=device)
        uniforms_ST = self._draw_uniforms([count + 1 for count in counts], prompts, device)
        stand_S = count_standing(ids_SK, wanted_STV, drafted_STV, uniforms_ST[:, 1:])
        own_S = draw_own(stand_S, wanted_STV, drafted_STV, uniforms_ST[:, 0])
        return [
            Verified([*row[:stand], own], [])
            for row, stand, own in zip(drafts, stand_S.tolist(), own_S.tolist(), strict=True)
        ]

    def _soften(self, logits: Tensor) -> Tensor:
        return (logits.double() / self._temperature).softmax(dim=-1)

    def _draw_uniforms(self, counts: Sequence[int], prompts: Sequence[int], device: torch.device) -> Tensor:
        """Each row's next `counts` numbers in [0, 1), padded with zeros to the most of them."""
        uniforms = torch.zeros(len(counts), max(counts), dtype=torch.float64)
        for row, (count, prompt) in enumerate(zip(counts, prompts, strict=True)):
            uniforms[row, :count] = torch.rand(count, generator=self._generators[prompt], dtype=torch.float64)
        return uniforms.to(device)


def count_standing(ids_SK: Tensor, wanted_STV: Tensor, drafted_STV: Tensor, uniforms_SK: Tensor) -> Tensor:
    """How many of each row's drafts stand (S,): up to the first with uniform ≥ p/q, or that was never drafted."""
    wanted_SK = wanted_STV[:, :-1].gather(-1, ids_SK[..., None])[..., 0]
    drafted_SK = drafted_STV[:, :-1].gather(-1, ids_SK[..., None])[..., 0]
    stands_SK = (uniforms_SK * drafted_SK < wanted_SK) & (drafted_SK > 0)
    return stands_SK.long().cumprod(dim=1).sum(dim=1)


def draw_own(stand_S: Tensor, wanted_STV: Tensor, drafted_STV: Tensor, uniforms_S: Tensor) -> Tensor:
    """The target's own token (S,) behind the standing drafts.

    Where all stand nothing was drafted for its place, so that max(0, p − q) is p itself.
    """
    rows_S = torch.arange(len(stand_S), device=stand_S.device)
    wanted_SV = wanted_STV[rows_S, stand_S]
    rest_SV = (wanted_SV - drafted_STV[rows_S, stand_S]).clamp(min=0)
    # Rounding may leave nothing where p and q are all but equal: then p is the distribution to draw from.
    return draw(torch.where(rest_SV.sum(-1, keepdim=True) > 0, rest_SV, wanted_SV), uniforms_S)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens (…) drawn in proportion to non-negative `weights` (…, V), float64, by `uniforms` (…) in [0, 1)."""
    cumulated = weights.cumsum(dim=-1)
    sought = uniforms[..., None] * cumulated[..., -1:]
    drawn = torch.searchsorted(cumulated, sought, right=True)[..., 0]
    return drawn.clamp(max=weights.shape[-1] - 1)  # uniform · sum may round up to the sum


def count_agreeing(drafts: list[int], choices: list[int]) -> int:
    """Length of the longest prefix of `drafts` that the target chooses too."""
    count = 0
    while count < len(drafts) and drafts[count] == choices[count]:
        count += 1
    return count
