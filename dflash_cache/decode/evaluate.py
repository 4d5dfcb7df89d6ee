"""Measuring a drafter: acceptance length, speed with and without it, and whether the output stays the target's own.

Greedy output in float32 must equal the target's, token for token. In 16-bit floats, passes of different shapes
round differently; a first differing token then counts as a tie if the plain decoding's lead at that place is within
the rounding of its dtype, and as a fault otherwise. Drawn output (temperature above 0) has the target's distribution,
not its tokens: then there is nothing to compare, and no verdict but the one of `probe` on the target's logits.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from xxhash import xxh3_64_intdigest

from dflash_cache.config.settings import EvalSettings
from dflash_cache.decode.choice import Choice, Greedy, Sampling
from dflash_cache.decode.fit import check_fits
from dflash_cache.decode.probe import Probe
from dflash_cache.decode.prompts import Question
from dflash_cache.decode.speculate import Decoded, Limits, decode_plainly, decode_speculatively
from dflash_cache.drafter.model import Drafter
from dflash_cache.errors import ConfigError
from dflash_cache.target.load import Target, stop_tokens

# Largest lead that rounding alone can overturn: logits of magnitude ~30, a few units in the last place each.
TIE_LEADS = {torch.float32: 1e-4, torch.bfloat16: 0.75, torch.float16: 0.1}


@dataclass(frozen=True)
class Figures:
    """What was measured on some prompts.

    acceptance_length: mean over prompts of each prompt's mean (z-lab's convention); tokens_per_pass: over all passes of
    all prompts, so that a prompt counts by its passes; histogram: passes by tokens yielded; position_acceptance: of
    each drafted slot, the share of all passes that accepted it and all before it; speed_up: tokens_per_second over
    tokens_per_second_plain; lossless: no output differs but by a tie, None where tokens were drawn; same, ties,
    different: prompts of each kind; reread_tokens, extra_passes: what the target read once more because of rejected
    drafts, and its passes for that alone, which the speed pays for.
    """

    acceptance_length: float
    tokens_per_pass: float
    histogram: dict[int, int]
    position_acceptance: list[float]
    num_prompts: int
    num_tokens: int
    tokens_per_second: float
    tokens_per_second_plain: float
    speed_up: float
    lossless: bool | None
    same: int
    ties: int
    different: int
    reread_tokens: int
    extra_passes: int


@dataclass(frozen=True)
class Evaluation:
    """The figures of all prompts and of each category, how they were decoded, and what a probe of the target found."""

    overall: Figures
    categories: dict[str, Figures]
    block_size: int
    temperature: float
    batch_size: int
    probe: Probe | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the overall figures at the top."""
        values = asdict(self)
        return {**values.pop("overall"), **values}


def answer_plainly(
    target: Target, questions: list[Question], settings: EvalSettings, progress: Callable[[Decoded], None]
) -> list[Decoded]:
    """The target's own answers, to compare with; they do not depend on a drafter, so they are made once."""
    limits = Limits(settings.max_new_tokens, stop_tokens(target))

    def decode(prompts: list[list[int]], choice: Choice) -> list[Decoded]:
        return decode_plainly(target, prompts, limits, choice)

    return _decode_batches(questions, settings, decode, progress)


def evaluate(
    target: Target,
    drafter: Drafter,
    questions: list[Question],
    plain: list[Decoded],
    settings: EvalSettings,
    progress: Callable[[Decoded], None],
) -> Evaluation:
    """Decode all questions with the drafter and compare with the plain answers.

    Raises RunError if the drafter is of other sizes, ConfigError if it was trained on shorter blocks.
    """
    check_fits(drafter, target.config, target.fingerprint)
    block_size = resolve_block_size(drafter, settings)
    limits = Limits(settings.max_new_tokens, stop_tokens(target))

    def decode(prompts: list[list[int]], choice: Choice) -> list[Decoded]:
        return decode_speculatively(target, prompts, limits, choice, drafter, block_size)

    decoded = _decode_batches(questions, settings, decode, progress)
    compared = [*zip(questions, plain, decoded, strict=True)]
    is_greedy = settings.temperature == 0

    def sum_up(category: str | None) -> Figures:
        pairs = [(one, other) for question, one, other in compared if category in (None, question.category)]
        verdicts = Counter(compare(one, other, target.dtype) for one, other in pairs) if is_greedy else None
        return _sum_up([one for one, _ in pairs], [other for _, other in pairs], block_size, verdicts)

    categories = dict.fromkeys(question.category for question in questions)
    return Evaluation(
        overall=sum_up(None),
        categories={category: sum_up(category) for category in categories},
        block_size=block_size,
        temperature=settings.temperature,
        batch_size=settings.batch_size,
    )


