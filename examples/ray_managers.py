"""Workers join a manager in a Ray actor that is killed in the middle: python ray_managers.py."""

import tempfile
import time

import ray

from gfn_rb import Sampler, reward_prioritized_buffer
from gfn_rb.checkpoint import Journal
from gfn_rb.envs import TFBind8
from gfn_rb.policies import ForwardPolicy
from gfn_rb.remote import ReplayBufferManager, ReplayBufferWorker, WorkerStatistics
from gfn_rb.transports import ManagerActor, RayTransport, Transport

SIZE, JOURNAL = 64, tempfile.mkdtemp() + "/journal"  # manager 0, and up to 63 workers


def make_manager(transport: Transport) -> ReplayBufferManager:
    """Return a manager with the rows that the process before this one stored."""
    rb = reward_prioritized_buffer(100_000)
    Journal(rb, JOURNAL, "always")
    return ReplayBufferManager(transport, rb, worker_timeout=1e9)


@ray.remote(num_cpus=0)
def work(manager: ray.actor.ActorHandle, rank: int) -> WorkerStatistics:
    """Send sampled trajectories until 2,000 are stored, and return what became of them."""
    env, own = TFBind8(), reward_prioritized_buffer(100_000)
    with ReplayBufferWorker(RayTransport(rank, {0: manager}, SIZE), 0, own) as worker:
        while worker.statistics.stored < 2000:
            worker.extend(Sampler(ForwardPolicy(env)).sample_trajectories(env, 16))
    return worker.statistics


if __name__ == "__main__":
    manager = ray.remote(max_restarts=-1)(ManagerActor).remote(make_manager, 0, SIZE)
    workers = [work.remote(manager, rank) for rank in (1, 2)]
    while ray.get(manager.metadata.remote())["stored"] < 500:
        time.sleep(0.1)
    workers += [work.remote(manager, rank) for rank in (3, 4)]  # two workers join
    ray.kill(manager, no_restart=False)  # Ray restarts it
    for each in ray.get(workers):
        print(f"{each.stored=} {each.duplicates=} {each.resent=}")
    print("stored:", ray.get(manager.metadata.remote())["stored"])
