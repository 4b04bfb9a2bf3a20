import time

import pytest

from gfn_rb.remote.patience import GRACE, Patience


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)


def test_waits_are_cut_into_stretches_and_end_when_they_are_to():
    patience = Patience()
    assert patience.left(130.0) == 30.0
    assert patience.stretch(130.0) == 0.1
    assert patience.stretch(100.05) == pytest.approx(0.05)
    assert patience.left(99.0) == -1.0
    assert patience.stretch(99.0) == 0.0


def test_who_is_to_stop_has_one_second_for_all_waits():
    told = []
    patience = Patience(lambda: bool(told))
    patience.spend(50.0)
    assert patience.left(130.0) == 30.0
    told.append("to stop")
    assert patience.left(130.0) == GRACE == 1.0
    assert patience.left(100.25) == 0.25  # never more than there was
    patience.spend(0.75)
    assert patience.left(130.0) == 0.25
    assert patience.stretch(130.0) == 0.1
    patience.spend(0.5)
    assert patience.left(130.0) < 0
    assert patience.stretch(130.0) == 0.0
