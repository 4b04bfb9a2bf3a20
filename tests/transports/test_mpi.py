"""MPI: its absence, and life after the death of a rank."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from transports.ranks import PROGRAM, mpi_kind, reports, under_mpiexec

from gfn_rb.errors import TransportError
from gfn_rb.transports import MPITransport

DIED = "lost 1: its process died"


def test_without_mpi4py_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(
        TransportError, match=r"pip install '\.\[mpi\]' in a clone of gfn_rb"
    ) as caught:
        MPITransport()
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.skipif(mpi_kind() != "Open MPI", reason="needs Open MPI's fault tolerance")
def test_others_go_on_after_a_rank_was_killed() -> None:
    program = PROGRAM.with_name("killed_rank.py")
    first, third = reports(under_mpiexec(3, program, options=("--with-ft", "ulfm")))
    assert first["saw"] == [DIED, DIED, DIED, DIED, DIED, DIED, "fine", "fine"]
    assert third["saw"] == ["fine", "fine"]
    assert first["lost"] == [1]
    assert (first["rank"], third["rank"]) == (0, 2)
    assert len(set(first["hosts"])) == 1
    assert first["hosts"][0]
    refused = "ArgumentError: comm is a Group; expected an mpi4py Intracomm"
    assert first["refused"] == third["refused"] == refused


def test_groups_of_dead_processes_are_freed() -> None:
    class Group:
        made, freed = 0, 0

        def __init__(self) -> None:
            Group.made += 1

        def Get_size(self) -> int:
            return 1

        def Translate_ranks(self, _: object, __: object) -> list[int]:
            return [0]

        def Free(self) -> None:
            Group.freed += 1

    transport = MPITransport.__new__(MPITransport)
    comm = SimpleNamespace(Get_failed=Group, Get_group=Group, Ack_failed=lambda: None)
    transport._comm = comm
    transport._mpi = SimpleNamespace(Exception=ZeroDivisionError)
    transport._lost, transport._unreported, transport._hosts = {}, [], ["here"]
    for _ in range(5):
        transport._record_failures()
    assert transport.lost == {0}
    assert Group.made == Group.freed == 6
