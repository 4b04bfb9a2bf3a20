"""Much traffic between seven processes: every row sent is accounted for at both ends.

``GFN_RB_MESSAGES=6000 pytest tests/remote/test_traffic.py`` has each worker add so many batches in
each round, for as long as that takes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from remote.traffic_rank import KEPT, RANKS, SHARED
from transports import ranks

from gfn_rb.remote.protocol.messages import OUTCOMES

pytestmark = pytest.mark.slow

MESSAGES = int(os.environ.get("GFN_RB_MESSAGES", "30"))  # of each worker in each round, over MPI
FEWER = 3  # by so much over Gloo, which differs in the transport alone
PROGRAM = Path(__file__).with_name("traffic_rank.py")


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
