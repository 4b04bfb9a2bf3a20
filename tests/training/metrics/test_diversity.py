import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gfn_rb.envs import TFBind8
from gfn_rb.errors import ShapeError
from gfn_rb.training.metrics import SeparatedModes, mean_distance, norm_distance

CITY_BLOCK = norm_distance(1.0)


def test_mean_distance_by_hand():
    state = torch.tensor([[0, 0], [0, 3], [1, 0]])  # 3, 1 and 4 apart; 1, 1 and 2 places
    assert mean_distance(state, CITY_BLOCK) == pytest.approx(8 / 3)
    assert mean_distance(state) == pytest.approx(4 / 3)
    assert mean_distance(state[:1]) is None
    assert mean_distance(state[:0]) is None


def test_states_may_be_single_numbers():
    assert mean_distance(torch.tensor([0, 3, 1]), CITY_BLOCK) == pytest.approx(2)


def test_any_distance_will_do():
    longer = lambda a, b: (a.sum(1)[:, None] - b.sum(1)).abs()  # noqa: E731
    assert mean_distance(torch.tensor([[0, 0], [0, 3], [1, 0]]), longer) == pytest.approx(2)


def test_a_distance_of_a_wrong_shape_is_refused():
    with pytest.raises(ShapeError, match=r"distance must return shape \[2, 2\], got \[2\]"):
        mean_distance(torch.zeros(2, 1), lambda a, b: torch.zeros(2))


def one_by_one(batches, threshold, cutoff):
    """What going through each batch from its best does, slowly."""
    modes = []
    for batch in batches:
        for state, score in sorted(batch, key=lambda item: -item[1]):
            if score >= threshold and all(abs(state - mode) > cutoff for mode in modes):
                modes.append(state)
    return modes


ITEMS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), max_size=10)


@given(st.lists(ITEMS, max_size=4), st.integers(0, 3), st.integers(0, 4))
def test_modes_are_separated_greedily(batches, threshold, cutoff):
    modes = SeparatedModes(float(threshold), float(cutoff), CITY_BLOCK)
    for batch in batches:
        state = torch.tensor([[state] for state, _ in batch], dtype=torch.int64).reshape(-1, 1)
        modes.add(state, torch.tensor([score for _, score in batch], dtype=torch.float32))
    expected = one_by_one(batches, threshold, cutoff)
    assert len(modes) == len(expected)
    assert ([] if modes.state is None else modes.state[:, 0].tolist()) == expected


def test_tfbind8_has_328_modes_more_than_one_letter_apart():
    """As published: in descending score, down to 0.8892 when rounded (Kim et al. 2023)."""
    env = TFBind8()
    modes = SeparatedModes(0.88919, 1.0)
    state = env.terminating_states()
    modes.add(state, env.score(state))
    assert len(modes) == 328
