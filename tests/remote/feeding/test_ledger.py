import pytest
import torch
from remote.remote_runs import objects

from gfn_rb import fifo_buffer
from gfn_rb.errors import CheckpointMismatchError
from gfn_rb.remote.feeding.ledger import Ledger

ALL = torch.arange(3)


@pytest.fixture
def rb():
    rb = fifo_buffer(3)
    rb.extend(objects([1, 2, 3]))
    return rb


@pytest.fixture
def ledger(rb):
    ledger = Ledger(rb, 4)
    ledger.look()
    return ledger


def test_origins_add_up(ledger):
    ledger.credit(torch.tensor([0, 2]), 1)
    ledger.credit(torch.tensor([2]), 3)
    assert ledger.sent(ALL, 1).tolist() == [True, False, True]
    assert ledger.sent(ALL, 3).tolist() == [False, False, True]
    assert not ledger.sent(ALL, 0).any()
    assert not ledger.given(ALL, 1).any()


def test_what_is_known_of_an_object_ends_with_it(rb, ledger):
    ledger.credit(ALL, 1)
    ledger.give(ALL, 2)
    rb.extend(objects([4]))  # in the place of 1
    ledger.look()
    assert ledger.sent(ALL, 1).tolist() == [False, True, True]
    assert ledger.given(ALL, 2).tolist() == [False, True, True]


def test_what_is_known_of_an_object_moves_with_it(rb, ledger):
    ledger.credit(torch.tensor([0]), 1)
    ledger.give(torch.tensor([2]), 2)
    arrival = ledger.arrival(ALL).tolist()
    rb[:] = objects([3, 1, 5])
    ledger.look()
    assert ledger.sent(ALL, 1).tolist() == [False, True, False]
    assert ledger.given(ALL, 2).tolist() == [True, False, False]
    assert ledger.arrival(ALL[:2]).tolist() == [arrival[2], arrival[0]]
    assert int(ledger.arrival(ALL[2:])) > max(arrival)


def test_later_arrivals_have_higher_numbers(rb, ledger):
    first = ledger.arrival(ALL)
    assert (first[1:] > first[:-1]).all()
    rb.extend(objects([4, 5]))
    ledger.look()
    assert (ledger.arrival(ALL[:2]) > first.max()).all()


def test_a_receiver_can_start_anew(ledger):
    ledger.give(ALL, 2)
    ledger.give(ALL, 3)
    ledger.forget_receiver(2)
    assert not ledger.given(ALL, 2).any()
    assert ledger.given(ALL, 3).all()


@pytest.mark.parametrize("n_ranks", [4, 2, 6])
def test_a_restored_ledger_goes_on(rb, ledger, n_ranks):
    rb.extend(objects([4]))  # one more arrival than there are rows
    ledger.look()
    ledger.credit(torch.tensor([1]), 1)
    ledger.give(torch.tensor([0]), 0)
    other = Ledger(rb, n_ranks)
    other.look()
    other.give(ALL, n_ranks - 1)
    other.load_state_dict(ledger.state_dict())
    assert not other.given(ALL, n_ranks - 1).any()
    assert other.sent(ALL, 1).tolist() == [False, True, False]
    assert other.given(ALL, 0).tolist() == [True, False, False]
    rb.extend(objects([7, 8]))
    ledger.look()
    other.look()
    assert other.arrival(ALL).tolist() == ledger.arrival(ALL).tolist()


def test_what_is_saved_is_known_of_what_the_buffer_holds_now(rb, ledger):
    ledger.credit(ALL, 1)
    rb.extend(objects([4]))  # in the place of 1, and not looked at
    assert ledger.state_dict()["origin"][:, 1].tolist() == [False, True, True]


def test_a_ledger_of_another_buffer_is_refused(ledger):
    rb = fifo_buffer(3)
    rb.extend(objects([1]))
    with pytest.raises(CheckpointMismatchError, match="ledger of 3 rows, expected 1"):
        Ledger(rb, 4).load_state_dict(ledger.state_dict())
