"""Elite imitation: a policy for CartPole learns from the steps of the best episodes so far.

It is the cross-entropy method (Rubinstein 1999) with a buffer that keeps the best episodes of the
whole run. It is not a GFlowNet. It needs gymnasium.

python examples/elite_imitation.py
"""

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical
from torchrl.data import RandomSampler
from torchrl.envs import GymEnv

from gfn_rb import reward_prioritized_buffer

MAX_STEPS, EPISODES = 100, 16


def with_return(episode: TensorDictBase) -> TensorDictBase:
    """Return the steps of an episode, each with the return of the whole episode."""
    steps = episode.select("observation", "action")
    score = episode["next", "reward"].sum()
    return steps.set("episode_return", score.expand(len(steps)))


def main() -> None:
    """Collect, keep the best, imitate them; again."""
    torch.manual_seed(0)
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    env.set_seed(0)
    network = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    draw = ProbabilisticTensorDictModule(
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=Categorical,
        default_interaction_type=InteractionType.RANDOM,
    )
    policy = TensorDictSequential(TensorDictModule(network, ["observation"], ["logits"]), draw)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    rb = reward_prioritized_buffer(
        200, key="episode_return", sampler=RandomSampler(), batch_size=64
    )
    for _ in range(3):
        with torch.no_grad():
            found = [with_return(env.rollout(MAX_STEPS, policy)) for _ in range(EPISODES)]
        for episode in found:
            rb.extend(episode)
        mean = sum(len(episode) for episode in found) / len(found)
        print(f"mean return {mean:.0f}, kept are episodes of {rb.writer.threshold:.0f} and more")
        for _ in range(50):
            batch = rb.sample()
            loss = nn.functional.cross_entropy(network(batch["observation"]), batch["action"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
