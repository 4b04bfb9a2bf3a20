"""Three ranks, of which number 1 sends messages that make no sense; rank 0 prints what it received.

mpiexec -n 3 python malformed_rank.py KIND
"""

from __future__ import annotations

import json
import sys
import time

import transports.little  # noqa: F401

from gfn_rb.errors import PeerLostError
from gfn_rb.transports.mpi import PREAMBLE, MPITransport

HEADS = {
    "short": b"x" * 5,
    "contradiction": PREAMBLE.pack(1) + b"xx",
    "longer body": PREAMBLE.pack(1 << 19),
    "no body": PREAMBLE.pack(1 << 19),
    "huge claim": PREAMBLE.pack(1 << 29),
    "empty": b"",
    "endless claim": PREAMBLE.pack((1 << 64) - 1),
    "empty body": PREAMBLE.pack(1 << 19),
    "half a body": PREAMBLE.pack(1 << 19),
    "body of another tag": PREAMBLE.pack(1 << 19),
    "long piece": PREAMBLE.pack(1 << 26),
    "goodbye with words": b"words",
}
BODIES = {  # tag and size
    "longer body": (3, 1 << 20),
    "empty body": (3, 0),
    "half a body": (3, 1 << 18),
    "body of another tag": (4, 1 << 19),
    "long piece": (3, (1 << 24) + 1),
}


def main() -> None:
    kind, transport = sys.argv[1], MPITransport(timeout=6.0)
    if transport.rank == 0:
        lost, received, before = [], 0, 0
        tag = 2 if kind == "goodbye with words" else None  # others match by any tag
        while received < 40 or not lost:
            try:
                if transport.probe(tag=tag, timeout=15.0) is None:
                    break
                if transport.recv().source == 2:
                    received += 1
            except PeerLostError as error:
                lost.append(str(error))
                before = received
        print(json.dumps({"rank": 0, "lost": lost, "received": received, "before": before}))
        transport.send([b"end"], 2, 3)
    elif transport.rank == 1:
        mpi, kept = transport._mpi, []
        while not transport._connected():
            time.sleep(0.01)
        tag = 0 if kind == "goodbye with words" else 3  # of MPI, one more than those of messages
        kept.append(transport._heads.Isend([HEADS[kind], mpi.BYTE], 0, tag))
        if kind in BODIES:
            tag, nbytes = BODIES[kind]
            kept.append(transport._bodies.Isend([bytes(nbytes), mpi.BYTE], 0, tag))
        time.sleep(12.0)
    else:
        for _ in range(40):
            transport.send([bytes(1 << 19)], 0, 2)
            time.sleep(0.05)
        transport.recv(0, 3, 30.0)
    sys.stdout.flush()
    # MPI would wait for messages that nobody receives.
    transport._mpi.COMM_WORLD.Abort(0) if transport.rank == 2 else time.sleep(20.0)


main()
