"""BayesianDAG: draw the structures of Bayesian networks by how well they explain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack

from gfn_rb.arguments import as_count
from gfn_rb.codec.primitives import opened
from gfn_rb.envs.base import EnvOptions
from gfn_rb.envs.core import from_digits, states_of_writes
from gfn_rb.envs.enumerable import EnumerableEnv
from gfn_rb.errors import ArgumentError, CheckpointError, NaNError, ShapeError
from gfn_rb.shapes import Bool, Float, Float64, Floats, Int64, Integers, StateBatch

MOST_LISTED = 5  # nodes: 29,281 graphs; of 6 there are 3.8 million
MOST_IN_TABLE = 12  # nodes whose families, 2^12 each, are scored once for all
NOISE = math.sqrt(0.1)


class BayesianDAG(EnumerableEnv):
    """Add edges between nodes, never closing a cycle; every graph terminates (Deleu et al. 2022).

    A state is an adjacency matrix, 1 at [u, v] for an edge u -> v. Move u d + v adds that edge,
    which must be absent, and there must be no path from v to u (arXiv:2202.13903). The target is
    the posterior over graphs with a uniform prior,

        log R(G) = sum_v score(v, parents of v in G) - sum_v score(v, no parents)

    with the BGe score of the data (:class:`BGeScore`). For up to 5 nodes it is known exactly, by
    listing all graphs. No modes are defined.

    Without data, samples come from a network drawn with ``seed``. It has as many edges as nodes on
    average, with standard normal weights, and noise of variance 0.1 at each node.

    Args:
        n_nodes: d, at least 2; by default the columns of ``data``, or 5.
        data: one row per sample and a column per node, [m, d], or a .npy or .csv file of them.
        n_samples: rows to draw where no data is given, positive.
        seed: of the network and the samples.
        **options: ``batch_size`` of the TorchRL interface, by default any; ``device``, "cpu".

    Raises:
        ArgumentError: an argument is out of its range, or the file cannot be read.
        ShapeError: ``data`` is no table of ``n_nodes`` columns.
        NaNError: ``data`` holds NaN or infinity.

    Attributes:
        data: what was observed, float64 [m, d].
        true_graph: the network that ``data`` was drawn from, [d, d]; None where it was given.
    """

    def __init__(
        self,
        n_nodes: int | None = None,
        data: Tensor | str | Path | None = None,
        n_samples: int = 100,
        seed: int = 0,
        **options: Unpack[EnvOptions],
    ) -> None:
        true_graph = None
        if data is None:
            true_graph, data = draw_data(5 if n_nodes is None else n_nodes, n_samples, seed)
        elif not isinstance(data, Tensor):  # a checkpoint records the numbers, and no path to them
            data = read_data(data)
            self.constructor_arguments = (n_nodes, data), dict(options)
        observed = _observations(data, n_nodes)
        d = observed.shape[1]
        super().__init__(
            torch.zeros(d, d, dtype=torch.int64),
            torch.full((d, d), -1),
            n_actions=d * d + 1,
            max_length=d * (d - 1) // 2 + 1,
            encoded_size=d * d,
            **options,
        )
        self.n_nodes, self.true_graph = d, true_graph
        self.state_range = (-1, 1)
        table = _family_scores(observed) if d <= MOST_IN_TABLE else observed.new_empty(0, d)
        self._register(data=observed, _family_score=table)

    @property
    def n_states(self) -> int:
        """Number of graphs, by Robinson's recurrence (1973) over the nodes without parents."""
        counts = [1]
        for n in range(1, self.n_nodes + 1):
            terms = [math.comb(n, k) * 2 ** (k * (n - k)) * counts[n - k] for k in range(1, n + 1)]
            counts.append(sum(terms[::2]) - sum(terms[1::2]))
        return counts[-1]

    @property
    def is_enumerable(self) -> bool:
        """Whether the graphs are few enough to be listed: those of up to 5 nodes are."""
        return self.n_nodes <= MOST_LISTED

    def forward_mask(self, state: StateBatch) -> Bool[Tensor, "n actions"]:
        """Allow what adds an edge and closes no cycle, and the exit action everywhere."""
        allowed = (state == 0) & ~self._reaches(state).mT
        return torch.cat([allowed.flatten(1), state[:, 0, :1] >= 0], 1)

    def backward_mask(self, state: StateBatch) -> Bool[Tensor, "n moves"]:
        """Return which edges there are."""
        return (state == 1).flatten(1)

    def log_reward(self, state: StateBatch, condition: Tensor | None = None) -> Floats:
        """Return log R(G), in nats (the class's equation)."""
        self.check_terminating(state)
        node = torch.arange(self.n_nodes, device=state.device)
        if len(self._family_score):
            scores = self._family_score[(state << node[:, None]).sum(1), node]
            return scores.sum(1).float()
        parents = (state == 1).mT.flatten(0, 1)
        score = BGeScore(self.data)
        alone = score(node, parents.new_zeros(self.state_shape))
        scores = score(node.repeat(len(state)), parents).unflatten(0, (-1, self.n_nodes)) - alone
        return scores.sum(1).float()

    def score(self, state: StateBatch, log_reward: Floats | None = None) -> Floats:
        """Return log R(G), for R(G) overflows."""
        return self.log_reward(state) if log_reward is None else log_reward

    def states_of(
        self, action: Int64[Tensor, "n T"], length: Integers
    ) -> Int64[Tensor, "n T1 *state"]:
        """Write a 1 for each edge that is added."""
        one = torch.ones_like(action)
        state = states_of_writes(action, one, length, self.exit_action, empty=0, sink=-1)
        return state.unflatten(2, self.state_shape)

    def encode(self, state: StateBatch) -> Float[Tensor, "n encoded"]:
        """Return the adjacency matrix; zeros for the sink."""
        return (state == 1).flatten(1).float()

    def state_key(self, state: StateBatch) -> Integers:
        """Read the adjacency matrix as bits."""
        return from_digits(state.flatten(1), 2)

    def edge_marginals(
        self, log_prob: Float64[Tensor, "m"] | None = None
    ) -> Float64[Tensor, "d d"]:
        """Return the probability of each edge.

        Args:
            log_prob: of each graph in ``terminating_states()``; the exact posterior's if None.

        Raises:
            ArgumentError: there are too many graphs to list.
        """
        log_prob = self.target_log_prob() if log_prob is None else log_prob
        return torch.einsum("m,mij->ij", log_prob.exp(), self.terminating_states().double())

    def describe(self, state: StateBatch) -> list[str]:
        """Return the edges of each graph, as ``0->1 0->3``."""
        edges: list[list[str]] = [[] for _ in state]
        for row, u, v in (state == 1).nonzero().tolist():
            edges[row].append(f"{u}->{v}")
        return [" ".join(each) or "no edges" for each in edges]

    def parse(self, words: Sequence[str]) -> StateBatch:
        """Return the graphs whose edges texts list, as :meth:`describe` does."""
        state = self.source(len(words))
        for row, text in enumerate(words):
            for edge in () if text.strip() == "no edges" else text.split():
                u, arrow, v = edge.partition("->")
                ends = [int(end) for end in (u, v) if arrow and end.isdecimal()]
                if len(ends) < 2 or max(ends) >= state.shape[1]:
                    raise ArgumentError(
                        f"words must list edges between 0 and {state.shape[1] - 1}, as 0->1, got "
                        f"{text!r:.80}"
                    )
                state[row, ends[0], ends[1]] = 1
        has_cycle = ((state == 1) & self._reaches(state).mT).flatten(1).any(1)
        if bool(has_cycle.any()):
            text = words[int(has_cycle.nonzero()[0])]
            raise ArgumentError(f"words must be graphs without cycles, got {text!r:.80}")
        return state

    def move(self, state: StateBatch, move: Integers) -> StateBatch:
        """Add an edge."""
        return state.flatten(1).scatter(1, move[:, None], 1).view_as(state)

    def undo(self, state: StateBatch, move: Integers) -> StateBatch:
        """Remove an edge."""
        return state.flatten(1).scatter(1, move[:, None], 0).view_as(state)

    def _reaches(self, state: StateBatch) -> Bool[Tensor, "n d d"]:
        """Return the transitive closure, every node leading to itself, by squaring."""
        eye = torch.eye(self.n_nodes, device=state.device)
        paths = (state == 1) + eye
        for _ in range((self.n_nodes - 1).bit_length()):  # doubles the length of the paths
            paths = (paths @ paths).clamp_(max=1)
        return paths > 0


