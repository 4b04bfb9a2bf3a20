"""The pure functions of a GFlowNet's environment, on batches of states."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gfn_rb.arguments import kind_of, require_kind, shown
from gfn_rb.errors import ArgumentError, ShapeError
from gfn_rb.numerics.flat import flat_rows
from gfn_rb.shapes import (
    ActionBatch,
    Bool,
    ConditionBatch,
    Flags,
    Float,
    Floats,
    Int64,
    Integers,
    Modes,
    Shaped,
    StateBatch,
)
from gfn_rb.torchrl_compat import assert_on_device

_HOST_FORM = "host_form"


HostFunction = Callable[..., np.ndarray]
Method = TypeVar("Method", bound=Callable[..., Tensor])


def with_host_form(bind: Callable[[Any], HostFunction]) -> Callable[[Method], Method]:
    """Give a method of an environment a second form, on NumPy arrays.

    Rollouts on the CPU use it: on few rows it takes a third of the time. A method that overrides
    this one is without it, until it is given its own.

    Args:
        bind: takes ``self`` and returns a function of arrays, which it does not change. Rollouts
            call it once.
    """

    def attach(method: Method) -> Method:
        setattr(method, _HOST_FORM, bind)
        return method

    return attach


def on_host(method: Callable[..., Tensor]) -> HostFunction:
    """Return a bound method of an environment as a function of NumPy arrays."""
    if (bind := getattr(method, _HOST_FORM, None)) is not None:
        function: HostFunction = bind(method.__self__)  # type: ignore[attr-defined]
        return function
    return lambda *arrays: method(*map(torch.from_numpy, arrays)).numpy()


class GFNCore(ABC):
    """A deterministic, acyclic state graph with one source, one sink and numbered actions.

    Every trajectory starts in the source, takes moves (actions ``0 .. n_actions - 2``) and ends
    with the exit action ``n_actions - 1``, which leads from a terminating state x to the sink.
    Each method takes and returns batch-first tensors of any number of rows, works on their device
    and changes none of them. For speed, input is not checked unless a method says so.

    Metrics of a run use three functions of terminating states, which an environment may override:
    ``fingerprint`` identifies distinct states, ``modes_reached`` the modes that they belong to, and
    ``score`` measures their quality.

    Attributes:
        source_state: s0, [*S].
        sink_state: the state after the exit action, [*S]; no other state equals it.
        state_shape: S.
        state_dtype: dtype of states.
        state_range: the lowest and the highest number in any state, the sink included; None for
            states that are not bounded integers.
        is_deterministic: whether the actions of a trajectory determine its states.
        n_actions: number of actions, the exit action included; of kinds, if actions have
            parameters (:class:`~gfn_rb.envs.ContinuousEnv`).
        exit_action: the last action.
        action_shape: shape of one action; () for a number.
        action_dtype: dtype of actions.
        dummy_action: the action that pads a trajectory after its end.
        max_length: actions in the longest trajectory, the exit action included.
        encoded_size: width of the rows that ``encode`` returns.
        condition_shape: shape of one condition; None if rewards depend on none.
        n_modes: number of modes; 0 if none are defined, None if their number is unknown.
    """

    source_state: Tensor
    sink_state: Tensor
    state_shape: torch.Size
    state_dtype: torch.dtype
    state_range: tuple[int, int] | None = None
    is_deterministic: bool = True
    n_actions: int
    exit_action: int
    action_shape: torch.Size = torch.Size()
    action_dtype: torch.dtype = torch.int64
    dummy_action: int = -1
    max_length: int
    encoded_size: int
    condition_shape: torch.Size | None = None
    n_modes: int | None = 0

    def source(self, n: int) -> StateBatch:
        """Return ``n`` rows of the source state."""
        return self.source_state.expand(n, *self.state_shape).clone()

    def is_source(self, state: StateBatch) -> Flags:
        """Return which rows are the source."""
        return self._equals(state, self.source_state)

    def is_sink(self, state: StateBatch) -> Flags:
        """Return which rows are the sink."""
        return self._equals(state, self.sink_state)

    def kind(self, action: Shaped[Tensor, "*actions"]) -> Int64[Tensor, "*kinds"]:
        """Return the number of each action, without its parameters."""
        return action

    def exits(self, n: int) -> ActionBatch:
        """Return ``n`` exit actions."""
        size, device = self.action_shape.numel(), self.source_state.device
        action = torch.zeros(n, size, dtype=self.action_dtype, device=device)
        action[:, 0] = self.exit_action
        return action.view(n, *self.action_shape)

    def random_action(
        self, state: StateBatch, kind: Integers, is_backward: bool = False
    ) -> ActionBatch:
        """Return actions of these kinds from the states, or to them; parameters are drawn."""
        return kind

    @abstractmethod
    def forward_mask(self, state: StateBatch) -> Bool[Tensor, "n actions"]:
        """Return which actions are legal; none is in the sink."""

    @abstractmethod
    def backward_mask(self, state: StateBatch) -> Bool[Tensor, "n moves"]:
        """Return which moves could have led here; none did to the source or the sink."""

    def forward_step(self, state: StateBatch, action: ActionBatch) -> StateBatch:
        """Take one action per row; the exit action and the dummy action lead to the sink."""
        is_move = self._is_move(self.kind(action))
        moved = self.move(state, action.where(self._per_action(is_move), 0))
        return moved.where(self._per_row(is_move), self.sink_state)

    def states_of(
        self, action: Shaped[Tensor, "n T *action"], length: Integers
    ) -> Shaped[Tensor, "n T1 *state"]:
        """Return the states that forward trajectories pass through, padded as rollouts are.

        An environment overrides this if it has a closed form.

        Args:
            action: T actions per trajectory, of any value after its end.
            length: number of real actions of each, the exit action included.

        Returns:
            T1 = T + 1 states per trajectory: the source, those after its actions, then the sink.
        """
        n, n_steps = action.shape[:2]
        state = self.source_state.new_empty(n, n_steps + 1, *self.state_shape)
        state[:, 0] = self.source_state
        for step in range(n_steps):
            taken = action[:, step].where(self._per_action(step < length), self.dummy_action)
            state[:, step + 1] = self.forward_step(state[:, step], taken)
        return state

    def backward_step(self, state: StateBatch, action: ActionBatch) -> StateBatch:
        """Undo one move per row; rows with the dummy action (padding) become the sink.

        The exit action cannot be undone: the sink does not show the state before it.
        """
        is_move = self._is_move(self.kind(action))
        undone = self.undo(state, action.where(self._per_action(is_move), 0))
        return undone.where(self._per_row(is_move), self.sink_state)

    @abstractmethod
    def move(self, state: StateBatch, move: ActionBatch) -> StateBatch:
        """Make one move per row, out of place; rows where it is illegal may hold anything."""

    @abstractmethod
    def undo(self, state: StateBatch, move: ActionBatch) -> StateBatch:
        """Undo one move per row, out of place; rows where it is illegal may hold anything."""

    @abstractmethod
    def log_reward(self, state: StateBatch, condition: ConditionBatch | None = None) -> Floats:
        """Return log R(x) of terminating states, in nats, float32.

        Args:
            state: terminating states x.
            condition: one condition per row, where the environment has conditions.

        Raises:
            ShapeError: ``state`` is not a batch of states.
            ArgumentError: the exit action is illegal in some row.
        """

    @abstractmethod
    def encode(self, state: StateBatch) -> Float[Tensor, "n encoded"]:
        """Return the float32 input that a network sees for each state."""

    @property
    def true_log_z(self) -> float | None:
        """The log partition function in nats; None if unknown or dependent on a condition."""
        return None

    @property
    def expected_score(self) -> float | None:
        """The mean ``score`` under the target, p(x) = R(x) / Z; None as for ``true_log_z``."""
        return None

    def test_states(self) -> StateBatch | None:
        """Return terminating states, always the same, whose log-probability measures a policy.

        See ``gfn_rb.training.metrics.estimate_log_probs``. None if the environment has none.
        """
        return None

    def sample_condition(
        self, n: int, generator: torch.Generator | None = None
    ) -> ConditionBatch | None:
        """Draw ``n`` conditions for new trajectories; None where the environment has none."""
        return None

    def fixed_conditions(self, n: int) -> ConditionBatch | None:
        """Return ``n`` conditions, always the same, that span the law of ``sample_condition``.

        Metrics use them. None if the environment has no conditions.
        """
        return None

    def encode_condition(self, condition: ConditionBatch) -> Float[Tensor, "n encoded"]:
        """Return a network's float32 input for each condition, as wide as it has elements."""
        return flat_rows(condition).float()

    def fingerprint(self, state: StateBatch) -> Integers:
        """Return 64 bits of identity: equal for equal states, different for different ones.

        It is a sum of coordinates times fixed random odd numbers, modulo 2^64: two of a million
        states share one with a probability of about 1e-7. Environments that can number their
        states return the number instead. A state has the same fingerprint in every process.
        """
        rows = state.reshape(len(state), self.state_shape.numel())
        return (rows * _random_odd(rows.shape[1], rows.device)).sum(1)

    def modes_reached(self, state: StateBatch, log_reward: Floats | None = None) -> Modes:
        """Return the identity of every mode that some terminating state in the batch reaches.

        A state may reach none, one or several modes, and a mode may be listed repeatedly.
        Identities are numbers in [0, n_modes), or any numbers if ``n_modes`` is None.

        Args:
            state: terminating states.
            log_reward: log R of each in nats if known, so that it is not computed again.
        """
        return state.new_empty(0, dtype=torch.int64)

    def score(self, state: StateBatch, log_reward: Floats | None = None) -> Floats:
        """Return the quality of terminating states, on the scale that their field reports.

        It orders states as log R does, without exponent, lower limit or condition. By default it
        is R(x).

        Args:
            state: terminating states.
            log_reward: log R of each in nats if known, so that it is not computed again.
        """
        return (self.log_reward(state) if log_reward is None else log_reward).exp()

    def check_state(self, state: Tensor, name: str = "state") -> None:
        """Raise ShapeError unless ``state``, an argument ``name``, is a batch of states."""
        require_kind(name, state, Tensor)
        fits = state.ndim > 0 and state.shape[1:] == self.state_shape
        if not fits or state.dtype != self.state_dtype:
            expected = ", ".join(["n", *map(str, self.state_shape)])
            raise ShapeError(
                f"{name} must be {self.state_dtype} of shape [{expected}], got {state.dtype} of "
                f"shape {list(state.shape)}"
            )

    def check_terminating(self, state: Tensor, name: str = "state") -> None:
        """Raise ArgumentError unless the exit action is legal in every row of ``state``."""
        self.check_state(state, name)
        legal = self.forward_mask(state)[:, self.exit_action]
        if not legal.is_cpu:  # the device raises, so as not to wait for it
            assert_on_device(legal.all(), f"{name} must be terminating (its exit action legal)")
        elif not legal.all():
            row = int((~legal).nonzero()[0])
            raise ArgumentError(
                f"{name} must be terminating (its exit action legal), got {state[row].tolist()} "
                f"in row {row}"
            )

    def checked_condition(
        self, condition: Shaped[Tensor, "*rows_condition"] | None, *rows: int
    ) -> Shaped[Tensor, "*rows_condition"]:
        """Return ``condition``; raise unless its shape is [*rows, *C] and rewards depend on one."""
        name = type(self).__name__
        if condition is None:
            raise ArgumentError(f"condition must be given for {name}, got None")
        if self.condition_shape is None:
            raise ArgumentError(
                f"condition must be None for {name}, got shape {list(condition.shape)}"
            )
        if condition.shape != (*rows, *self.condition_shape):
            raise ShapeError(
                f"condition must have shape {[*rows, *self.condition_shape]}, got "
                f"{list(condition.shape)}"
            )
        return condition

    def _is_move(self, kind: Integers) -> Flags:
        return kind.clamp(0, self.exit_action - 1) == kind  # fewer operations than two comparisons

    def _per_action(self, flag: Flags) -> Bool[Tensor, "n *ones"]:
        return flag.view(-1, *(1 for _ in self.action_shape))

    def _per_row(self, flag: Flags) -> Bool[Tensor, "n *ones"]:
        return flag.view(-1, *(1 for _ in self.state_shape))

    def _equals(self, state: StateBatch, one: Shaped[Tensor, "*state"]) -> Flags:
        return (state == one).reshape(len(state), self.state_shape.numel()).all(1)


