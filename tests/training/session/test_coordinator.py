"""What the ranks of a run tell each other, in threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from training.training_runs import GRID, trained

from gfn_rb.errors import ArgumentError, TransportError
from gfn_rb.remote.protocol.roles import assign_roles
from gfn_rb.training.session.coordinator import TEAM_TAG, Found, RefusedError, Team, _Kind
from gfn_rb.transports import LocalTransport


def teams(size=3, n_managers=0, patience=5.0):
    transports = LocalTransport.group(size, timeout=5.0)
    roles = assign_roles(size, n_managers, [None] * size)
    return [Team(each, roles, patience) for each in transports], transports


def together(*functions):
    with ThreadPoolExecutor(len(functions)) as pool:
        return [pool.submit(each) for each in functions]


def found(calls, *modes):
    return Found({"step": 4, "reward_calls": calls}, {"sent": calls}, torch.tensor(modes).long())


def unprepared():
    raise AssertionError("rank 0 alone prepares")


def no_folder():
    raise ArgumentError("out must be a new folder")


def test_rank_0_prepares_and_all_know_the_folder(tmp_path):
    members, _ = teams()
    prepare = [lambda: tmp_path, unprepared, unprepared]
    told = together(*[lambda t=t, p=p: t.agree(p) for t, p in zip(members, prepare, strict=True)])
    assert [each.result() for each in told] == [tmp_path.resolve()] * 3


def test_a_relative_folder_is_the_same_for_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    members, _ = teams(2)
    members[0].agree(lambda: Path("run"))
    assert members[1].agree(unprepared) == tmp_path.resolve() / "run"


def test_all_are_told_why_there_is_no_folder():
    members, _ = teams()
    with pytest.raises(ArgumentError, match="out must be a new folder"):
        members[0].agree(no_folder)
    for member in members[1:]:
        with pytest.raises(RefusedError, match="out must be a new folder"):
            member.agree(unprepared)


def test_all_are_told_when_rank_0_is_interrupted():
    def interrupted():
        raise KeyboardInterrupt

    members, _ = teams(2)
    with pytest.raises(KeyboardInterrupt):
        members[0].agree(interrupted)
    with pytest.raises(RefusedError):
        members[1].agree(unprepared)


def test_rank_0_that_says_nothing_is_named():
    members, _ = teams(2, patience=0.05)
    with pytest.raises(TransportError, match=r"rank 0 named no run folder within 0\.05 s"):
        members[1].agree(unprepared)


def test_progress_is_that_of_all_ranks():
    members, _ = teams(3)
    trainers = [trained(GRID, n) for n in (1, 2, 3)]
    for member, trainer in reversed([*zip(members, trainers, strict=True)]):
        member.stepped(trainer)
    shown = members[0].progress(trainers[0], 1.25)
    calls = sum(trainer.discovery.calls for trainer in trainers)
    modes = "|".join(str(trainer.discovery.modes_found) for trainer in trainers)
    assert shown == f"loss 1.250, modes {modes} of 4, {calls} reward calls"


def test_news_is_told_now_and_then(monkeypatch):
    monkeypatch.setattr("gfn_rb.training.session.coordinator._EVERY", 60.0)
    members, _ = teams(2)
    trainer = trained(GRID, 1)
    members[1].stepped(trainer)
    trainer.step()
    members[1].stepped(trainer)  # too soon after the last
    members[0].look()
    assert members[0].progress(trainer, 0.0).endswith(f"{trainer.discovery.calls + 8} reward calls")
    for _ in range(2):
        trainer.step()
        members[1]._next = 0.0
        members[1].stepped(trainer)
    members[0].look()  # at all there is
    assert members[0].progress(trainer, 0.0).endswith(f"{2 * trainer.discovery.calls} reward calls")


def test_what_rank_0_cannot_read_is_logged_and_passed_over(caplog):
    members, transports = teams(2)
    transports[1].isend([b"nonsense"], 0, TEAM_TAG)
    members[1]._post(_Kind.NEWS, {"calls": 5, "modes": 1})
    members[0].look()
    (message,) = caplog.messages
    assert message.startswith("rank 0: cannot read what rank 1 sent: ")
    assert members[0].training_elsewhere() == [1]
    assert members[0]._news == {1: {"calls": 5, "modes": 1}}


def test_rank_0_gathers_what_all_found():
    members, _ = teams(4, n_managers=1)
    assert members[0].layout.workers == (0, 1, 2)
    given = [found(1, 5, 6), found(2), found(3, 6, 7)]
    for each in together(*[lambda i=i: members[i].finish(given[i]) for i in range(3)]):
        each.result()
    known = members[0].found
    assert sorted(known) == [0, 1, 2]
    assert [known[rank].row["reward_calls"] for rank in range(3)] == [1, 2, 3]
    assert [known[rank].exchange for rank in range(3)] == [{"sent": 1}, {"sent": 2}, {"sent": 3}]
    assert [known[rank].modes.tolist() for rank in range(3)] == [[5, 6], [], [6, 7]]
    assert members[0].modes_found() == 3
    assert members[0].lost == {}


def test_rank_0_does_without_a_rank_that_is_lost(caplog):
    members, transports = teams()
    transports[1].close()
    for each in together(*[lambda i=i: members[i].finish(found(i)) for i in (0, 2)]):
        each.result()
    assert sorted(members[0].found) == [0, 2]
    assert list(members[0].lost) == [1]
    (message,) = caplog.messages
    assert message.startswith("rank 0: goes on without rank 1: ")


def test_rank_0_does_without_a_rank_that_is_silent(caplog):
    members, _ = teams(2, patience=0.1)
    members[0].finish(found(1))
    assert members[0].lost == {1: "it has been silent for 0.1 s"}
    assert "goes on without rank 1" in caplog.text


def test_silence_counts_from_when_rank_0_begins_to_wait():
    members, _ = teams(2, patience=5.0)
    members[0]._heard[1] -= 100.0  # it had better things to do than listen
    waiting = threading.Thread(target=members[0].finish, args=(found(1),))
    waiting.start()
    time.sleep(0.1)
    members[1].finish(found(2))
    waiting.join(5)
    assert sorted(members[0].found) == [0, 1]
    assert members[0].lost == {}


def test_a_rank_that_told_what_it_found_may_leave(caplog):
    members, transports = teams(2, patience=0.5)
    members[1].finish(found(2))
    transports[1].close()
    members[0].finish(found(1))
    assert sorted(members[0].found) == [0, 1]
    assert members[0].lost == {}
    assert caplog.messages == []


def test_a_rank_that_tells_news_is_waited_for():
    members, _ = teams(2, patience=1.0)
    trainer = trained(GRID, 1)
    waiting = threading.Thread(target=members[0].finish, args=(found(1),))
    waiting.start()
    for _ in range(8):
        time.sleep(0.2)
        members[1]._next = 0.0  # news are told every half second
        members[1].stepped(trainer)
    members[1].finish(found(2))
    waiting.join(5)
    assert sorted(members[0].found) == [0, 1]
    assert members[0].lost == {}


def test_rank_0_told_to_stop_waits_no_longer():
    members, _ = teams(3, patience=60.0)
    stop = threading.Event()
    waiting = threading.Thread(target=members[0].finish, args=(found(1), stop.is_set))
    waiting.start()
    members[1].finish(found(2))
    time.sleep(0.1)
    assert waiting.is_alive()
    stop.set()
    waiting.join(5)
    assert not waiting.is_alive()
    assert sorted(members[0].found) == [0, 1]
    assert members[0].lost == {2: "rank 0 was told to stop waiting for it"}


def test_a_rank_told_to_stop_does_not_wait_for_rank_0():
    members, _ = teams(2, patience=60.0)
    stop = threading.Event()
    waiting = threading.Thread(target=members[1].finish, args=(found(2), stop.is_set))
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive()  # rank 0 has not taken it
    stop.set()
    waiting.join(5)
    assert not waiting.is_alive()


def test_without_rank_0_a_rank_goes_on(caplog):
    members, transports = teams(2)
    transports[0].close()
    trainer = trained(GRID, 1)
    members[1].stepped(trainer)
    members[1].finish(found(2))
    assert list(members[1].lost) == [0]
    (message,) = caplog.messages
    assert message.startswith("rank 1: goes on without rank 0: ")