class BGeScore:
    """Score of a node and its parents: the marginal likelihood of the node's data, given theirs.

    With m samples of d nodes, and a normal-Wishart prior of mean zero, alpha_mu = 1,
    alpha_w = d + 2 and scale matrix I / 2, a set of l nodes Y has the marginal likelihood

        log p(D_Y) = - l/2 log(m + 1) - l m/2 log pi
            + log Gamma_l((m + l + 2)/2) - log Gamma_l((l + 2)/2)
            - l (l + 2)/2 log 2 - (m + l + 2)/2 log det R_YY

    where R = I / 2 + (scatter about the mean) + m/(m + 1) (mean)(mean)^T. A node X with parents P
    scores log p(D_{P+X}) - log p(D_P) (Geiger and Heckerman 1994; with the constants of Kuipers et
    al. 2014, arXiv:1402.6863). Graphs that imply the same independences have equal sums of scores.

    Args:
        data: one row per sample, [m, d].
    """

    def __init__(self, data: Float64[Tensor, "m d"]) -> None:
        self.n_samples, d = data.shape
        mean = data.mean(0)
        centred, weight = data - mean, self.n_samples / (self.n_samples + 1)
        eye = torch.eye(d, dtype=data.dtype, device=data.device)
        self._r = eye / 2 + centred.T @ centred + weight * mean.outer(mean)

    def __call__(
        self, node: Int64[Tensor, "k"], parents: Bool[Tensor, "k d"]
    ) -> Float64[Tensor, "k"]:
        """Return the score of each node with the parents that flags mark, in nats."""
        m, p = self.n_samples, parents.sum(1, dtype=torch.float64)
        family = parents.scatter(1, node[:, None], True)
        dets = (m + p + 2) * self._log_det(parents) - (m + p + 3) * self._log_det(family)
        gammas = torch.lgamma((m + p + 3) / 2) - torch.lgamma((p + 3) / 2)
        constant = -math.log(m + 1) / 2 - m / 2 * math.log(math.pi)
        return constant + gammas - (p + 1.5) * math.log(2) + dets / 2

    def _log_det(self, nodes: Bool[Tensor, "k d"]) -> Float64[Tensor, "k"]:
        """Return log det R of the rows and columns of some nodes."""
        both = nodes[:, :, None] & nodes[:, None]
        identity = (~nodes).to(self._r.dtype).diag_embed()  # of the other rows and columns
        return torch.linalg.slogdet(self._r.where(both, identity)).logabsdet


