"""Drawn output has the target's distribution, whatever the drafter says; a wrong rule is found out."""

from collections import Counter

import pytest
import torch
from decode.four_words import NUM_TOKENS, SIZES, TEMPERATURE, VOCAB, chi_square_p, exact_distribution, make_pair
from transformers import LlamaConfig

from dflash_cache.decode import choice
from dflash_cache.decode.choice import Sampling, count_standing, draw, draw_own
from dflash_cache.decode.speculate import Limits, decode_plainly, decode_speculatively
from dflash_cache.drafter.model import Drafter
from dflash_cache.target.load import Target

PROMPT = [1, 3, 2]
NUM_SAMPLES, NUM_AT_ONCE = 12_000, 3_000


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Drafter]:
    return make_pair(LlamaConfig(**SIZES), tmp_path_factory.mktemp("four-words"))


def sample_answers(pair: tuple[Target, Drafter]) -> tuple[Counter[tuple[int, ...]], float]:
    """Counts of the answers' first four tokens, and the mean acceptance.

    One from the prompt; of the first block two drafts and, where both stand, the one behind them, which the limit must
    not cut off.
    """
    limits, counts, accepted = Limits(NUM_TOKENS + 1, frozenset()), Counter(), []
    for begin in range(0, NUM_SAMPLES, NUM_AT_ONCE):
        seeds = range(begin, begin + NUM_AT_ONCE)
        prompts = [PROMPT] * NUM_AT_ONCE
        for one in decode_speculatively(pair[0], prompts, limits, Sampling(TEMPERATURE, seeds), pair[1]):
            counts[tuple(one.tokens[:NUM_TOKENS])] += 1
            accepted += one.accepted
    return counts, sum(accepted) / len(accepted)


def test_drawn_answers_have_the_targets_distribution(pair: tuple[Target, Drafter]) -> None:
    counts, acceptance = sample_answers(pair)
    assert 1.4 < acceptance < 2.4, "of three tokens a pass; drafts must be accepted and rejected, or this tests nothing"
    shares = exact_distribution(pair[0], PROMPT)
    assert chi_square_p(counts, shares) > 0.01
    limits = Limits(NUM_TOKENS, frozenset())
    plainly = decode_plainly(pair[0], [PROMPT] * NUM_AT_ONCE, limits, Sampling(TEMPERATURE, range(NUM_AT_ONCE)))
    assert chi_square_p(Counter(tuple(one.tokens) for one in plainly), shares) > 0.01


def accept_always(ids_SK, wanted_STV, drafted_STV, uniforms_SK):
    return (drafted_STV[:, :-1].sum(-1) > 0).long().cumprod(dim=1).sum(dim=1)


def accept_by_half_the_ratio(ids_SK, wanted_STV, drafted_STV, uniforms_SK):
    return count_standing(ids_SK, wanted_STV, 2 * drafted_STV, uniforms_SK)


def replace_by_the_targets_own_token(stand_S, wanted_STV, drafted_STV, uniforms_S):
    return draw_own(stand_S, wanted_STV, torch.zeros_like(drafted_STV), uniforms_S)


def follow_a_whole_block_with_any_token(stand_S, wanted_STV, drafted_STV, uniforms_S):
    anything_STV = wanted_STV.clone()
    anything_STV[:, -1] = 1 / VOCAB
    return draw_own(stand_S, anything_STV, drafted_STV, uniforms_S)


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("count_standing", accept_always),
        ("count_standing", accept_by_half_the_ratio),
        ("draw_own", replace_by_the_targets_own_token),
        ("draw_own", follow_a_whole_block_with_any_token),
    ],
)
def test_a_wrong_rule_is_found_out(pair, monkeypatch: pytest.MonkeyPatch, part: str, wrong) -> None:
    monkeypatch.setattr(choice, part, wrong)
    counts, _ = sample_answers(pair)
    assert chi_square_p(counts, exact_distribution(pair[0], PROMPT)) < 1e-6


def test_draws_are_the_inverse_of_the_cumulative_distribution_and_never_of_weight_zero() -> None:
    weights = torch.tensor([0.0, 2.0, 0.0, 6.0, 0.0], dtype=torch.float64)
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.9, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights.expand(5, 5).contiguous(), uniforms).tolist() == [1, 1, 3, 3, 3]


def test_a_draft_stands_by_the_ratio_and_the_rest_replaces_it() -> None:
    """By hand: p = (.5, .5, 0), q = (.8, 0, .2) at two places, nothing drafted at the third."""
    wanted = torch.tensor([[0.5, 0.5, 0.0]] * 3, dtype=torch.float64)[None]
    drafted = torch.tensor([[0.8, 0.0, 0.2]] * 2 + [[0.0, 0.0, 0.0]], dtype=torch.float64)[None]

    def stand(ids: list[int], uniforms: list[float]) -> int:
        return int(count_standing(torch.tensor([ids]), wanted, drafted, torch.tensor([uniforms]).double()))

    assert stand([0, 0], [0.62, 0.62]) == 2  # 0.5 / 0.8 = 0.625
    assert stand([0, 0], [0.62, 0.63]) == 1
    assert stand([0, 0], [0.63, 0.0]) == 0
    assert stand([2, 0], [0.0, 0.0]) == 0  # the target never says it
    for uniform in (0.0, 0.5, 0.99):  # max(0, p − q) is (0, .5, 0)
        assert int(draw_own(torch.tensor([0]), wanted, drafted, torch.tensor([uniform]).double())) == 1
    bonus = [int(draw_own(torch.tensor([2]), wanted, drafted, torch.tensor([u]).double())) for u in (0.49, 0.51)]
    assert bonus == [0, 1]


def test_a_drafter_equal_to_the_target_is_never_rejected() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 4, 9, generator=generator)
    sampling = Sampling(1.3, range(64))
    drafts = sampling.propose(logits[:, :-1], [3] * 64, range(64))
    assert all(len(one.tokens) == 4 for one in sampling.verify(drafts, logits, range(64)))
