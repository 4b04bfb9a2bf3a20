"""One of three ranks, of which one waits for another before it adds anything.

mpiexec -n 3 python waiting_rank.py mpi|FILE|late, where FILE is made by the one that is waited for
"""

import json
import sys
import time
from pathlib import Path

from gfn.containers import StatesContainer
from gfn.gym import HyperGrid
from mpi4py import MPI

from gfn_rb.interop.torchgfn import ReplayBuffer, ReplayBufferManager, connect


def main(how: str) -> None:
    world, env = MPI.COMM_WORLD, HyperGrid(2, 4, validate_modes=False)
    rank, scores = world.Get_rank(), None
    if rank == 0:
        manager = ReplayBufferManager(env, 0, 2, lambda states: {"n": len(states)})
        manager.run()
    else:
        if how == "late":
            connect()
            if rank == 1:
                world.recv(source=2)
        rb = ReplayBuffer(env, remote_manager_rank=0)
        states = env.make_random_states((4,))
        if rank == 1 and how == "mpi":
            world.recv(source=2)
        while rank == 1 and how not in ("mpi", "late") and not Path(how).exists():
            time.sleep(0.01)
        scores = rb.add(StatesContainer(env, states, states.tensor[:, 0] >= 0))["n"]
        if rank == 2 and how in ("mpi", "late"):
            world.send("added", dest=1)
        elif rank == 2:
            Path(how).touch()
        ReplayBufferManager.send_termination_signal(0)
    print(json.dumps({"rank": rank, "scores": scores}))


if __name__ == "__main__":
    main(sys.argv[1])
