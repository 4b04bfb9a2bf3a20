"""Environments small enough to enumerate, and exact answers about policies on them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gfn_rb.envs.base import GFNEnv
from gfn_rb.errors import ArgumentError, NaNError, ShapeError
from gfn_rb.shapes import Bool, Float, Float64, Floats, Int64, Integers, Modes, Shaped, StateBatch

LogPF = Callable[..., Tensor]

MAX_STATES = 20_000_000


class Layer(NamedTuple):
    """The states that one number of actions reaches, and the edges to the next layer."""

    state: Tensor
    mask: Tensor
    child: Tensor  # the row of each legal move's result, in the order of the mask
    n_children: int


class Graph(NamedTuple):
    """Every state of an environment by layers, and its terminating states in order of their key."""

    layers: list[Layer]
    terminating: Tensor
    terminating_key: Tensor
    log_reward: Tensor | None  # None if rewards depend on a condition


class EnumerableEnv(GFNEnv):
    """An environment whose states can be listed, with exact target and policy distributions.

    All paths to a state must have the same length. The graph is built when it is first needed and
    kept until the environment moves to another device. Do not change its tensors. Probabilities are
    float64.

    An instance with too many states sets ``is_enumerable`` to False. It works as any other
    environment and raises an error where the list is needed. If rewards depend on a condition,
    exact distributions need one, [*C].

    A subclass defines ``n_states`` and ``state_key`` in addition to the functions of ``GFNEnv``,
    and ``mode_index`` and ``n_modes`` if it has modes.
    """

    n_modes: int = 0

    @property
    @abstractmethod
    def n_states(self) -> int:
        """Number of states, the sink not counted."""

    @property
    def is_enumerable(self) -> bool:
        """Whether the states are few enough to be listed."""
        return self.n_states <= MAX_STATES

    @abstractmethod
    def state_key(self, state: StateBatch) -> Integers:
        """Return an integer that no two states share; terminating states are ordered by it.

        It is called only if the states are few enough to be listed.
        """

    def mode_index(self, state: StateBatch) -> Integers:
        """Return which mode each terminating state belongs to, in [0, n_modes); -1 for none."""
        self.check_terminating(state)
        return state.new_full((len(state),), -1, dtype=torch.int64)

    def modes_reached(self, state: StateBatch, log_reward: Floats | None = None) -> Modes:
        """Return the mode of each terminating state that belongs to one."""
        mode = self.mode_index(state)
        return mode[mode >= 0]

    def fingerprint(self, state: StateBatch) -> Integers:
        """Return each state's key, or a hash of the state where there are too many to list."""
        return self.state_key(state) if self.is_enumerable else super().fingerprint(state)

    def layers(self) -> Iterator[Shaped[Tensor, "k *state"]]:
        """Yield all states but the sink, grouped by their number of actions from the source."""
        return (layer.state for layer in self._graph.layers)

    def terminating_states(self) -> Shaped[Tensor, "m *state"]:
        """Return every terminating state, in order of ``state_key``."""
        return self._graph.terminating

    def terminating_index(self, state: StateBatch) -> Integers:
        """Return each terminating state's row in ``terminating_states()``."""
        self.check_terminating(state)
        return torch.searchsorted(self._graph.terminating_key, self.state_key(state))

    def log_partition(self, condition: Shaped[Tensor, "*condition"] | None = None) -> float:
        """Return log Z = log sum_x R(x), in nats.

        Args:
            condition: one condition, [*C], if the environment has conditions.

        Raises:
            ArgumentError: a condition is missing, or given to an environment without conditions.
            ShapeError: the condition has another shape.
        """
        return float(self._log_rewards(condition).logsumexp(0))

    @property
    def true_log_z(self) -> float | None:
        """Log Z in nats; None if states cannot be listed or rewards depend on a condition."""
        return self.log_partition() if self._has_one_target else None

    @property
    def expected_score(self) -> float | None:
        """The mean ``score`` under the target; None if ``true_log_z`` is None."""
        if not self._has_one_target:
            return None
        score = self.score(self.terminating_states()).double()
        return float(self.target_log_prob().exp() @ score)

    @property
    def _has_one_target(self) -> bool:
        return self.is_enumerable and self.condition_shape is None

    def target_log_prob(
        self, condition: Shaped[Tensor, "*condition"] | None = None
    ) -> Float64[Tensor, "m"]:
        """Return log R(x) - log Z of every terminating state, in nats; see ``log_partition``."""
        return self._log_rewards(condition).log_softmax(0)

    @torch.no_grad()
    def policy_log_prob(
        self,
        log_pf: LogPF,
        chunk_size: int = 16384,
        condition: Shaped[Tensor, "*condition"] | None = None,
    ) -> Float64[Tensor, "m"]:
        """Return a forward policy's exact log-probability of ending in each terminating state.

        Flows follow the layers: F(s0) = 1, F(s') = sum over edges s -> s' of F(s) P_F(s'|s), and
        P(x) = F(x) P_F(exit|x), all in the log domain (Bengio et al. 2023, GFlowNet Foundations).

        Args:
            log_pf: maps states [k, *S] to normalised log-probabilities [k, n_actions], -inf at
                illegal actions; asked only about states with more than one legal action. With a
                condition it is also given that, once per state, [k, *C].
            chunk_size: most states in one call of ``log_pf``.
            condition: one condition, [*C]; None asks for a policy that takes none.

        Raises:
            ArgumentError: ``log_pf`` is not normalised over the legal actions.
            ShapeError: ``log_pf`` returns another shape.
            NaNError: ``log_pf`` returns NaN.
        """
        out = torch.full_like(self._graph.terminating_key, -torch.inf, dtype=torch.float64)
        log_flow = out.new_zeros(1)
        for layer in self._graph.layers:
            log_p = out.new_zeros(()).where(layer.mask, -torch.inf)
            choices = (layer.mask.sum(1) > 1).nonzero()[:, 0]
            for rows in choices.split(chunk_size):
                given = [] if condition is None else [condition.expand(len(rows), *condition.shape)]
                log_p[rows] = _normalised(log_pf(layer.state[rows], *given), layer.mask[rows])
            exits, moves = layer.mask[:, -1], layer.mask[:, :-1]
            out[self.terminating_index(layer.state[exits])] = (log_flow + log_p[:, -1])[exits]
            edge_flow = (log_flow[:, None] + log_p[:, :-1])[moves]
            log_flow = _scatter_logsumexp(edge_flow, layer.child, layer.n_children)
        return out

    def _log_rewards(self, condition: Shaped[Tensor, "*condition"] | None) -> Float64[Tensor, "m"]:
        """Return log R(x) of every terminating state."""
        if condition is None and self._graph.log_reward is not None:
            return self._graph.log_reward
        condition, state = self.checked_condition(condition), self._graph.terminating
        return self.log_reward(state, condition.expand(len(state), *condition.shape)).double()

    @cached_property
    def _graph(self) -> Graph:
        if not self.is_enumerable:
            raise ArgumentError(
                f"env must have at most {MAX_STATES} states to be enumerated, "
                f"{type(self).__name__} has {self.n_states:.4g}"
            )
        layers = []
        state = self.source(1)
        while len(state):
            layer, state = self._expand(state)
            layers.append(layer)
        terminating = torch.cat([layer.state[layer.mask[:, -1]] for layer in layers])
        key, order = self.state_key(terminating).sort()
        state = terminating[order]
        log_reward = self.log_reward(state).double() if self.condition_shape is None else None
        return Graph(layers, state, key, log_reward)

    def _expand(self, state: Shaped[Tensor, "k *state"]) -> tuple[Layer, Tensor]:
        """Return ``state`` as a layer, and the states of the next one."""
        mask = self.forward_mask(state)
        row, move = mask[:, :-1].nonzero(as_tuple=True)
        result = self.forward_step(state[row], move)
        key, child = self.state_key(result).unique(return_inverse=True)
        first = torch.empty_like(key).scatter_(0, child, torch.arange(len(row), device=key.device))
        return Layer(state, mask, child, len(key)), result[first]

    def _apply(self, *args: Any, **kwargs: Any) -> EnumerableEnv:
        self.__dict__.pop("_graph", None)  # it is on the old device
        return super()._apply(*args, **kwargs)


