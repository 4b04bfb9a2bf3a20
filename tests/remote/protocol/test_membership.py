import time

from gfn_rb.remote.ranks import Membership


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def states(ranks):
    return [each["state"] for each in ranks.state_dict().values()]


def test_ranks_that_left_or_are_unknown_cannot_be_lost_and_lost_ones_may_return():
    ranks = Membership([1, 2])
    ranks.leave(1, "gone")
    assert not ranks.leave(1, "lost", "it is silent")
    assert not ranks.leave(3, "lost")
    assert 3 not in ranks.present
    ranks.leave(2, "lost", "it was silent")
    assert (states(ranks), ranks.lost) == (["gone", "lost"], {2: "it was silent"})
    assert ranks.seen(2)
    assert (ranks.present, ranks[2].why) == ([2], "")
    ranks.leave(2, "refused")
    assert (ranks.present, ranks.lost) == ([], {})


def test_silence_is_noticed():
    clock = Clock()
    ranks = Membership([1, 2], 5.0, clock)
    clock.now = 104.0
    ranks.seen(1)
    assert ranks.silent() == []
    clock.now = 105.5
    assert ranks.silent() == [2]
    ranks.restart_silence()
    assert ranks.silent() == []
    clock.now = 112.0
    ranks.leave(1)
    assert ranks.silent() == [2]


def test_restored_ranks_are_expected_again_and_silence_before_does_not_count(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1234.5)
    clock = Clock()
    ranks, again = Membership([1, 2]), Membership([1, 3], 5.0, clock)
    ranks.seen(1)
    ranks.leave(1, "lost", "it was silent")
    clock.now = 110.0
    again.load_state_dict(ranks.state_dict())
    assert states(again) == ["expected", "expected"]
    assert again[1].last_seen == 1234.5
    assert again.lost == {}
    assert again.silent() == []
