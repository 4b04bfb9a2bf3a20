"""One of three ranks, of which one waits for another before it adds anything.

mpiexec -n 3 python waiting_rank.py
"""

import json

from gfn.containers import StatesContainer
from gfn.gym import HyperGrid
from mpi4py import MPI

from gfn_rb.interop.torchgfn import ReplayBuffer, ReplayBufferManager, connect


def main() -> None:
    world, env = MPI.COMM_WORLD, HyperGrid(2, 4, validate_modes=False)
    rank, scores = world.Get_rank(), None
    connect()
    if rank == 0:
        manager = ReplayBufferManager(env, 0, 2, lambda states: {"n": len(states)})
        manager.run()
    else:
        rb = ReplayBuffer(env, remote_manager_rank=0)
        states = env.make_random_states((4,))
        if rank == 1:
            world.recv(source=2)
        scores = rb.add(StatesContainer(env, states, states.tensor[:, 0] >= 0))["n"]
        if rank == 2:
            world.send("added", dest=1)
        ReplayBufferManager.send_termination_signal(0)
    print(json.dumps({"rank": rank, "scores": scores}))


if __name__ == "__main__":
    main()
