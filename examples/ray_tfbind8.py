"""Two Ray actors sample DNA 8-mers into a Ray buffer; a learner draws from it by residual.

python -m examples.ray_tfbind8 --steps 1000
"""

import argparse
from collections.abc import Iterator
from typing import Any

import ray
import torch
from torch import Tensor

from gfn_rb import PrioritySampler, Sampler, Trajectories, reward_prioritized_buffer
from gfn_rb.envs import TFBind8
from gfn_rb.losses import TrajectoryBalance
from gfn_rb.policies import ForwardPolicy, LogZ, UniformBackwardPolicy
from gfn_rb.training.metrics import Evaluation

ON_ONE_MACHINE = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100_000_000}
N_ACTORS, BATCH = 2, 32


@ray.remote(num_cpus=0)
class Collector:
    """Samples trajectories in a process of its own, and stores them.

    Args:
        rb: a client of the buffer.
        seed: of its draws.
    """

    def __init__(self, rb: Any, seed: int) -> None:
        torch.set_num_threads(1)
        self.rb, self.env = rb, TFBind8()
        self.policy = ForwardPolicy(self.env)
        self.generator = torch.Generator().manual_seed(seed)

    def collect(self, weights: dict[str, Tensor], version: int) -> None:
        """Store a batch of a policy.

        Args:
            weights: of the policy.
            version: its number.
        """
        self.policy.load_state_dict(weights)
        batch = Sampler(self.policy).sample_trajectories(
            self.env, BATCH, epsilon=0.05, generator=self.generator
        )
        versions = torch.full_like(batch.length, version)
        self.rb.extend(batch.to_tensordict().set("policy_version", versions))


def learn(steps: int, every: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Train, and yield metrics of the policy and the buffer at regular steps.

    Args:
        steps: optimiser steps, one for each batch that is stored.
        every: steps between two rows.
        seed: of weights and draws; the actors store in the order in which they are done.
    """
    torch.manual_seed(seed)
    env = TFBind8()
    policy = ForwardPolicy(env)
    loss = TrajectoryBalance(policy, UniformBackwardPolicy(env), env, LogZ())
    rates = ((policy.parameters(), 3e-3), (loss.log_z.parameters(), 0.1))
    optimizer = torch.optim.Adam([{"params": group, "lr": lr} for group, lr in rates])
    evaluation = Evaluation(env, policy, loss.backward_policy, loss.estimate_log_z)
    rb = reward_prioritized_buffer(
        20_000,
        unique="state",
        sampler=PrioritySampler(),
        max_length=env.max_length,
        statistics=True,
        service_backend="ray",
        service_backend_options={"remote_config": {"num_cpus": 0}},
    )
    actors = [Collector.remote(rb.client(), seed + i + 1) for i in range(N_ACTORS)]
    at_work = {actor.collect.remote(policy.state_dict(), 0): actor for actor in actors}
    for step in range(1, steps + 1):
        (stored, *_), _ = ray.wait(list(at_work))
        ray.get(stored)  # raises what the actor did
        actor = at_work.pop(stored)
        drawn = rb.sample(2 * BATCH)
        values, residual = loss.evaluate(Trajectories.from_tensordict(drawn))
        optimizer.zero_grad()
        values.mean().backward()
        optimizer.step()
        rb.update_priority(drawn["index"], residual.detach().abs())
        at_work[actor.collect.remote(policy.state_dict(), step)] = actor
        if step % every == 0:
            kept = Trajectories.from_tensordict(rb[:])
            modes = len(env.modes_reached(kept.terminating_states).unique())
            yield {"step": step, **evaluation.columns(step), **rb.stats(), "modes": modes}
    for actor in actors:
        ray.kill(actor)
    rb.close()


def main() -> None:
    """Read the options, and print the learning curve row by row."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--every", type=int, default=100)
    given = options.parse_args()
    ray.init(**ON_ONE_MACHINE)
    columns = ("step", "log_z", "log_z_gap", "total_variation", "size", "offered", "drawn")
    columns = (*columns, "mean_age", "modes")
    print(*(f"{name:>15}" for name in columns))
    for row in learn(given.steps, given.every):
        print(*(f"{row[name]:15.5g}" for name in columns), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
