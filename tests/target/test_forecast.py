import math

import pytest

from dflash_cache.target.forecast import (
    Forecast,
    Rates,
    generate_seconds,
    needed_bytes_per_second,
    passes_until_it_pays,
)

# Qwen3-8B with five layers: a billion tokens are 41 TB.
BILLION = Forecast(
    num_samples=10**6, num_open=0, num_tokens=10**9, token_bytes=40_965, num_bytes=40_965 * 10**9, num_shards=38_152,
    free_bytes=10**14, state_bytes_by_codec={"raw": 40_960 * 10**9},
)  # fmt: skip


def test_generate_takes_the_slower_of_the_target_and_the_writing() -> None:
    assert generate_seconds(BILLION, Rates(target_tokens=20_000)) == 50_000
    assert generate_seconds(BILLION, Rates(target_tokens=20_000, storage_bytes=1e12)) == 50_000
    assert generate_seconds(BILLION, Rates(target_tokens=20_000, storage_bytes=4.0965e8)) == pytest.approx(100_000)
    assert generate_seconds(BILLION, Rates(storage_bytes=1e9)) is None


def test_training_reads_its_tokens_bytes() -> None:
    assert needed_bytes_per_second(BILLION, Rates(train_tokens=50_000)) == 50_000 * 40_965
    assert needed_bytes_per_second(BILLION, Rates(target_tokens=1)) is None


@pytest.mark.parametrize("gb_per_second", [0.5, 0.9, 1.0, 2.5, 40.0])
def test_the_first_number_of_passes_that_pays_is_the_first_that_costs_less(gb_per_second: float) -> None:
    rates = Rates(target_tokens=20_000, storage_bytes=gb_per_second * 1e9)
    forward, read = 50_000.0, BILLION.num_bytes / rates.storage_bytes
    first = max(forward, read)
    cheaper = [n for n in range(1, 200) if first + n * read < n * forward]
    expected = cheaper[0] if cheaper else math.inf
    assert passes_until_it_pays(BILLION, rates) == expected


def test_without_both_rates_nobody_knows_when_it_pays() -> None:
    assert passes_until_it_pays(BILLION, Rates(target_tokens=1)) is None
    assert passes_until_it_pays(BILLION, Rates(storage_bytes=1)) is None
