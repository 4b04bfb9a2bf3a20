import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from statistics_of_draws import chi_square_p

from gfn_rb.numerics.weighted_tree import weighted_rows
from gfn_rb.numerics.weighted_union import Groups, WeightedUnion, categorical

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
# Of very different size and scale: the second is one row, the last has no mass.
PARTS = [[0.0, 1.0, -math.inf, -2.0], [2.5], [-30.0] * 70, [-math.inf] * 3]


def union_of(parts, device="cpu"):
    trees = []
    for log_weight in parts:
        tree = weighted_rows(len(log_weight), device)
        tree.assign(torch.tensor(log_weight, dtype=torch.float64, device=device))
        trees.append(tree)
    return WeightedUnion(trees)


def softmax(parts):
    flat = torch.tensor(list(itertools.chain(*parts)), dtype=torch.float64)
    return torch.softmax(flat, 0).tolist()


def flat(parts, part, row):
    """The place of each row when the parts stand one after another."""
    start = np.cumsum([0, *map(len, parts)])
    return start[part.cpu().numpy()] + row.cpu().numpy()


def test_log_probabilities_by_hand():
    union = union_of([[math.log(1), math.log(2)], [-math.inf], [math.log(5)]])
    assert float(union.log_total) == pytest.approx(math.log(8))
    log_prob = union.log_prob(torch.tensor([2, 0, 0, 1]), torch.tensor([0, 1, 0, 0]))
    assert log_prob.exp().tolist() == pytest.approx([5 / 8, 2 / 8, 1 / 8, 0.0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", [0.0, 1e4])
def test_draws_with_replacement_have_the_law(device, level):
    parts = [[w + level for w in part] for part in PARTS]
    generator = torch.Generator(device).manual_seed(1)
    draws = flat(parts, *union_of(parts, device).draw(50_000, generator))
    total = sum(map(len, parts))
    assert chi_square_p(np.bincount(draws, minlength=total), softmax(parts)) > 1e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["draw_distinct", "_perturbed"])
@pytest.mark.parametrize("spread", [0.5, 6.0])
def test_distinct_draws_have_the_law_of_successive_sampling(device, method, spread):
    # At the larger spread most draws with replacement repeat.
    weight = (torch.linspace(0, spread, 5, dtype=torch.float64) - 2000).tolist()
    parts = [[weight[0], weight[3]], [-math.inf], [weight[4]], [weight[1], -math.inf, weight[2]]]
    p = softmax(parts)
    rows = [i for i, each in enumerate(p) if each > 0]
    union, generator = union_of(parts, device), torch.Generator(device).manual_seed(2)
    counts = dict.fromkeys(itertools.permutations(rows, 2), 0)
    for _ in range(1500):
        part, row, enough = getattr(union, method)(2, generator)
        assert bool(enough)
        counts[tuple(flat(parts, part, row).tolist())] += 1
    law = [p[i] * p[j] / (1 - p[i]) for i, j in counts]
    assert chi_square_p(list(counts.values()), law) > 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_distinct_draws_reach_rows_far_below_any_float(device):
    # exp(-1e4) is 0 in float64: the largest come first, from whichever part.
    parts = [[-2e4 * i for i in range(20)], [-2e4 * i - 1e4 for i in range(20)]]
    part, row, enough = union_of(parts, device).draw_distinct(40)
    assert bool(enough)
    assert part.tolist() == [0, 1] * 20
    assert row.tolist() == [i // 2 for i in range(40)]


@pytest.mark.parametrize("device", DEVICES)
def test_distinct_draws_say_when_too_few_rows_have_weight(device):
    union = union_of([[0.0, -math.inf], [-math.inf], [1.0]], device)
    part, row, enough = union.draw_distinct(3)
    assert not bool(enough)
    assert set(flat([[0] * 2, [0], [0]], part, row)[:2].tolist()) == {0, 3}


weights = st.sampled_from([-math.inf, -5e3, -3.0, 0.0, 0.5, 700.0])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(weights, min_size=1, max_size=8), min_size=1, max_size=4), st.data())
def test_distinct_draws_are_distinct_and_leave_the_weights_alone(parts, data):
    union, before = union_of(parts), union_of(parts)
    alive = sum(w > -math.inf for part in parts for w in part)
    if alive == 0:
        assert float(union.log_total) == -math.inf
        return
    n = data.draw(st.integers(1, sum(map(len, parts))))
    part, row, enough = union.draw_distinct(n)
    drawn = flat(parts, part, row).tolist()
    assert bool(enough) == (n <= alive)
    assert len(set(drawn[:alive])) == min(n, alive)
    values = list(itertools.chain(*parts))
    assert all(values[i] > -math.inf for i in drawn[:alive])
    for tree, other in zip(union.parts, before.parts, strict=True):
        assert torch.equal(tree.log_weight, other.log_weight)
        assert torch.equal(tree.log_total, other.log_total)


@pytest.mark.parametrize(("uniform", "drawn"), [(0.0, 1), (0.75, 3), (1 - 2**-53, 3)])
def test_categorical_at_the_ends(monkeypatch, uniform, drawn):
    monkeypatch.setattr(torch, "rand", lambda n, dtype, **_: torch.full((n,), uniform, dtype=dtype))
    weight = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    assert categorical(weight, 2).tolist() == [drawn] * 2


def test_categorical_never_draws_a_weight_of_zero():
    weight = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    draws = categorical(weight, 20_000, torch.Generator().manual_seed(0))
    counts = np.bincount(draws, minlength=5)
    assert chi_square_p(counts, [0, 0.75, 0, 0.25, 0]) > 1e-3


def test_rows_are_sorted_into_groups_in_their_order():
    groups = Groups(torch.tensor([2, 0, 2, 0, 3]), 4)
    assert groups.counts == [2, 0, 2, 1]
    parts = groups.split(torch.tensor([10, 11, 12, 13, 14]))
    assert [part.tolist() for part in parts] == [[11, 13], [], [10, 12], [14]]
    assert groups.join(parts).tolist() == [10, 11, 12, 13, 14]
    assert groups.rank.tolist() == [2, 0, 3, 1, 4]
