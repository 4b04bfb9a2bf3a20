"""MPI: its absence, the pieces of messages, and life after the death of a rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transports.ranks import PROGRAM, mpi_kind, reports, under_mpiexec

from gfn_rb.codec.primitives import LazyBuffer
from gfn_rb.errors import CLOSED, TransportError
from gfn_rb.transports import MPITransport
from gfn_rb.transports.base import EAGER, EAGER_ON_SHARED_CORE, Envelope
from gfn_rb.transports.mpi import PREAMBLE, WHOLE, cut

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


ON_CORES = """
import json, os, sys, time
import transports.little
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
os.sched_setaffinity(0, [int(sys.argv[1 + rank])])
from gfn_rb.transports.mpi import MPITransport
transport = MPITransport()
transport.send([b"here"], 1 - rank)
transport.recv()
while transport.host(rank) is None:
    time.sleep(0.01)
print(json.dumps({"rank": rank, "eager": transport._eager}), flush=True)
transport.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs ranks on chosen cores")
def test_ranks_without_a_core_each_leave_it_to_others_at_once(tmp_path: Path) -> None:
    (program := tmp_path / "on_cores.py").write_text(ON_CORES)
    one, *others = sorted(os.sched_getaffinity(0))
    found = reports(under_mpiexec(2, program, str(one), str(one)))
    assert [each["eager"] for each in found] == [EAGER_ON_SHARED_CORE] * 2
    for other in others[:1]:
        found = reports(under_mpiexec(2, program, str(one), str(other)))
        assert [each["eager"] for each in found] == [EAGER] * 2


LATE = """
import json, sys, time
import mpi4py
mpi4py.rc.thread_level = sys.argv[2]
import transports.little
from gfn_rb.errors import TransportTimeoutError
from gfn_rb.transports.mpi import MPITransport
from mpi4py import MPI
how, world = sys.argv[1], MPI.COMM_WORLD
rank, said = world.Get_rank(), ""
if rank == 2 and how == "late":
    world.recv(source=0)  # sent once rank 0 has its endpoint, and a message to this one on its way
start = time.monotonic()
transport = MPITransport(timeout=60.0)
made_in = time.monotonic() - start
if rank == 2:
    received = bytes(transport.recv(0).data) if how == "late" else b""
    transport.close()
elif rank == 1 or how == "early":
    transport.send([bytes([rank])], 1 - rank)
    received = bytes(transport.recv(1 - rank).data)
else:
    small, large = transport.isend([b"x" * 8], 2), transport.isend([bytes(3_000_000)], 1)
    for call in (lambda: small.wait(0.2), lambda: transport.recv(timeout=0.1)):
        try:
            call()
        except TransportTimeoutError as error:
            said += str(error)
    world.send("go on", dest=2)
    small.wait()
    large.wait()
    transport.send([b"0"], 1)
    received = bytes(transport.recv(1).data)
if how == "late" and rank == 1:
    received = bytes(transport.recv(0).data)[:1]
print(json.dumps({"rank": rank, "received": received.hex(), "said": said, "made": made_in}))
sys.stdout.flush()
transport.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["multiple", "serialized"])
def test_an_endpoint_is_made_without_the_others_and_sends_once_they_have_theirs(
    threads: str, tmp_path: Path
) -> None:
    (program := tmp_path / "late.py").write_text(LATE)
    found = reports(under_mpiexec(3, program, "late", threads))
    assert [each["received"] for each in found] == ["01", "30", b"x".hex() * 8]
    assert all(each["made"] < 2.0 for each in found)
    assert found[0]["said"].count("; not all ranks have made their MPITransport") == 2


@pytest.mark.slow
def test_a_rank_that_leaves_at_once_keeps_nobody_from_connecting(tmp_path: Path) -> None:
    (program := tmp_path / "early.py").write_text(LATE)
    found = reports(under_mpiexec(3, program, "early", "multiple"))
    assert [each["received"] for each in found] == ["01", "00", ""]


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
    transport._heads = transport._bodies = comm
    transport._is_connected, transport._duplicates = True, SimpleNamespace(hosts=["here"])
    transport._mpi = SimpleNamespace(Exception=ZeroDivisionError)
    transport._lost, transport._unreported = {}, []
    for _ in range(5):
        transport._record_failures()
    assert transport.lost == {0}
    assert Group.made == Group.freed == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("short", "began a message with 5 bytes that are none"),
        ("contradiction", "began a message with 18 bytes that are none"),
        ("longer body", "sent 1048576 bytes where 524288 of its message were left"),
        ("no body", "began a message of 524288 bytes and did not finish it within 6 s"),
        ("huge claim", "began a message of 536870912 bytes and did not finish it within 6 s"),
        ("empty", "began a message with 0 bytes that are none"),
        ("endless claim", f"began a message of {2**64 - 1} bytes and did not finish it within 6 s"),
        ("empty body", "sent 0 bytes where 524288 of its message were left"),
        ("half a body", "began a message of 524288 bytes and did not finish it within 6 s"),
        ("body of another tag", "began a message of 524288 bytes and did not finish it"),
        ("long piece", "sent 16777217 bytes where 67108864 of its message were left"),
        ("goodbye with words", CLOSED),
    ],
)
def test_a_malformed_message_costs_its_sender_alone(kind: str, why: str) -> None:
    (found,) = reports(under_mpiexec(3, PROGRAM.with_name("malformed_rank.py"), kind))
    assert len(found["lost"]) == 1
    assert why in found["lost"][0]
    assert found["received"] == 40
    if "did not finish" in why:  # another rank did not wait until that was noticed
        assert found["before"] >= 10


# Pieces of messages.

LARGE = memoryview(np.arange(WHOLE, dtype=np.uint8))


def view(text: bytes) -> memoryview:
    return memoryview(text)


def test_messages_up_to_a_limit_are_one_piece() -> None:
    late = LazyBuffer(2, lambda: b"zz")
    parts = [view(b"a"), LARGE[: WHOLE - 4], late, view(b"!")]
    head, segments = cut(parts, WHOLE)
    assert segments == []
    assert head[PREAMBLE.size :] == b"a" + bytes(LARGE[: WHOLE - 4]) + b"zz!"
    assert cut([*parts, view(b"?")], WHOLE + 1)[1] == [*parts[1:], b"?"]


def test_large_parts_are_not_copied_and_late_ones_made_last() -> None:
    made = []
    late = LazyBuffer(2, lambda: made.append(1) or b"zz")
    parts = [view(b"head"), LARGE, view(b""), LARGE, late]
    head, rest = cut(parts, 6 + 2 * WHOLE)
    assert head.endswith(b"head")
    assert all(each is part for each, part in zip(rest, parts[1:], strict=True))
    assert not made


def test_a_whole_message_does_not_overtake_an_unfinished_one_of_its_source_and_tag() -> None:
    unfinished, *whole = (
        SimpleNamespace(envelope=Envelope(source, tag, nbytes))
        for source, tag, nbytes in ((1, 5, 2 * WHOLE), (1, 5, 7), (1, 6, 8), (2, 5, 9))
    )
    transport = MPITransport.__new__(MPITransport)
    transport._matched = [unfinished, *whole]
    transport._is_whole = lambda each: each is not unfinished
    assert transport._first_whole(1, 5) is None
    assert transport._first_whole(1, None) == (1, 6, 8)
    assert transport._first_whole(None, 5) == (2, 5, 9)
