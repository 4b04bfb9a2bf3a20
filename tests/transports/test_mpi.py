"""MPI: what is said without it, and life after the death of a rank."""

from __future__ import annotations

import sys

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
