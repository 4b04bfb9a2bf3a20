"""An environment with conditions: a grid whose rewards count more or less.

python examples/conditional_environment.py
"""

import torch
from torch import Tensor

from gfn_rb import Sampler, Trajectories, fifo_buffer
from gfn_rb.envs import HyperGrid, check_env
from gfn_rb.losses import TrajectoryBalance
from gfn_rb.policies import ConditionalLogZ, ForwardPolicy, UniformBackwardPolicy
from gfn_rb.training.metrics import ExactFit


class WeightedGrid(HyperGrid):
    """A grid under a condition c in [0, 1]: log R(x | c) is c times that of ``HyperGrid``."""

    condition_shape = torch.Size([1])

    def sample_condition(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw ``n`` conditions."""
        return torch.rand(n, 1, generator=generator)

    def log_reward(self, state: Tensor, condition: Tensor | None = None) -> Tensor:
        """Return log R(x | c)."""
        log_reward = super().log_reward(state)
        return self.checked_condition(condition, len(state))[:, 0] * log_reward


def main() -> None:
    """Train with replay, and print how far the policy is from the targets."""
    torch.manual_seed(0)
    env = WeightedGrid(2, 8)
    check_env(env, every_state_terminates=True)
    policy, log_z = ForwardPolicy(env), ConditionalLogZ(env)
    loss = TrajectoryBalance(policy, UniformBackwardPolicy(env), env, log_z)
    optimizer = torch.optim.Adam([*policy.parameters(), *log_z.parameters()], lr=3e-3)
    rb = fifo_buffer(200, max_length=env.max_length, batch_size=16)
    fit = ExactFit(env, policy, loss.estimate_log_z)  # over fixed conditions
    for step in range(101):
        if step % 50 == 0:
            print(f"step {step}: total variation {fit.columns()['total_variation']:.2f}")
        fresh = Sampler(policy).sample_trajectories(env, n=16)
        rb.extend(fresh.to_tensordict())
        for batch in (fresh, Trajectories.from_tensordict(rb.sample())):
            optimizer.zero_grad()
            loss(batch).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
