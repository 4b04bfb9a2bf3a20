"""Your own environment: teams of people, some of whom work well together.

python examples/own_environment.py
"""

import torch
from torch import Tensor

from gfn_rb import Sampler, Trajectories, reward_prioritized_buffer
from gfn_rb.envs import EnumerableEnv
from gfn_rb.losses import TrajectoryBalance
from gfn_rb.policies import ForwardPolicy, LogZ, UniformBackwardPolicy
from gfn_rb.training.metrics import ExactFit


class Teams(EnumerableEnv):
    """Build teams by adding one person after another; log R is the sum over all pairs.

    A state has a 1 for each person in the team. The sink is -1 everywhere.

    Args:
        worth: value of each pair, [n, n], in nats.
    """

    n_modes = 1  # the best team

    def __init__(self, worth: Tensor) -> None:
        n = len(worth)
        super().__init__(
            source_state=torch.zeros(n, dtype=torch.int64),
            sink_state=torch.full((n,), -1),
            n_actions=n + 1,  # each person, and to stop
            max_length=n + 1,
            encoded_size=n,
        )
        self.state_range = (-1, 1)
        self.n_people = n
        self.register_buffer("worth", worth.triu(1).float(), persistent=False)

    def forward_mask(self, state: Tensor) -> Tensor:
        """Allow adding each person who is not in the team, and the exit."""
        return torch.cat([state == 0, ~self.is_sink(state)[:, None]], 1)

    def backward_mask(self, state: Tensor) -> Tensor:
        """Return who may have been added last."""
        return state == 1

    def move(self, state: Tensor, move: Tensor) -> Tensor:
        """Add one person to each team."""
        return state.scatter(1, move[:, None], 1)

    def undo(self, state: Tensor, move: Tensor) -> Tensor:
        """Remove one person from each team."""
        return state.scatter(1, move[:, None], 0)

    def log_reward(self, state: Tensor, condition: Tensor | None = None) -> Tensor:
        """Return log R(x) = sum_{i<j} x_i x_j worth_ij."""
        self.check_terminating(state)
        return torch.einsum("ni,ij,nj->n", state.float(), self.worth, state.float())

    def encode(self, state: Tensor) -> Tensor:
        """Return what networks see."""
        return state.float()

    # These methods let the states be listed, for exact distributions.

    @property
    def n_states(self) -> int:
        """Number of teams."""
        return 2**self.n_people

    def state_key(self, state: Tensor) -> Tensor:
        """Read the team as binary digits."""
        return (state << torch.arange(self.n_people, device=state.device)).sum(1)

    def mode_index(self, state: Tensor) -> Tensor:
        """Return 0 for the best team, -1 for the others."""
        best = self.log_reward(self.terminating_states()).max()
        return torch.where(self.log_reward(state) == best, 0, -1)


def main() -> None:
    """Train with replay, and print how far the policy is from the target."""
    torch.manual_seed(0)
    env = Teams(torch.randn(6, 6))
    policy, log_z = ForwardPolicy(env), LogZ()
    loss = TrajectoryBalance(policy, UniformBackwardPolicy(env), env, log_z)
    rates = ((policy.parameters(), 3e-3), (log_z.parameters(), 0.1))
    optimizer = torch.optim.Adam([{"params": group, "lr": lr} for group, lr in rates])
    rb = reward_prioritized_buffer(50, unique="state", max_length=env.max_length, batch_size=16)
    fit = ExactFit(env, policy, loss.estimate_log_z)
    for step in range(101):
        if step % 50 == 0:
            print(f"step {step}: total variation {fit.columns()['total_variation']:.2f}")
        fresh = Sampler(policy).sample_trajectories(env, n=16)
        rb.extend(fresh.to_tensordict())
        for batch in (fresh, Trajectories.from_tensordict(rb.sample())):
            optimizer.zero_grad()
            loss(batch).backward()
            optimizer.step()
    best = env.log_reward(env.terminating_states()).max()
    print("the best team was found:", bool(rb[:]["log_reward"].max() == best))


if __name__ == "__main__":
    main()
