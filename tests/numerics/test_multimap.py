import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gfn_rb.numerics.multimap import Multimap

keys = st.lists(st.integers(0, 20), max_size=30)


@settings(max_examples=100, deadline=None)
@given(keys=keys, asked=keys, n_buckets=st.integers(1, 25))
def test_look_ups_yield_what_is_filed_under_keys_of_the_bucket(keys, asked, n_buckets):
    value = torch.arange(len(keys)) * 10
    table = Multimap(torch.tensor(keys, dtype=torch.int64), value, n_buckets)
    spans = table.spans(torch.tensor(asked, dtype=torch.int64))
    expected = [
        (i, 10 * j)
        for i, key in enumerate(asked)
        for j, other in enumerate(keys)
        if key % n_buckets == other % n_buckets
    ]
    assert spans.total == len(expected)
    got = zip(*(each.tolist() for each in table.fetch(spans)), strict=True)
    assert sorted(got) == expected