def resolve_block_size(drafter: Drafter, settings: EvalSettings) -> int:
    """Slots of a block: as set, else as trained. Raises ConfigError if more are set than trained."""
    trained = drafter.shape.block_size
    if settings.block_size is not None and settings.block_size > trained:
        raise ConfigError(
            f"eval.block_size is {settings.block_size}, but the drafter was trained on blocks of {trained} slots and "
            f"has never seen the places beyond: take 2 to {trained}."
        )
    return settings.block_size or trained


def compare(plain: Decoded, speculative: Decoded, dtype: torch.dtype) -> str:
    """`same`, `tie` (the first difference is within rounding), or `different`."""
    if plain.tokens == speculative.tokens:
        return "same"
    pairs = zip(plain.tokens, speculative.tokens, strict=False)
    first = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if first is None:
        return "different"  # one is a mere prefix of the other: a token was lost
    return "tie" if plain.margins[first] <= TIE_LEADS[dtype] else "different"


def plan_batches(questions: list[Question], batch_size: int) -> list[list[int]]:
    """The questions' places, cut into batches of one category each, of like lengths, so that little is padded."""
    if batch_size == 1:
        return [[place] for place in range(len(questions))]
    by_category: dict[str, list[int]] = {}
    for place, question in enumerate(questions):
        by_category.setdefault(question.category, []).append(place)
    batches = []
    for places in by_category.values():
        places.sort(key=lambda place: len(questions[place].ids))
        batches += [places[begin : begin + batch_size] for begin in range(0, len(places), batch_size)]
    return batches


def make_choice(questions: list[Question], settings: EvalSettings) -> Choice:
    """Greedy, or draws whose seeds depend on each question's category and number alone."""
    if settings.temperature == 0:
        return Greedy()
    named = [f"{settings.seed}/{question.category}/{question.number}" for question in questions]
    return Sampling(settings.temperature, [xxh3_64_intdigest(name.encode()) >> 1 for name in named])


def _decode_batches(
    questions: list[Question],
    settings: EvalSettings,
    decode: Callable[[list[list[int]], Choice], list[Decoded]],
    progress: Callable[[Decoded], None],
) -> list[Decoded]:
    """What `decode` makes of every question, in the questions' order."""
    found: dict[int, Decoded] = {}
    for places in plan_batches(questions, settings.batch_size):
        batch = [questions[place] for place in places]
        decoded = decode([question.ids for question in batch], make_choice(batch, settings))
        for place, one in zip(places, decoded, strict=True):
            found[place] = one
            progress(one)
    return [found[place] for place in range(len(questions))]


def _sum_up(plain: list[Decoded], decoded: list[Decoded], block_size: int, verdicts: Counter[str] | None) -> Figures:
    means = [sum(one.accepted) / len(one.accepted) for one in decoded if one.accepted]
    passes = Counter(length for one in decoded for length in one.accepted)
    beyond = [sum(count for length, count in passes.items() if length > slot) for slot in range(1, block_size)]
    verdict = verdicts or Counter()
    return Figures(
        acceptance_length=sum(means) / max(1, len(means)),
        tokens_per_pass=sum(length * count for length, count in passes.items()) / max(1, passes.total()),
        histogram={length: passes[length] for length in range(1, block_size + 1)},
        position_acceptance=[count / max(1, passes.total()) for count in beyond],
        num_prompts=len(decoded),
        num_tokens=sum(len(one.tokens) for one in decoded),
        tokens_per_second=_rate(decoded),
        tokens_per_second_plain=_rate(plain),
        speed_up=_rate(decoded) / max(1e-9, _rate(plain)),
        lossless=None if verdicts is None else verdict["different"] == 0,
        same=verdict["same"],
        ties=verdict["tie"],
        different=verdict["different"],
        reread_tokens=sum(one.reread_tokens for one in decoded),
        extra_passes=sum(one.extra_passes for one in decoded),
    )


def _rate(decoded: list[Decoded]) -> float:
    return sum(len(one.tokens) for one in decoded) / max(1e-9, sum(one.seconds for one in decoded))