def _family_scores(data: Float64[Tensor, "m d"]) -> Float64[Tensor, "families d"]:
    """Return what each set of parents, read as bits, adds to each node's score."""
    score, d = BGeScore(data), data.shape[1]
    node = torch.arange(d)
    parents = (torch.arange(2**d)[:, None] >> node & 1).bool()
    columns = [score(one.expand(2**d), parents & (node != one)) for one in node]
    table = torch.stack(columns, 1)
    return table - table[0]


def draw_data(
    n_nodes: int, n_samples: int, seed: int
) -> tuple[Int64[Tensor, "d d"], Float64[Tensor, "m d"]]:
    """Draw a network, and samples of it."""
    as_count("n_nodes", n_nodes, 2)
    as_count("n_samples", n_samples)
    generator = torch.Generator().manual_seed(seed)
    probability = min(1.0, 2 / (n_nodes - 1))
    shape, double = (n_nodes, n_nodes), torch.float64
    edges = (torch.rand(shape, generator=generator, dtype=torch.float32) < probability).triu(1)
    weights = torch.randn(shape, generator=generator, dtype=double) * edges
    sample = NOISE * torch.randn(n_samples, n_nodes, generator=generator, dtype=double)
    for node in range(n_nodes):  # parents come before their children
        sample[:, node] += sample @ weights[:, node]
    order = torch.randperm(n_nodes, generator=generator)
    return edges[order][:, order].long(), sample[:, order]


def read_data(path: str | Path) -> Float64[Tensor, "m d"]:
    """Read a table of numbers from a .npy file, or from text with commas and perhaps a header."""
    try:
        with opened(Path(path)) as stream:  # no pipe or device, which a run of others may name
            if Path(path).suffix == ".npy":
                return torch.from_numpy(np.load(stream, allow_pickle=False).astype(np.float64))
            lines = stream.read().decode().splitlines()
        try:
            table = np.loadtxt(lines, delimiter=",", ndmin=2)
        except ValueError:
            table = np.loadtxt(lines[1:], delimiter=",", ndmin=2)
        return torch.from_numpy(table)
    except (CheckpointError, OSError, ValueError) as error:
        raise ArgumentError(
            f"data must be a .npy or .csv file of numbers, got {path}: {error}"
        ) from error


def _observations(data: Tensor, n_nodes: int | None) -> Float64[Tensor, "m d"]:
    if data.ndim != 2 or data.shape[1] < 2 or not len(data):
        raise ShapeError(
            f"data must have a row per sample and a column for each of 2 nodes or more, got shape "
            f"{list(data.shape)}"
        )
    if n_nodes is not None and data.shape[1] != n_nodes:
        raise ShapeError(f"data must have n_nodes={n_nodes} columns, got {data.shape[1]}")
    if not data.isfinite().all():
        raise NaNError("data must hold finite numbers, got NaN or infinity")
    return data.double().cpu()
