"""Sliding windows in decoding: as in training, whatever rows come together and in whatever pieces."""

import torch
from drafter.tiny_drafter import make_drafter
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_cache.decode.context import DraftContext
from dflash_cache.drafter.shape import FULL, SLIDING


@settings(max_examples=25)
@given(
    pieces=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    longer=st.integers(0, 12),
    alone=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_block_behind_each_row_is_what_training_makes_of_the_whole_row(pieces, longer, alone, seed) -> None:
    drafter = make_drafter(seed, layer_types=(SLIDING, FULL), sliding_window=4 + longer)
    generator = torch.Generator().manual_seed(seed)
    lengths = [sum(piece[row] for piece in pieces) for row in range(2)]
    states = [torch.randn(1, length, 3, 16, generator=generator) for length in lengths]
    slots = torch.randn(2, 1, 4, 16, generator=generator)
    with torch.no_grad():
        context = DraftContext(drafter, 2)
        for counts in pieces:
            new = torch.zeros(2, max(counts), 3, 16)
            for row, count in enumerate(counts):
                begin = context.lengths[row]
                new[row, :count] = states[row][0, begin : begin + count]
            context.extend(new, counts)
        rows = [1] if alone else [0, 1]
        anchors = torch.tensor([[lengths[row]] for row in rows])
        found = drafter(slots[rows], context.view(rows if alone else None), anchors)
        for row, one in zip(rows, found, strict=True):
            # a second block makes this the way of training, not the one of a single block
            both = slots[row : row + 1].repeat(1, 2, 1, 1)
            anchors = torch.tensor([[lengths[row], lengths[row]]])
            expected = drafter(both, drafter.read_context(states[row], anchors_SA=anchors), anchors)
            torch.testing.assert_close(one[0], expected[0, 1], rtol=1e-5, atol=1e-5)
        window = drafter.shape.sliding_window
        assert context.view()[0].keys.shape[1] <= window - 1 + max(lengths) - min(lengths)