def uniform_log_pf(env: GFNEnv) -> LogPF:
    """Return the policy that takes each legal action with the same probability.

    Args:
        env: environment whose masks the policy reads.
    """

    def log_pf(state: Shaped[Tensor, "k *state"]) -> Float64[Tensor, "k actions"]:
        mask = env.forward_mask(state).double()
        return (mask / mask.sum(1, keepdim=True)).log()

    return log_pf


def _scatter_logsumexp(
    value: Float64[Tensor, "e"], index: Int64[Tensor, "e"], size: int
) -> Float64[Tensor, "k"]:
    """Return log sum exp of the values that share an index; -inf where there are none."""
    highest = value.new_full((size,), -torch.inf).scatter_reduce_(0, index, value, "amax")
    highest = highest.where(highest.isfinite(), 0.0)  # -inf - -inf would be NaN
    total = value.new_zeros(size).index_add_(0, index, (value - highest[index]).exp())
    return total.log() + highest


def _normalised(
    log_p: Float[Tensor, "..."], mask: Bool[Tensor, "k actions"]
) -> Float64[Tensor, "k actions"]:
    if log_p.shape != mask.shape:
        raise ShapeError(f"log_pf must return shape {list(mask.shape)}, got {list(log_p.shape)}")
    if log_p.isnan().any():
        raise NaNError("log_pf must return log-probabilities, got NaN")
    log_p = log_p.double().where(mask, -torch.inf)
    total = log_p.logsumexp(1)
    if (total.abs() > 1e-3).any():
        worst = float(total[total.abs().argmax()].exp())
        raise ArgumentError(
            f"log_pf must be normalised over legal actions, got a total probability of {worst:.4g}"
        )
    return log_p
