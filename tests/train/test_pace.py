"""A step's rates, waiting, time left and memory, against figures worked out by hand."""

import resource

import pytest
import torch

from dflash_cache.train.pace import WINDOW, Pace, peak_bytes

CPU = torch.device("cpu")


def step(number: int, seconds: float, wait: float, tokens: int = 100) -> dict:
    return {"step": number, "num_steps": 200, "seconds": seconds, "wait": wait, "tokens": tokens, "samples": 4,
            "blocks": 10}  # fmt: skip


def test_two_steps_have_the_rates_and_the_time_left_of_both() -> None:
    times = iter([0.0, 3.0, 8.0])
    pace = Pace(CPU, lambda: next(times))
    pace.add(step(1, seconds=1.5, wait=0.5))
    found = pace.add(step(2, seconds=2.5, wait=0.5, tokens=400))
    assert found["tokens_per_second"] == pytest.approx(500 / 5)
    assert found["samples_per_second"] == pytest.approx(8 / 5)
    assert found["blocks_per_second"] == pytest.approx(20 / 5)
    assert found["wait_share"] == pytest.approx(1 / 5)
    assert found["seconds_left"] == pytest.approx(198 * 8 / 2)  # by the clock: steps, and what came between them


def test_only_the_last_steps_count() -> None:
    now = 0.0
    pace = Pace(CPU, lambda: now)
    for number in range(1, 101):
        a_step = 9.0 if number <= 100 - WINDOW else 2.0
        now += a_step
        found = pace.add(step(number, seconds=a_step, wait=0.0))
    assert found["tokens_per_second"] == pytest.approx(100 / 2)
    assert found["seconds_left"] == pytest.approx(100 * 2)


def test_the_memory_is_the_most_that_the_process_held() -> None:
    before = peak_bytes(CPU)
    held = torch.ones(before // 8 + (8 << 20), dtype=torch.float64)  # beyond all that was held before
    after = peak_bytes(CPU)
    assert after - before >= 64 << 20
    del held
    assert peak_bytes(CPU) >= after
    assert after == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
