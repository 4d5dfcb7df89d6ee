"""A prompt by itself is answered with the target's distribution, whatever its layers keep of rejected drafts."""

from collections import Counter

import pytest
import transformers
from decode.four_words import NUM_TOKENS, SIZES, TEMPERATURE, chi_square_p, exact_distribution, make_pair

from dflash_cache.decode.choice import Sampling
from dflash_cache.decode.past import Past
from dflash_cache.decode.speculate import Limits, decode_speculatively
from dflash_cache.drafter.model import Drafter
from dflash_cache.target.load import Target

PROMPT, NUM_SAMPLES = [1, 3, 2], 400
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
CONFIGS = {
    "recurrent": lambda: transformers.Qwen3_5TextConfig(**SIZES, **LINEAR),
    "sliding window": lambda: transformers.MistralConfig(**SIZES, sliding_window=4),
    "plain": lambda: transformers.LlamaConfig(**SIZES),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Target, Drafter]]:
    """Targets that heed each token, so that one which should not be there tells."""
    return {kind: make_pair(make(), tmp_path_factory.mktemp("four-words"), gain=4) for kind, make in CONFIGS.items()}


def sample_answers(pair: tuple[Target, Drafter]) -> tuple[Counter[tuple[int, ...]], float]:
    """Counts of the answers' first four tokens, and the share of blocks of which a draft was rejected."""
    limits, counts, accepted = Limits(NUM_TOKENS + 1, frozenset()), Counter(), []
    for seed in range(NUM_SAMPLES):
        one = decode_speculatively(pair[0], [PROMPT], limits, Sampling(TEMPERATURE, [seed]), pair[1])[0]
        counts[tuple(one.tokens[:NUM_TOKENS])] += 1
        accepted.append(one.accepted[0])
    return counts, sum(count < 3 for count in accepted) / NUM_SAMPLES


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_drawn_answers_have_the_targets_distribution(pairs: dict[str, tuple[Target, Drafter]], kind: str) -> None:
    counts, rejected = sample_answers(pairs[kind])
    assert 0.3 < rejected < 0.95, "drafts must be accepted and rejected, or this tests nothing"
    assert chi_square_p(counts, exact_distribution(pairs[kind][0], PROMPT)) > 0.01


@pytest.mark.parametrize(
    ("kind", "part", "wrong"), [("recurrent", "go_back", Past.cut), ("sliding window", "cut", lambda *_: None)]
)
def test_rejected_drafts_that_are_not_taken_back_are_found_out(
    pairs: dict[str, tuple[Target, Drafter]], monkeypatch: pytest.MonkeyPatch, kind: str, part: str, wrong
) -> None:
    monkeypatch.setattr(Past, part, wrong)
    counts, _ = sample_answers(pairs[kind])
    assert chi_square_p(counts, exact_distribution(pairs[kind][0], PROMPT)) < 1e-6
