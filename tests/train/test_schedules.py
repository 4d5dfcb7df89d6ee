import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import get_cosine_schedule_with_warmup

from dflash_cache.config.settings import TrainSettings
from dflash_cache.train.schedules import learning_rate


def rates(num_steps: int, **settings: float | str) -> list[float]:
    options = TrainSettings.model_validate({"learning_rate": 1.0, **settings})
    return [learning_rate(step, num_steps, options) for step in range(num_steps)]


@given(
    num_steps=st.integers(1, 300),
    warmup=st.floats(0, 1),
    decay=st.floats(0, 1),
    floor=st.sampled_from([0.0, 0.1, 0.9]),
    schedule=st.sampled_from(["cosine", "wsd", "constant"]),
)
@example(num_steps=1, warmup=0.0, decay=0.0, floor=0.0, schedule="cosine")
@example(num_steps=1, warmup=0.0, decay=1.0, floor=0.0, schedule="wsd")
@example(num_steps=7, warmup=1.0, decay=0.0, floor=0.0, schedule="cosine")
@example(num_steps=7, warmup=0.0, decay=1.0, floor=0.0, schedule="wsd")
@example(num_steps=3, warmup=0.5, decay=1.0, floor=0.0, schedule="wsd")  # both parts round up: 4 steps of 3
@example(num_steps=300, warmup=0.0, decay=1.0, floor=0.0, schedule="cosine")
def test_no_step_has_a_rate_of_zero_and_rates_rise_to_the_peak_stay_and_fall(
    num_steps: int, warmup: float, decay: float, floor: float, schedule: str
) -> None:
    share = decay * (1 - warmup)
    found = rates(num_steps, schedule=schedule, warmup_share=warmup, decay_share=share, final_learning_rate_share=floor)
    assert all(0 < rate <= 1 for rate in found)
    top = max(0, round(warmup * num_steps) - 1)  # the last step of the warm-up, or the first of all
    assert found[top] == 1.0
    assert found[: top + 1] == sorted(found[: top + 1])
    assert found[top:] == sorted(found[top:], reverse=True)
    falling = {"cosine": num_steps, "wsd": round(share * num_steps), "constant": 0}[schedule]
    at_peak = range(top, max(top + 1, num_steps - falling))
    assert [step for step, rate in enumerate(found) if rate == 1.0] == [*at_peak]


def test_the_last_of_many_steps_has_a_rate_too() -> None:
    """Where 1 + cos of nearly π would be rounded to nothing."""
    options = TrainSettings(learning_rate=1.0)
    last = learning_rate(10**9 - 1, 10**9, options)
    assert last == pytest.approx((math.pi / 2 / (0.96e9 + 1)) ** 2, rel=1e-6)


def test_the_rate_of_each_step_is_the_one_worked_out_by_hand() -> None:
    # 11 steps: 4 of warm-up to 1, then 7 of the 8 along half a cosine; cos(π/4) = 0.7071, cos(π/2) = 0
    found = rates(11, warmup_share=0.37)
    root = math.sqrt(0.5)
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert found[5] == pytest.approx((1 + root) / 2)
    assert found[7] == pytest.approx(0.5)
    assert found[9] == pytest.approx((1 - root) / 2)
    assert found[10] == pytest.approx(math.sin(math.pi / 16) ** 2)


def test_the_cosine_passes_halfway_and_would_end_at_its_floor_one_step_after_the_last() -> None:
    found = rates(99, learning_rate=6e-4, warmup_share=0.2, final_learning_rate_share=0.1)
    assert found[0] == pytest.approx(6e-4 / 20)
    assert found[19] == pytest.approx(6e-4)
    assert found[59] == pytest.approx(6e-4 * 0.55)  # 40 steps behind the peak, 40 before step 99
    assert 6e-5 < found[98] < found[97] < 6.1e-5


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
    skipped = min(W, 1)  # the curve begins at the warm-up's last step, which is there already
    length = num_steps - W + skipped
    cosine = [
        peak * floor + peak * (1 - floor) * (1 + math.cos(math.pi * i / length)) / 2 for i in range(skipped, length)
    ]
    assert found == pytest.approx(line + cosine, rel=1e-6, abs=1e-9 * peak)


def test_cosine_without_warm_up_is_transformers_schedule() -> None:
    def theirs(num_warmup: int, num_steps: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup, num_steps)
        return [schedule.lr_lambdas[0](step) for step in range(num_steps)]

    for n in (1, 2, 10, 37):
        assert rates(n, warmup_share=0) == pytest.approx(theirs(0, n))
    # theirs begins its warm-up at 0, a step before ours: behind it both are the same curve
    assert rates(10, warmup_share=0.3) == pytest.approx(theirs(3, 11)[1:])


def test_shares_that_leave_one_step_or_none_behind_the_peak_are_worked_out_by_hand() -> None:
    assert rates(2, warmup_share=0) == pytest.approx([1.0, 0.5])
    assert rates(1, warmup_share=0, final_learning_rate_share=0.3) == [1.0]
    assert rates(3, warmup_share=1) == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates(3, warmup_share=2 / 3) == pytest.approx([0.5, 1.0, 0.5])
    assert rates(4, schedule="wsd", warmup_share=0, decay_share=1) == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_wsd_rises_stays_and_falls_along_lines_worked_out_by_hand() -> None:
    # 20 steps: 5 of warm-up, 8 at the peak and the warm-up's last, 7 down towards a quarter: 3/32 of the peak a step
    found = rates(20, schedule="wsd", warmup_share=0.25, decay_share=0.35, final_learning_rate_share=0.25)
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert found[4:13] == [1.0] * 9
    assert found[13] == pytest.approx(29 / 32)
    assert found[16] == pytest.approx(20 / 32)
    assert found[19] == pytest.approx(11 / 32)


@given(num_steps=st.integers(1, 300), warmup=st.floats(0, 1), part=st.floats(0, 1), floor=st.floats(0, 1))
def test_wsd_is_the_line_from_the_peak_to_the_floor_behind_the_last_step(num_steps, warmup, part, floor) -> None:
    decay = part * (1 - warmup)
    found = rates(num_steps, schedule="wsd", warmup_share=warmup, decay_share=decay, final_learning_rate_share=floor)
    W, D = round(warmup * num_steps), round(decay * num_steps)
    length = min(D + 1, num_steps - max(0, W - 1))  # steps from the last at the peak to the one behind the last
    for step, rate in enumerate(found):
        left = num_steps - step
        expected = (step + 1) / W if step < W else 1.0 if left > D else floor + (1 - floor) * left / length
        assert rate == pytest.approx(expected, rel=1e-9)


def test_constant_rises_and_stays_whatever_the_floor() -> None:
    found = rates(10, schedule="constant", learning_rate=2e-3, warmup_share=0.4, final_learning_rate_share=0.5)
    assert found == pytest.approx([5e-4, 1e-3, 1.5e-3, 2e-3] + [2e-3] * 6)
    assert rates(3, schedule="constant", warmup_share=0) == [1.0, 1.0, 1.0]


def test_a_warm_up_that_runs_into_the_decay_is_refused() -> None:
    with pytest.raises(ValidationError, match="warmup_share and decay_share must not be more than 1 together"):
        rates(10, schedule="wsd", warmup_share=0.6, decay_share=0.5)
    assert len(rates(10, schedule="cosine", warmup_share=0.9)) == 10  # decay_share has no say there
