"""Much traffic between seven processes: every row sent is accounted for at both ends.

``GFN_RB_MESSAGES=6000 pytest tests/remote/test_traffic.py`` has each worker add so many batches in
each round, for as long as that takes.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from remote.traffic_rank import (
    KEPT,
    LARGEST,
    MODES,
    RANKS,
    ROUNDS,
    SHARED,
    WORKERS,
)
from transports import ranks

from gfn_rb.remote.protocol.messages import OUTCOMES

pytestmark = pytest.mark.slow

MESSAGES = int(os.environ.get("GFN_RB_MESSAGES", "60"))  # of each worker in each round, over MPI
FEWER = 3  # by so much over Gloo, which differs in the transport alone
PROGRAM = Path(__file__).with_name("traffic_rank.py")


class Round(NamedTuple):
    """What one round left behind.

    Attributes:
        messages: how many batches each worker added.
        manager: what the manager holds and says.
        workers: what each worker did, by rank.
    """

    messages: int
    manager: dict[str, Any]
    workers: dict[int, dict[str, Any]]

    def sender(self, rank: int) -> dict[str, Any]:
        """What the manager knows of a worker."""
        return self.manager["senders"][str(rank)]

    @property
    def to_store(self) -> list[int]:
        """All that was sent to be stored and fits, over and over where it was."""
        return [value for each in self.workers.values() for value in each["to_store"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes wrote down what they did in all rounds over each transport.

    Most of the time that takes they import torch: the same processes serve both transports.
    """
    folder = tmp_path_factory.mktemp("traffic")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ranks, "SECONDS", ranks.SECONDS + MESSAGES / 4)
        try:
            ranks.under_mpiexec(RANKS, PROGRAM, str(folder), str(MESSAGES), str(MESSAGES // FEWER))
        except pytest.skip.Exception:  # there is no MPI
            ranks.side_by_side(RANKS, PROGRAM, str(folder), "0", str(MESSAGES // FEWER))
    return folder


@pytest.fixture(scope="module", params=["mpi", "gloo"])
def rounds(request: pytest.FixtureRequest, folder: Path) -> dict[str, Round]:
    """Both rounds over one transport."""
    if request.param == "mpi":
        ranks.mpiexec()

    def read(name: str) -> Round:
        paths = [folder / f"{request.param}-{name}-{rank}.json" for rank in range(4)]
        manager, *workers = (json.loads(path.read_text()) for path in paths)
        messages = MESSAGES if request.param == "mpi" else MESSAGES // FEWER
        return Round(messages, manager, dict(zip(WORKERS, workers, strict=True)))

    return {name: read(name) for name in ROUNDS}


@pytest.mark.parametrize("n_managers", SHARED)
@pytest.mark.parametrize("kind", ["mpi", "gloo"])
def test_managers_hold_the_best_of_all_together(folder: Path, kind: str, n_managers: int) -> None:
    if kind == "mpi":
        ranks.mpiexec()
    paths = [folder / f"{kind}-shared{n_managers}-{rank}.json" for rank in range(RANKS)]
    found = [json.loads(path.read_text()) for path in paths]
    managers, workers = found[:n_managers], dict(enumerate(found))
    for rank in range(n_managers):
        del workers[rank]
    held = [value for each in managers for value in each["held"]]
    everything = {value for each in workers.values() for value in each["sent"]}
    assert len(held) == len(set(held))  # no object twice
    assert sorted(held)[-KEPT:] == sorted(everything)[-KEPT:]
    for rank, worker in workers.items():
        counts = worker["counts"]
        theirs = [each["senders"][str(rank)] for each in managers]
        for name in (*OUTCOMES, "batches", "errors", "fed"):
            assert counts[name] == sum(each[name] for each in theirs), name
        assert counts["sent"] == sum(each["items"] for each in theirs) == len(worker["sent"])
        assert counts["bytes_sent"] == sum(each["bytes"] for each in theirs)
        assert counts["lost"] == counts["resent"] == 0
        union = worker["union"]
        assert union == sorted(set(union), reverse=True)
        others = (each["sent"] for other, each in workers.items() if other != rank)
        assert set() < set(worker["fed"]) <= set().union(*others)


@pytest.mark.parametrize("name", ROUNDS)
def test_counters_of_each_worker_are_those_of_the_manager(
    rounds: dict[str, Round], name: str
) -> None:
    played = rounds[name]
    for rank, worker in played.workers.items():
        mine, theirs = worker["counts"], played.sender(rank)
        for outcome in (*OUTCOMES, "errors", "batches", "fed"):
            assert mine[outcome] == theirs[outcome], (rank, outcome)
        assert mine["sent"] == theirs["items"] == sum(mine[each] for each in OUTCOMES) > 0
        assert mine["bytes_sent"] == theirs["bytes"]
        assert mine["replies"] == mine["batches"]
        assert mine["lost"] == worker["unanswered"] == theirs["unreadable"] == 0
        parts = ("reduced", "filtered", "skipped", "sent")
        assert mine["offered"] == sum(mine[each] for each in parts)
        assert theirs["state"] == "gone"
    batches = sum(worker["counts"]["batches"] for worker in played.workers.values())
    assert played.manager["batches"] == batches


def test_every_mode_had_its_share(rounds: dict[str, Round]) -> None:
    modes = {mode.__name__ for mode in MODES}
    for played in rounds.values():
        assert {worker["mode"] for worker in played.workers.values()} == modes
        for worker in played.workers.values():
            counts = worker["counts"]
            assert 8 <= counts["batches"] <= played.messages
            assert counts["skipped"] == 0 or worker["mode"] == "NonBlocking"
    largest = max(
        worker["largest"] for played in rounds.values() for worker in played.workers.values()
    )
    assert largest > LARGEST // 2


def test_a_roomy_buffer_holds_exactly_what_was_sent(rounds: dict[str, Round]) -> None:
    played = rounds["roomy"]
    sent, held = played.to_store, played.manager["held"]
    assert sorted(held) == sorted(set(sent))
    counts = [played.sender(rank) for rank in WORKERS]
    assert sum(each["stored"] for each in counts) == played.manager["stored"] == len(held)
    assert sum(each["duplicates"] for each in counts) == len(sent) - len(held) > 0
    assert sum(each["rejected"] + each["scored"] for each in counts) == 0


def test_a_crowded_buffer_holds_exactly_the_best(rounds: dict[str, Round]) -> None:
    played = rounds["crowded"]
    assert sorted(played.manager["held"]) == sorted(set(played.to_store))[-500:]
    counts = Counter[str]()
    for rank in WORKERS:
        counts.update({name: played.sender(rank)[name] for name in OUTCOMES})
    assert counts["rejected"] > 0
    assert counts["stored"] > 500
    assert counts["stored"] + counts["rejected"] + counts["duplicates"] == len(played.to_store)
    assert played.workers[2]["counts"]["scored"] == counts["scored"] > 0
    assert played.workers[1]["counts"]["filtered"] > 0


@pytest.mark.parametrize("name", ROUNDS)
def test_rows_that_do_not_fit_are_refused_and_no_others(
    rounds: dict[str, Round], name: str
) -> None:
    played = rounds[name]
    for rank, worker in played.workers.items():
        assert played.sender(rank)["refused"] == worker["unfit"]
    if name == "roomy":  # where a worker that leaves out nothing has some
        assert played.workers[1]["unfit"] > 0


@pytest.mark.parametrize("name", ROUNDS)
def test_what_is_fed_is_what_others_found_and_arrives_unharmed(
    rounds: dict[str, Round], name: str
) -> None:
    played = rounds[name]
    everything = set(played.to_store)
    assert played.manager["intact"]
    for rank, worker in played.workers.items():
        fed, counts = worker["fed"], worker["counts"]
        assert worker["intact"]
        assert len(fed) == len(set(fed)) == counts["fed"] - counts["fed_duplicates"] > 0
        assert set(fed) <= everything
        assert not any(value % 4 == rank for value in fed)  # which only it could have sent
