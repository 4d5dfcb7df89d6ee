"""Measuring a drafter: acceptance length, speed with and without it, and whether the output stays the target's own.

Greedy output in float32 must equal the target's, token for token. In 16-bit floats, passes of different shapes
round differently; a first differing token then counts as a tie if the plain decoding's lead at that place is within
the rounding of its dtype, and as a fault otherwise.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dflash_cache.decode.speculate import Decoded, decode_plainly, decode_speculatively
from dflash_cache.drafter.model import Drafter
from dflash_cache.errors import RunError
from dflash_cache.target.load import Target

# Largest lead that rounding alone can overturn: logits of magnitude ~30, a few units in the last place each.
TIE_LEADS = {torch.float32: 1e-4, torch.bfloat16: 0.75, torch.float16: 0.1}


@dataclass(frozen=True)
class Evaluation:
    """acceptance_length: mean over prompts of each prompt's mean (z-lab's convention); histogram: passes by tokens
    yielded; lossless: no output differs but by a tie; same, ties, different: prompts of each kind.
    """

    acceptance_length: float
    histogram: dict[int, int]
    num_prompts: int
    num_tokens: int
    tokens_per_second: float
    tokens_per_second_plain: float
    lossless: bool
    same: int
    ties: int
    different: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Limits:
    """How far each answer goes: at most max_new_tokens, or to one of stop_ids."""

    max_new_tokens: int
    stop_ids: frozenset[int]


def answer_plainly(
    target: Target, prompts: list[list[int]], limits: Limits, progress: Callable[[Decoded], None]
) -> list[Decoded]:
    """The target's own answers, to compare with; they do not depend on a drafter, so they are made once."""
    answers = []
    for prompt in prompts:
        answers.append(decode_plainly(target, prompt, limits.max_new_tokens, limits.stop_ids))
        progress(answers[-1])
    return answers


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    plain: list[Decoded],
    limits: Limits,
    progress: Callable[[Decoded], None],
) -> Evaluation:
    """Decode all prompts with the drafter and compare with the plain answers.

    Raises RunError if the drafter is another target's.
    """
    check_fits(target, drafter)
    decoded = []
    for prompt in prompts:
        decoded.append(decode_speculatively(target, drafter, prompt, limits.max_new_tokens, limits.stop_ids))
        progress(decoded[-1])
    verdicts = Counter(compare(one, other, target.dtype) for one, other in zip(plain, decoded, strict=True))
    means = [sum(one.accepted) / len(one.accepted) for one in decoded if one.accepted]
    histogram = Counter(length for one in decoded for length in one.accepted)
    return Evaluation(
        acceptance_length=sum(means) / max(1, len(means)),
        histogram={length: histogram[length] for length in range(1, drafter.shape.block_size + 1)},
        num_prompts=len(prompts),
        num_tokens=sum(len(one.tokens) for one in decoded),
        tokens_per_second=_rate(decoded),
        tokens_per_second_plain=_rate(plain),
        lossless=verdicts["different"] == 0,
        same=verdicts["same"],
        ties=verdicts["tie"],
        different=verdicts["different"],
    )


def check_fits(target: Target, drafter: Drafter) -> None:
    """Raise RunError unless the drafter has the target's hidden size, layers and vocabulary."""
    shape, config = drafter.shape, target.config
    figures = {
        "hidden size": (shape.hidden_size, config.hidden_size),
        "layers": (shape.target_num_layers, config.num_hidden_layers),
        "vocabulary": (shape.vocab_size, config.vocab_size),
    }
    different = [f"{name} {was}, not {now}" for name, (was, now) in figures.items() if was != now]
    if different:
        raise RunError(
            f"The drafter was trained for another target ({'; '.join(different)}): set target.model to its target."
        )


def compare(plain: Decoded, speculative: Decoded, dtype: torch.dtype) -> str:
    """`same`, `tie` (the first difference is within rounding), or `different`."""
    if plain.tokens == speculative.tokens:
        return "same"
    pairs = zip(plain.tokens, speculative.tokens, strict=False)
    first = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if first is None:
        return "different"  # one is a mere prefix of the other: a token was lost
    return "tie" if plain.margins[first] <= TIE_LEADS[dtype] else "different"


def _rate(decoded: list[Decoded]) -> float:
    return sum(len(one.tokens) for one in decoded) / max(1e-9, sum(one.seconds for one in decoded))
