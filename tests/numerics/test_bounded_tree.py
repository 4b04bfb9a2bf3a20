import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gfn_rb.numerics import BoundedTree, WeightedTree

weights = st.one_of(st.floats(-1e4, 1e4), st.just(-math.inf))


@settings(max_examples=80, deadline=None)
@given(
    capacity=st.integers(1, 70),
    batches=st.lists(st.lists(st.tuples(st.integers(0, 69), weights), max_size=9), max_size=8),
    whole=st.booleans(),
)
def test_lowest_follows_any_updates(capacity, batches, whole):
    tree, plain = BoundedTree(capacity), [-math.inf] * capacity
    for batch in batches:
        rows = {i % capacity: w for i, w in batch}
        index, weight = torch.tensor([*rows], dtype=torch.int64), torch.tensor([*rows.values()])
        tree.update(index, weight.double())
        for i, w in zip(rows, weight.double().tolist(), strict=True):
            plain[i] = w
        assert float(tree.lowest) == min((w for w in plain if w > -math.inf), default=math.inf)
    if whole:
        tree.assign(torch.tensor(plain[: capacity // 2], dtype=torch.float64))
        plain = plain[: capacity // 2]
        assert float(tree.lowest) == min((w for w in plain if w > -math.inf), default=math.inf)


def test_draws_are_those_of_a_weighted_tree():
    weight = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    trees = BoundedTree(100), WeightedTree(100)
    for tree in trees:
        tree.assign(weight)
        tree.update(torch.tensor([3, 50]), torch.tensor([4.0, -2.0]))
    drawn = [tree.draw(50, torch.Generator().manual_seed(1)) for tree in trees]
    assert torch.equal(*drawn)


def test_a_draw_without_replacement_leaves_the_lowest_as_it_is():
    tree = BoundedTree(3)
    tree.assign(torch.tensor([0.0, -500.0, -1000.0]))
    for n in (1, 3):
        tree.draw_distinct(n, torch.Generator().manual_seed(0))
        assert float(tree.lowest) == pytest.approx(-1000)