def states_of_writes(
    place: Int64[Tensor, "n T"],
    value: Int64[Tensor, "n T"],
    length: Integers,
    n_places: int,
    empty: int,
    sink: int,
) -> Int64[Tensor, "n T1 places"]:
    """Return the states of trajectories whose moves each write a value at an empty place.

    Args:
        place: where each move writes, of any value from the exit action on.
        value: what each move writes.
        length: number of real actions of each trajectory, the exit action included.
        n_places: number of places in a state.
        empty: content of a place before its write.
        sink: content of all places in the sink.
    """
    step = torch.arange(place.shape[1] + 1, device=place.device)
    is_move = step[1:] < length[:, None]
    place = place.where(is_move, n_places)  # other actions write at an additional place
    blank = place.new_full((len(place), n_places + 1), len(step))
    written = blank.scatter(1, place, step[1:].expand_as(place))[:, None, :-1]
    content = blank.scatter(1, place, value)[:, None, :-1]
    state = content.where(written <= step[:, None], empty)
    return state.masked_fill_((step >= length[:, None])[:, :, None], sink)


def check_positive(**arguments: float) -> None:
    """Raise ArgumentError unless every argument is positive and finite."""
    for name, value in arguments.items():
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ArgumentError(f"{name} must be positive and finite, got {shown(value)}")


