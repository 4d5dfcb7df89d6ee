"""Position weights against DESIGN.md's table, worked out block by block."""

import math

import pytest
import torch
from drafter.reference import weights
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.config.settings import ObjectiveSettings
from dflash_cache.drafter.objective import decay_gamma, gamma_of, weigh_slots


@given(
    kind=st.sampled_from(["uniform", "decay", "streak", "dpace"]),
    ce=st.lists(st.floats(0, 20), min_size=1, max_size=15),
    supervised=st.integers(0, 15),
    alpha=st.floats(0, 1),
    gamma=st.floats(0.5, 20),
)
def test_weights_equal_the_formula_block_by_block(kind, ce, supervised, alpha, gamma) -> None:
    supervised = min(supervised, len(ce))
    settings = ObjectiveSettings(weights=kind, gamma=gamma, streak_alpha=alpha, dpace_alpha=alpha)
    mask = torch.arange(len(ce)) < supervised
    found = weigh_slots(torch.tensor([ce]), mask[None], settings)[0].tolist()
    expected = weights(kind, ce[:supervised], gamma, alpha) + [0.0] * (len(ce) - supervised)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_streak_alpha_of_one_is_plain_decay_and_of_zero_counts_only_the_streak() -> None:
    ce, mask = torch.tensor([[0.0, math.log(2), 0.5]]), torch.ones(1, 3, dtype=torch.bool)
    decay = weigh_slots(ce, mask, ObjectiveSettings(weights="decay", gamma=10.0))
    assert torch.allclose(weigh_slots(ce, mask, ObjectiveSettings(weights="streak", streak_alpha=1.0)), decay)
    streak = weigh_slots(ce, mask, ObjectiveSettings(weights="streak", streak_alpha=0.0))[0].tolist()
    assert streak == pytest.approx([1.0, math.exp(-0.1) * 1.0, math.exp(-0.2) * 0.5])


@pytest.mark.parametrize(
    ("block_size", "gamma"), [(2, 4.0), (8, 4.0), (9, 4.5), (10, 5.0), (13, 6.0), (16, 7.0), (32, 7.0)]
)
def test_the_decays_gamma_is_the_papers_at_its_block_sizes_and_linear_between(block_size: int, gamma: float) -> None:
    assert decay_gamma(block_size) == pytest.approx(gamma)


def test_a_set_gamma_outranks_the_defaults() -> None:
    assert gamma_of(ObjectiveSettings(weights="streak"), 16) == 10.0
    assert gamma_of(ObjectiveSettings(weights="streak", gamma=3.0), 16) == 3.0
