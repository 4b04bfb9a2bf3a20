"""Your own multilayer perceptron, on a grid of configurable size.

gfn-rb train examples.mlp:MLPConfig --size 16
"""

from dataclasses import dataclass

from torch import nn

from gfn_rb.envs import GFNEnv, HyperGrid
from gfn_rb.policies import Networks
from gfn_rb.training import TrainConfig


@dataclass(frozen=True, kw_only=True)
class MLPConfig(TrainConfig):
    """Find the rewarded corners of a square with a perceptron with layer normalisation."""

    size: int = 8
    """Points along each side."""
    width: int = 64
    """Units of the hidden layer."""

    def make_env(self) -> GFNEnv:
        """Return the square grid."""
        return HyperGrid(2, self.size, device=self.device)

    def make_networks(self, env: GFNEnv) -> Networks:
        """Return modules that receive the environment's encoding of states."""
        sizes = (env.n_actions, env.n_actions - 1, 1)
        return Networks(*(self._network(env.encoded_size, size) for size in sizes))

    def _network(self, n_in: int, n_out: int) -> nn.Module:
        hidden = nn.Linear(n_in, self.width), nn.LayerNorm(self.width), nn.SiLU()
        return nn.Sequential(*hidden, nn.Linear(self.width, n_out))
