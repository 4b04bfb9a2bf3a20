from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gfn_rb.envs import BayesianDAG, bayesian_dag
from gfn_rb.envs.bayesian_dag import BGeScore, draw_data


def is_acyclic(graph: np.ndarray) -> bool:
    """Take nodes without parents away until none is left."""
    while len(graph):
        orphans = graph.sum(0) == 0
        if not orphans.any():
            return False
        graph = graph[~orphans][:, ~orphans]
    return True


def every_dag(d: int) -> Tensor:
    edges = [(i, j) for i in range(d) for j in range(d) if i != j]
    graphs = np.zeros((2 ** len(edges), d, d), dtype=np.int64)
    source, target = np.array(edges).T
    graphs[:, source, target] = list(product((0, 1), repeat=len(edges)))
    return torch.tensor(np.array([graph for graph in graphs if is_acyclic(graph)]))


@pytest.mark.parametrize(
    ("d", "n_graphs"), [(2, 3), (3, 25), (4, 543), (5, 29281), (6, 3_781_503), (7, 1_138_779_265)]
)
def test_the_graphs_are_as_many_as_published(d: int, n_graphs: int) -> None:
    env = BayesianDAG(d)
    assert env.n_states == n_graphs
    assert env.is_enumerable == (d < 6)
    if env.is_enumerable:
        assert len(env.terminating_states()) == n_graphs


def test_graphs_are_the_acyclic_ones() -> None:
    env = BayesianDAG(4)
    assert env.terminating_states().equal(every_dag(4))  # both in order of their bits


def log_marginal(data: np.ndarray, columns: list[int]) -> float:
    """Return log p of some columns by predicting one sample after the other.

    With a normal-Wishart prior (alpha_mu 1, alpha_w d + 2, mean 0, T = I / 2) every sample has a
    multivariate t law, given those before it.
    """
    k = len(columns)
    if not k:
        return 0.0
    alpha_mu, degrees = 1.0, 2.0 + k  # of a marginal: alpha_w - d + k
    mean, scale = np.zeros(k), 0.5 * np.eye(k)
    total = 0.0
    for x in data[:, columns]:
        nu = degrees - k + 1
        sigma = scale * (alpha_mu + 1) / (alpha_mu * nu)
        quadratic = (x - mean) @ np.linalg.solve(sigma, x - mean)
        total += (
            math.lgamma((nu + k) / 2) - math.lgamma(nu / 2) - k / 2 * math.log(nu * math.pi)
            - 0.5 * np.linalg.slogdet(sigma)[1] - (nu + k) / 2 * math.log1p(quadratic / nu)
        )  # fmt: skip
        scale = scale + alpha_mu / (alpha_mu + 1) * np.outer(x - mean, x - mean)
        mean = (alpha_mu * mean + x) / (alpha_mu + 1)
        alpha_mu, degrees = alpha_mu + 1, degrees + 1
    return total


def test_scores_are_marginal_likelihoods() -> None:
    """Of every node with every set of parents, against predictions sample by sample."""
    _, data = draw_data(4, 9, seed=2)
    score = BGeScore(data + 0.3)
    samples = (data + 0.3).numpy()
    for node, bits in product(range(4), product((False, True), repeat=4)):
        if not bits[node]:
            parents = [i for i in range(4) if bits[i]]
            expected = log_marginal(samples, [node, *parents]) - log_marginal(samples, parents)
            value = score(torch.tensor([node]), torch.tensor([bits]))
            assert value.item() == pytest.approx(expected, abs=1e-9)


def test_posterior_and_its_edges() -> None:
    env = BayesianDAG(4, n_samples=10, seed=3)
    graphs = every_dag(4)
    log_r = env.log_reward(graphs).double()
    assert env.log_partition() == pytest.approx(log_r.logsumexp(0).item(), abs=1e-9)
    p = log_r.softmax(0)
    expected = sum(p[n] * graphs[n] for n in range(len(graphs)))
    torch.testing.assert_close(env.edge_marginals(), expected)
    uniform = torch.full((543,), -math.log(543), dtype=torch.float64)
    torch.testing.assert_close(env.edge_marginals(uniform), graphs.double().mean(0))


def test_scores_without_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    env = BayesianDAG(4, n_samples=10)
    monkeypatch.setattr(bayesian_dag, "MOST_IN_TABLE", 3)
    other = BayesianDAG(4, n_samples=10)
    state = env.terminating_states()
    torch.testing.assert_close(other.log_reward(state), env.log_reward(state))


def test_data_follow_the_graph_they_are_drawn_from() -> None:
    graph, data = draw_data(6, 20_000, seed=4)
    assert is_acyclic(graph.numpy())
    assert draw_data(6, 20_000, seed=4)[1].equal(data)
    assert not draw_data(6, 20_000, seed=5)[1].equal(data)
    for node in range(6):  # regressed on its parents, each node leaves noise of variance 0.1
        x = data[:, graph[:, node].bool()]
        rest = data[:, node : node + 1]
        if x.shape[1]:
            rest = rest - x @ torch.linalg.lstsq(x, rest).solution
        assert rest.var().item() == pytest.approx(0.1, rel=0.05)
    edges = sum(int(draw_data(9, 1, seed)[0].sum()) for seed in range(50)) / 50
    assert edges == pytest.approx(9, abs=1.5)


def test_data_of_ones_own(tmp_path: Path) -> None:
    _, data = draw_data(3, 8, seed=0)
    np.save(tmp_path / "x.npy", data.numpy())
    text = "\n".join(",".join(map(repr, row)) for row in data.tolist())
    (tmp_path / "x.csv").write_text(text)
    (tmp_path / "named.csv").write_text("a,b,c\n" + text)
    env = BayesianDAG(data=data)
    assert (env.n_nodes, env.true_graph) == (3, None)
    for name in ("x.npy", "x.csv", "named.csv"):
        assert BayesianDAG(data=str(tmp_path / name)).data.equal(data)
    assert BayesianDAG(3, data=data.float()).data.dtype == torch.float64
