"""Graphs as rows of different lengths: lists of edges, batched when drawn.

python examples/ragged_graphs.py
"""

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer

from gfn_rb import RaggedStorage, Sampler, Trajectories, reward_prioritized_buffer
from gfn_rb.envs import BayesianDAG
from gfn_rb.losses import TrajectoryBalance
from gfn_rb.policies import ForwardPolicy, LogZ, UniformBackwardPolicy
from gfn_rb.rollout import action_log_probs
from gfn_rb.training.metrics import total_variation


def edge_lists(graph: Tensor, name: Tensor, log_reward: Tensor) -> TensorDictBase:
    """Return adjacency matrices [n, d, d] as rows of edges [E, 2], with its own E for each row.

    Args:
        graph: the matrices.
        name: one number per graph, equal for equal graphs.
        log_reward: log-reward of each graph, in nats.
    """
    of, *edge = graph.nonzero(as_tuple=True)
    edges = torch.stack(edge, 1).split(of.bincount(minlength=len(graph)).tolist())
    rows = zip(edges, name, log_reward, strict=True)
    return lazy_stack([TensorDict({"edges": e, "name": k, "log_reward": r}) for e, k, r in rows])


def adjacency(rows: TensorDictBase, n_nodes: int) -> Tensor:
    """Return the graphs of drawn rows in one batch, [n, d, d]."""
    of, place = rows["edges_mask"].nonzero(as_tuple=True)
    graph = torch.zeros(len(rows), n_nodes, n_nodes, dtype=torch.int64)
    return graph.index_put((of, *rows["edges"][of, place].T), torch.ones_like(of))


def make_buffer(capacity: int) -> TensorDictReplayBuffer:
    """Return a buffer of the best graphs, one row each, drawn by reward."""
    storage = RaggedStorage(capacity, {"edges": 12})
    return reward_prioritized_buffer(capacity, storage=storage, unique="name", replacement=True)


def train(n_steps: int, batch_size: int = 16, seed: int = 0) -> tuple[float, float, int]:
    """Train on fresh and on replayed graphs of four nodes.

    Returns:
        The total variation between policy and target before and after, and how many graphs are
        in the buffer.
    """
    torch.manual_seed(seed)
    env = BayesianDAG(4)
    forward = ForwardPolicy(env, (64,))
    loss = TrajectoryBalance(forward, UniformBackwardPolicy(env), env, LogZ(env.true_log_z))
    optimizer = torch.optim.Adam(forward.parameters(), lr=1e-2)
    sampler, backward = Sampler(loss.forward_policy), Sampler(loss.backward_policy)
    rb = make_buffer(1000)

    def distance() -> float:
        log_p = env.policy_log_prob(lambda state: action_log_probs(forward, env, state))
        return float(total_variation(log_p, env.target_log_prob()))

    before = distance()
    for _ in range(n_steps):
        fresh = sampler.sample_trajectories(env, batch_size, epsilon=0.1)
        graph = fresh.terminating_states
        rb.extend(edge_lists(graph, env.fingerprint(graph), fresh.log_reward))
        drawn = rb.sample(batch_size)
        # New backward trajectories from the drawn graphs.
        replayed = backward.sample_trajectories(
            env, states=adjacency(drawn, 4), log_rewards=drawn["log_reward"]
        )
        optimizer.zero_grad()
        loss(Trajectories.cat([fresh, replayed.forward()])).backward()
        optimizer.step()
    return before, distance(), len(rb)


if __name__ == "__main__":
    before, after, stored = train(60)
    print(f"total variation {before:.2f} before, {after:.2f} after, with {stored} graphs stored")
