import pytest
import torch
from factories import two_rows
from tensordict import TensorDict

from gfn_rb import Trajectories
from gfn_rb.containers.convert import joined
from gfn_rb.errors import KeyMismatchError, ShapeError


def batch(n, **entries):
    return TensorDict({"x": torch.arange(n), **entries}, [n])


def test_rows_go_where_they_belong():
    rows = joined(
        [
            TensorDict({"x": torch.tensor([10, 11]), "next": {"y": torch.zeros(2, 3)}}, [2]),
            TensorDict({"x": torch.tensor([20]), "next": {"y": torch.ones(1, 3)}}, [1]),
        ],
        [0, 4],
        torch.tensor([2, 0, 1]),
    )
    assert rows.batch_size == (3,)
    assert rows["x"].tolist() == [11, 20, 10]
    assert rows["next", "y"][:, 0].tolist() == [0.0, 1.0, 0.0]


def test_trajectories_are_padded_to_the_longest_and_say_which_way_they_run():
    # Rows of T = 3, forward and silent about it, beside forward and backward ones of T = 4.
    forward = Trajectories(
        state=torch.tensor([[0, 6, 7, -1]]),
        action=torch.tensor([[1, 2, 9]]),
        length=torch.tensor([3]),
        log_reward=torch.tensor([0.5]),
        log_prob=torch.tensor([[-1.0, -2.0, -3.0]]),
    )
    both = two_rows()
    rows = joined([forward.to_tensordict(), both.to_tensordict()], [0, 1], torch.tensor([1, 0, 2]))
    got, expected = Trajectories.from_tensordict(rows), Trajectories.cat([forward, both])[[1, 0, 2]]
    for name in ("state", "action", "length", "log_reward", "log_prob", "is_backward"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert got.state[1].tolist() == [0, 6, 7, -1, -1]
    assert forward.n_steps == 3


def test_a_single_batch_is_taken_as_it_is():
    one = batch(3)
    assert joined([one], [2], torch.arange(3)) is one


def test_empty_nests_do_not_count_as_keys():
    with_nest = batch(1, some=TensorDict(batch_size=[1]))
    assert set(joined([with_nest, batch(1)], [0, 1], torch.arange(2)).keys()) == {"x"}


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        (
            batch(1, y=torch.zeros(1)),
            KeyMismatchError,
            r"members 1 and 3 hold rows of different keys: only the first has \[\], only the "
            r"second \['y'\]",
        ),
        (
            batch(1).rename_key_("x", "y"),
            KeyMismatchError,
            r"the first has \['x'\], only the second \['y'\]",
        ),
        (
            batch(1).float(),
            ShapeError,
            "members 1 and 3 differ in 'x': torch.int64 and torch.float32",
        ),
        (
            TensorDict({"x": torch.zeros(1, 2, dtype=torch.int64)}, [1]),
            ShapeError,
            r"members 1 and 3 differ in 'x': rows of shape \[\] and \[2\]",
        ),
    ],
)
def test_rows_that_do_not_fit_are_named_with_their_members(other, error, message):
    with pytest.raises(error, match=message):
        joined([batch(2), other], [1, 3], torch.arange(3))


@pytest.mark.cuda
def test_rows_on_different_devices_are_named():
    from gfn_rb.errors import ArgumentError

    with pytest.raises(ArgumentError, match="members 0 and 1 differ in 'x': on cpu and cuda:0"):
        joined([batch(1), batch(1).to("cuda")], [0, 1], torch.arange(2))
