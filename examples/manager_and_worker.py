"""A manager that scores and keeps items, and workers that sample: as threads or as processes.

python examples/manager_and_worker.py
mpiexec -n 3 python -m mpi4py examples/manager_and_worker.py
"""

import threading

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gfn_rb import MergedReplayBuffer, Sampler, reward_prioritized_buffer
from gfn_rb.envs import HyperGrid
from gfn_rb.policies import ForwardPolicy
from gfn_rb.remote import BaselineFilter, ReplayBufferManager, ReplayBufferWorker, Subscription
from gfn_rb.transports import LocalTransport, MPITransport, Transport
from gfn_rb.transports.launch import launched

ENV = HyperGrid(2, 16)


class Novelty:
    """Scores items by novelty: a bonus for each object not seen before."""

    def __init__(self) -> None:
        self.seen = torch.zeros(0, dtype=torch.int64)

    def __call__(self, items: TensorDictBase, sender: int) -> dict[str, Tensor]:
        """Return the scores of items [n] of a rank, by name, [n]."""
        last = items["length"] - 1
        key = ENV.fingerprint(items["state"][torch.arange(len(items)), last])
        is_new = ~torch.isin(key, self.seen)
        self.seen = torch.cat([self.seen, key]).unique()
        return {"novelty": is_new.float()}


def manage(transport: Transport) -> None:
    """Serve until every worker has said goodbye."""
    rb = reward_prioritized_buffer(100, max_length=ENV.max_length)
    manager = ReplayBufferManager(transport, rb, Novelty())
    manager.run()
    print(f"manager: {len(rb)} objects kept, none twice")


def work(transport: Transport) -> None:
    """Sample, send what may be worth keeping, and draw from what was found by all."""
    generator = torch.Generator().manual_seed(transport.rank)
    sampler = Sampler(ForwardPolicy(ENV))
    options = {"max_length": ENV.max_length}
    local, fed = (reward_prioritized_buffer(500, **options) for _ in range(2))
    with ReplayBufferWorker(
        transport, 0, local, filter=BaselineFilter(), subscription=Subscription(fed, quota=16)
    ) as worker:
        for _ in range(5):
            found = sampler.sample_trajectories(ENV, n=32, epsilon=0.5, generator=generator)
            reply = worker.extend(found)
        batch = MergedReplayBuffer(local, fed, p="mass").sample(16)
    told = f"{int(reply.scores['novelty'].sum())} of the last were new"
    print(f"worker {transport.rank}: {len(fed)} fed, {len(batch)} drawn, {told}")


def main() -> None:
    """Take the role that the rank has: 0 manages, the others work."""
    if launched():
        transport = MPITransport()
        (work if transport.rank else manage)(transport)
        return
    managing, *working = LocalTransport.group(3)
    threads = [threading.Thread(target=manage, args=(managing,))]
    threads += [threading.Thread(target=work, args=(each,)) for each in working]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
