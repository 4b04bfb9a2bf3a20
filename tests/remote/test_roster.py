import time

from gfn_rb.remote.roster import EXPECTED, GONE, HERE, LOST, REFUSED, Roster


def states(roster):
    return [sender.state for sender in roster.senders.values()]


def test_workers_come_and_go():
    roster = Roster([3, 5], 60.0)
    assert states(roster) == [EXPECTED, EXPECTED]
    assert 3 in roster
    assert 4 not in roster
    assert not roster.heard(3, 10)
    assert not roster.heard(3, 5)
    assert roster.senders[3].bytes == 15
    assert states(roster) == [HERE, EXPECTED]
    assert roster.leave(3, GONE)
    assert (roster.finished, roster.present) == (False, [5])
    assert roster.leave(5, LOST)
    assert (roster.finished, roster.present, roster.lost) == (True, [], [5])


def test_who_has_gone_cannot_be_lost():
    roster = Roster([1], 60.0)
    roster.leave(1, GONE)
    assert not roster.leave(1, LOST)
    assert states(roster) == [GONE]


def test_the_lost_may_return():
    roster = Roster([1], 60.0)
    roster.leave(1, LOST)
    assert roster.heard(1, 1)
    assert not roster.finished
    roster.leave(1, REFUSED)
    assert roster.finished


def test_silence_is_noticed(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    roster = Roster([1, 2], 5.0)
    now = 104.0
    roster.heard(1, 1)
    assert roster.silent() == []
    now = 105.5
    assert roster.silent() == [2]
    roster.wait_anew()
    assert roster.silent() == []
    now = 112.0
    roster.leave(1, GONE)
    assert roster.silent() == [2]


def test_when_a_worker_was_last_seen_is_told(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1234.5)
    roster = Roster([1, 2], 5.0)
    roster.heard(1, 1)
    assert [sender.last_seen for sender in roster.senders.values()] == [1234.5, 0.0]


def test_silence_before_a_restore_does_not_count(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    roster = Roster([1], 5.0)
    now = 110.0
    roster.load_state_dict(roster.state_dict())
    assert roster.silent() == []


def test_restored_workers_are_expected_again():
    roster, again = Roster([1, 2], 5.0), Roster([1, 3], 5.0)
    roster.heard(1, 7)
    roster.senders[1].count(items=4, stored=3, rejected=1)
    roster.leave(1, GONE)
    again.load_state_dict(roster.state_dict())
    sender = again.senders[1]
    assert (sender.bytes, sender.items, sender.outcomes) == (7, 4, 4)
    assert states(again) == [EXPECTED, EXPECTED]
