"""Your own policy for continuous states: logits of action kinds, a density of their parameters.

python examples/continuous_policy.py
"""

from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import Independent, Normal

from gfn_rb import Sampler
from gfn_rb.envs import Line


class Halves(nn.Module):
    """Layers whose output is halved: two logits, and location and scale of a normal density."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, state):
        """Return logits [n, 2], location [n, 1] and scale [n, 1]."""
        logits, loc, scale = self.net(state).split([2, 1, 1], 1)
        return logits, loc, scale.exp()


policy = ProbabilisticTensorDictSequential(
    TensorDictModule(Halves(), ["state"], ["logits", "loc", "scale"]),
    ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"],
        out_keys=["parameters"],
        distribution_class=lambda loc, scale: Independent(Normal(loc, scale), 1),
    ),
)
policy.is_backward = False
walks = Sampler(policy).sample_trajectories(Line(), n=4, save_logprobs=True)
print(walks.log_prob.shape)
