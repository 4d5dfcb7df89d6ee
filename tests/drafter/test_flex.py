"""FlexAttention's mask against what slots see, and its uncompiled forward pass against the dense way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cache.drafter import flex
from dflash_cache.drafter.attention import attend_densely
from dflash_cache.drafter.flex import Sizes, attend_flex, make_block_mask, make_mask
from dflash_cache.drafter.sight import Sight


@st.composite
def cases(draw: st.DrawFn) -> tuple[Sizes, Sight]:
    """Blocks at anchors before, in and behind a context, with and without a window."""
    B = draw(st.integers(1, 6))
    sizes = Sizes(draw(st.integers(1, 9)), B, draw(st.integers(1, B)), draw(st.integers(1, 40)))
    window, first = draw(st.none() | st.integers(B, B + 30)), draw(st.integers(0, 20))
    positions = st.integers(0, first + sizes.T)
    anchors = draw(st.lists(st.lists(positions, min_size=sizes.A, max_size=sizes.A), min_size=1, max_size=3))
    return sizes, Sight(torch.tensor(anchors), window, first)


def seen_by_sight(sizes: Sizes, sight: Sight) -> torch.Tensor:
    """(S, A · C, T + A · B), with the keys of all blocks."""
    S, A, B, C, T = len(sight.anchors_SA), sizes.A, sizes.B, sizes.C, sizes.T
    seen = torch.zeros(S, A, C, T + A * B, dtype=torch.bool)
    seen[..., :T] = ~sight.hidden_context(C, T)
    hidden = sight.hidden_block(C, B)
    for a in range(A):
        seen[:, a, :, T + a * B : T + (a + 1) * B] = True if hidden is None else ~hidden
    return seen.flatten(1, 2)


@settings(max_examples=60)
@given(case=cases(), tile=st.sampled_from([16, 128]))
def test_the_mask_is_what_slots_see_and_padding_is_seen_by_none(case: tuple[Sizes, Sight], tile: int) -> None:
    sizes, sight = case
    expected = seen_by_sight(sizes, sight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "TILE", tile)
        S, Q, N = len(sight.anchors_SA), sizes.num_queries, sizes.num_keys
        assert Q % tile == N % tile == 0
        grid = [torch.arange(size) for size in (S, Q, N)]
        s, q, n = (each.view([-1 if axis == k else 1 for axis in range(3)]) for k, each in enumerate(grid))
        found = make_mask(sight, sizes)(s, torch.tensor(0), q, n).expand(S, Q, N)
        tiles = make_block_mask(sight, sizes).to_dense()[:, 0].bool()
    assert torch.equal(found[:, : expected.shape[1], : expected.shape[2]], expected)
    assert not found[:, :, expected.shape[2] :].any()
    assert found.any(-1).all()  # of queries that pad, too
    by_tile = found.view(S, Q // tile, tile, N // tile, tile).any(4).any(2)
    assert torch.equal(tiles, by_tile)  # a tile is computed exactly where something in it is seen


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("anchors", "window", "first"), [([[0, 9, 40]], None, 0), ([[7, 3, 12, 50], [31, 46, 11, 10]], 9, 10)]
)
def test_the_uncompiled_forward_pass_is_the_dense_ways(anchors, window, first) -> None:
    """Two cases alone: even so torch traces each for seconds."""
    sight, generator = Sight(torch.tensor(anchors), window, first), torch.Generator().manual_seed(0)
    (S, A), B, C, K, G, T = sight.anchors_SA.shape, 8, 5, 2, 3, 40
    shapes = [(S, A, C, K, G, 16), (S, T, K, 16), (S, T, K, 16), (S, A, B, K, 16), (S, A, B, K, 16)]
    query, key, value, own_key, own_value = (torch.randn(shape, generator=generator) for shape in shapes)
    found = attend_flex(query, (key, value), (own_key, own_value), sight)
    dense = attend_densely(query, (key, value), (own_key, own_value), sight)
    torch.testing.assert_close(found, dense, rtol=1e-5, atol=1e-5)
