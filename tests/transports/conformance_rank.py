"""One rank of the conformance suite, run as a process of its own; prints what it found as JSON.

python conformance_rank.py mpi
python conformance_rank.py gloo FILE RANK SIZE
"""

from __future__ import annotations

import json
import sys

import torch

from gfn_rb.transports import GlooTransport, MPITransport
from gfn_rb.transports.conformance import run

TIMEOUT = 60.0

if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, *arguments = sys.argv[1:]
    if kind == "mpi":
        transport = MPITransport(timeout=TIMEOUT)
    else:
        file, rank, size = arguments
        transport = GlooTransport(f"file://{file}", int(rank), int(size), timeout=TIMEOUT)
    print(json.dumps({"rank": transport.rank, "found": run(transport)}), flush=True)
