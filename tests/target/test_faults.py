import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_cache.target.faults import REASONS, find_faults

VALUES = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    spoils=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.sampled_from([*VALUES, "zero"])), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_a_sample_is_bad_exactly_if_a_valid_number_is_not_finite_or_a_valid_row_is_zero(
    lengths: list[int], spoils: list[tuple[int, int, str]], dtype: torch.dtype
) -> None:
    S, T = len(lengths), max(lengths)
    states = torch.randn(S, T, 2, 4, generator=torch.Generator().manual_seed(0)).sign().to(dtype) * 3
    expected = [0] * S
    for sample, token, kind in spoils:
        s, t = sample % S, token % T
        if kind == "zero":
            states[s, t, 1] = 0
        else:
            states[s, t, 1, 2] = VALUES[kind]
    for s, length in enumerate(lengths):
        rows = states[s, :length].flatten(0, 1).tolist()
        if not all(math.isfinite(number) for row in rows for number in row):
            expected[s] = 1
        elif any(not any(row) for row in rows):
            expected[s] = 2
        states[s, length:] = 0  # as capture leaves padding
    assert find_faults(states, torch.tensor(lengths)).tolist() == expected
    assert set(expected) <= {0, *REASONS}


def test_a_row_that_holds_a_single_zero_is_good() -> None:
    states = torch.tensor([[[[0.0, -1.0], [0.0, 2.0]]]])
    assert find_faults(states, torch.tensor([1])).tolist() == [0]
