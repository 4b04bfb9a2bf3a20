"""One of two ranks: the first manages and the second sends, by MPI and by torch.distributed.

mpiexec -n 2 python manager_rank.py FILE
"""

import json
import sys

import torch.distributed as dist
from gfn.containers import StatesContainer
from gfn.gym import HyperGrid

from gfn_rb.interop.torchgfn import ReplayBuffer, ReplayBufferManager
from gfn_rb.transports.launch import launched


def main(file: str) -> None:
    started = launched()
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=started.rank, world_size=started.size
    )
    env = HyperGrid(2, 4, validate_modes=False)
    found = {"rank": started.rank, "held": {}, "scores": {}, "stored": {}}
    for backend in ("mpi", "torch"):
        if started.rank == 0:
            manager = ReplayBufferManager(
                *(env, 0, 1, lambda states: {"n": len(states)}), communication_backend=backend
            )
            manager.run()
            found["held"][backend] = len(manager.replay_buffer)
        else:
            rb = ReplayBuffer(env, remote_manager_rank=0, communication_backend=backend)
            states = env.make_random_states((4,))
            every = states.tensor[:, 0] >= 0
            found["scores"][backend] = rb.add(StatesContainer(env, states, every))["n"]
            known = ReplayBufferManager.get_metadata(0, backend)
            found["stored"][backend] = known["stored"]
            ReplayBufferManager.send_termination_signal(0, backend)
    print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