def require_env(env: object) -> None:
    """Raise unless an argument ``env`` is an environment, and not its class or its name."""
    if not isinstance(env, GFNCore):
        raise ArgumentError(
            f"env must be an environment such as gfn_rb.envs.HyperGrid(2, 8), got {kind_of(env)}"
        )


def check_power(beta: float, min_reward: float) -> None:
    """Raise ArgumentError unless beta log max(r, min_reward) is a log-reward of r up to 1."""
    check_positive(beta=beta)
    if not 0 < min_reward <= 1:
        raise ArgumentError(f"min_reward must be in (0, 1], got {min_reward}")


def from_digits(digit: Int64[Tensor, "*n digits"], base: int) -> Int64[Tensor, "*n"]:
    """Read digits as numbers in a base, the most significant digit first."""
    powers = base ** torch.arange(digit.shape[-1] - 1, -1, -1, device=digit.device)
    return (digit * powers).sum(-1)


def to_digits(number: Int64[Tensor, "*n"], base: int, n_digits: int) -> Int64[Tensor, "*n digits"]:
    """Write numbers in a base, the most significant digit first."""
    powers = base ** torch.arange(n_digits - 1, -1, -1, device=number.device)
    return number[..., None] // powers % base


@lru_cache
def _random_odd(size: int, device: torch.device) -> Int64[Tensor, "size"]:
    """Return fixed odd numbers from the whole range of int64."""
    rng = random.Random(0)
    return torch.tensor([2 * rng.getrandbits(63) + 1 - 2**63 for _ in range(size)], device=device)
