import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer

from dflash_cache.target.kv_cache import RoomyLayer

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from([1, 1, 1, 2, 70])),
        st.tuples(st.sampled_from(["select", "reorder"]), st.integers(0, 2**16)),
        st.tuples(st.just("crop"), st.integers(0, 3)),
    ),
    max_size=40,
)


@settings(max_examples=100)
@given(OPERATIONS, st.integers(1, 4))
def test_a_roomy_layer_holds_what_transformers_layer_holds(operations, rows):
    ours, theirs = RoomyLayer(), DynamicLayer()
    generator = torch.Generator().manual_seed(len(operations))
    for name, number in [("append", 5), *operations]:
        if name == "append":
            new = torch.randn(2, rows, 3, number, 4, generator=generator)
            found = ours.update(new[0], new[1])
            expected = theirs.update(new[0], new[1])
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        elif name in ("select", "reorder"):
            keep = torch.randperm(rows, generator=generator)[: 1 + number % rows].sort().values
            rows = len(keep)
            for layer in (ours, theirs):
                (layer.batch_select_indices if name == "select" else layer.reorder_cache)(keep)
        elif number < theirs.get_seq_length():
            ours.crop(-number)
            theirs.crop(-number)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


def test_appending_a_token_moves_nothing_while_there_is_room():
    layer = RoomyLayer()
    token = torch.ones(1, 1, 1, 2)
    layer.update(torch.ones(1, 1, 5, 2), torch.ones(1, 1, 5, 2))
    places = []
    for _ in range(64):
        layer.update(token, token)
        places.append(layer.keys.data_ptr())
    assert len(set(places)) == 1
