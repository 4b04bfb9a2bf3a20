"""A graph network over the edges of a directed graph.

gfn-rb train examples.graph_network:GraphConfig --n-nodes 4 --loss mdb --replay transitions
"""

from dataclasses import dataclass

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from gfn_rb.envs import GFNEnv
from gfn_rb.policies import Networks
from gfn_rb.training.config import BayesianDAGConfig


class EdgeNetwork(nn.Module):
    """Passes messages along edges in both directions; outputs one value per pair and per graph.

    Args:
        n_nodes: number of nodes; each has a learned initial value, because nodes differ here.
        width: features of a node.
        rounds: rounds of messages.
    """

    def __init__(self, n_nodes: int, width: int, rounds: int = 2) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(n_nodes, width))
        self.rounds = nn.ModuleList(nn.Linear(3 * width, width) for _ in range(rounds))
        self.edge = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, 1))
        self.exit = nn.Linear(width, 1)

    def forward(self, graph: Tensor) -> Tensor:
        """Return [n, d * d + 1] logits for adjacency matrices [n, d, d]: of edges, and of exit."""
        to = (graph == 1).float()
        x = self.start.expand(len(graph), -1, -1)
        for layer in self.rounds:
            x = x + torch.relu(layer(torch.cat([x, to @ x, to.mT @ x], 2)))
        d = x.shape[1]
        pairs = [x[:, :, None].expand(-1, -1, d, -1), x[:, None].expand(-1, d, -1, -1)]
        edges = self.edge(torch.cat(pairs, 3)).flatten(1)
        return torch.cat([edges, self.exit(x.mean(1))], 1)


@dataclass(frozen=True, kw_only=True)
class GraphConfig(BayesianDAGConfig):
    """Draw structures of Bayesian networks by a graph network."""

    width: int = 32
    """Features of each node."""

    def make_networks(self, env: GFNEnv) -> Networks:
        """Return a TensorDictModule, which is given graphs as they are: adjacency matrices."""
        network = EdgeNetwork(env.state_shape[0], self.width)
        return Networks(forward=TensorDictModule(network, ["state"], ["logits"]))
