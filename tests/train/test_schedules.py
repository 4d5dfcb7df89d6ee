import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dflash_cache.config.settings import TrainSettings
from dflash_cache.train.schedules import learning_rate


def rates(num_steps: int, **settings: float | str) -> list[float]:
    options = TrainSettings.model_validate({"learning_rate": 1.0, **settings})
    return [learning_rate(step, num_steps, options) for step in range(num_steps)]


def test_the_rate_of_each_step_is_the_one_worked_out_by_hand() -> None:
    # 12 steps: 4 of warm-up to 1, then 8 along half a cosine; cos(π/4) = 0.7071, cos(π/2) = 0
    found = rates(12, warmup_share=1 / 3)
    root = math.sqrt(0.5)
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert found[5] == pytest.approx((1 + root) / 2)
    assert found[7] == pytest.approx(0.5)
    assert found[9] == pytest.approx((1 - root) / 2)
    assert found[11] == pytest.approx(0.0, abs=1e-15)


def test_the_cosine_ends_at_its_floor_and_passes_halfway_between_peak_and_floor() -> None:
    found = rates(100, learning_rate=6e-4, warmup_share=0.2, final_learning_rate_share=0.1)
    assert found[0] == pytest.approx(6e-4 / 20)
    assert found[19] == pytest.approx(6e-4)
    assert found[59] == pytest.approx(6e-4 * 0.55)
    assert found[99] == pytest.approx(6e-5)


@given(
    num_steps=st.integers(1, 300),
    warmup_share=st.floats(0, 1),
    floor=st.floats(0, 1),
    peak=st.floats(1e-8, 10),
)
def test_warm_up_is_linear_and_the_rest_is_the_cosine_formula(
    num_steps: int, warmup_share: float, floor: float, peak: float
) -> None:
    found = rates(num_steps, learning_rate=peak, warmup_share=warmup_share, final_learning_rate_share=floor)
    W = round(warmup_share * num_steps)
    line = [peak * (i + 1) / W for i in range(W)]
    cosine = [
        peak * floor + peak * (1 - floor) * math.cos(math.pi / 2 * (i + 1) / (num_steps - W)) ** 2
        for i in range(num_steps - W)
    ]
    assert found == pytest.approx(line + cosine, rel=1e-6, abs=1e-9 * peak)


@given(num_steps=st.integers(1, 200), warmup_share=st.floats(0, 0.99))
def test_the_rate_never_leaves_its_range_and_never_rises_after_warm_up(num_steps: int, warmup_share: float) -> None:
    found = rates(num_steps, warmup_share=warmup_share, final_learning_rate_share=0.1)
    after = found[max(0, round(warmup_share * num_steps) - 1) :]
    assert all(0 < rate <= 1 for rate in found)
    assert after == sorted(after, reverse=True)


def test_without_warm_up_the_first_step_is_on_the_cosine_and_a_run_of_one_step_ends_at_the_floor() -> None:
    assert rates(2, warmup_share=0) == pytest.approx([0.5, 0.0])
    assert rates(1, warmup_share=0, final_learning_rate_share=0.3) == pytest.approx([0.3])
    assert rates(3, warmup_share=1) == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_wsd_rises_stays_and_falls_along_lines_worked_out_by_hand() -> None:
    # 20 steps: 4 of warm-up, 8 at the peak, 8 down to a quarter, so 3/32 of the peak a step
    found = rates(20, schedule="wsd", warmup_share=0.2, decay_share=0.4, final_learning_rate_share=0.25)
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert found[4:12] == [1.0] * 8
    assert found[12] == pytest.approx(29 / 32)
    assert found[15] == pytest.approx(20 / 32)
    assert found[19] == pytest.approx(0.25)


@given(num_steps=st.integers(1, 300), warmup=st.floats(0, 1), part=st.floats(0, 1), floor=st.floats(0, 1))
def test_wsd_is_the_line_through_peak_and_floor_for_any_shares(num_steps, warmup, part, floor) -> None:
    decay = part * (1 - warmup)
    found = rates(num_steps, schedule="wsd", warmup_share=warmup, decay_share=decay, final_learning_rate_share=floor)
    W, D = round(warmup * num_steps), round(decay * num_steps)
    for step, rate in enumerate(found):
        left = num_steps - 1 - step
        expected = (step + 1) / W if step < W else 1.0 if left >= D else 1 - (1 - floor) * (D - left) / D
        assert rate == pytest.approx(expected, rel=1e-9)


def test_constant_rises_and_stays_whatever_the_floor() -> None:
    found = rates(10, schedule="constant", learning_rate=2e-3, warmup_share=0.4, final_learning_rate_share=0.5)
    assert found == pytest.approx([5e-4, 1e-3, 1.5e-3, 2e-3] + [2e-3] * 6)
    assert rates(3, schedule="constant", warmup_share=0) == [1.0, 1.0, 1.0]


def test_a_warm_up_that_runs_into_the_decay_is_refused() -> None:
    with pytest.raises(ValidationError, match="warmup_share and decay_share must not be more than 1 together"):
        rates(10, schedule="wsd", warmup_share=0.6, decay_share=0.5)
    assert len(rates(10, schedule="cosine", warmup_share=0.9)) == 10  # decay_share has no say there
