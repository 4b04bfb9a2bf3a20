"""A GFlowNet's environment as a TorchRL environment."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import TypedDict

import torch
from torch import Tensor

from gfn_rb.arguments import kind_of, require_kind
from gfn_rb.envs.core import numbers_of
from gfn_rb.envs.interface import TorchRLInterface
from gfn_rb.errors import ArgumentError, ShapeError
from gfn_rb.numerics.flat import flat_rows, is_readable, numbers_in_words
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


class EnvOptions(TypedDict, total=False):
    """Keywords that every environment takes."""

    batch_size: Sequence[int]
    device: torch.device | str | None


class GFNEnv(TorchRLInterface):
    """Base class of environments: a GFlowNet's state graph, and TorchRL's interface to it.

    The graph is acyclic, with one source and one sink. Every trajectory starts in the source, takes
    moves (actions ``0 .. n_actions - 2``) and ends with the exit action ``n_actions - 1``, which
    leads from a terminating state x to the sink. Functions of states take and return batch-first
    tensors of any number of rows, work on their device and change none of them. For speed, input is
    not checked unless a method says so. Metrics of a run use ``fingerprint``, ``modes_reached`` and
    ``score``, which an environment may override.

    ``reset``, ``step`` and ``rollout`` use the keys "state", "action_mask" (legal actions),
    "backward_mask" (moves that could have led to the state) and "log_reward" (-inf unless a step
    terminates). Under "next" they also use "reward", which is exp(log_reward) and 0 until the end.
    An action outside its mask raises an error. Without ``batch_size`` they accept TensorDicts of
    any batch size. With one, the environment has that batch size, and a collector runs as many
    trajectories at once.

    ``rollout`` without a policy and ``rand_action`` sample legal actions, so no ``ActionMask``
    transform is needed. A collector needs ``policy=env.rand_action``. Collectors without a policy,
    SerialEnv and ParallelEnv sample from the action spec and ignore masks.

    A subclass defines ``forward_mask``, ``backward_mask``, ``move``, ``undo``, ``log_reward`` and
    ``encode``. If its rewards depend on a condition, it gives a ``condition_shape`` and defines
    ``sample_condition``; networks see ``encode_condition`` beside ``encode``, which is given states
    alone. :func:`check_env` tests a subclass.

    Args:
        source_state: s0, [*S].
        sink_state: the state after the exit action, [*S]; no other state may equal it.
        n_actions: number of actions, the exit action included; of kinds, if actions have
            parameters (:class:`~gfn_rb.envs.ContinuousEnv`).
        max_length: number of actions in the longest trajectory, the exit action included.
        encoded_size: width of the rows that ``encode`` returns.
        condition_shape: shape of one condition; None if rewards depend on none.
        batch_size: batch size of the TorchRL interface; () accepts any.
        device: device of the environment's tensors.

    Attributes:
        state_shape: S.
        state_dtype: dtype of states.
        state_range: the lowest and the highest number in any state, the sink included; None for
            states that are not bounded integers.
        is_deterministic: whether the actions of a trajectory determine its states.
        exit_action: the last action.
        action_shape: shape of one action; () for a number.
        action_dtype: dtype of actions.
        dummy_action: the action that pads a trajectory after its end.
        n_modes: number of modes; 0 if none are defined, None if their number is unknown.
    """

    source_state: Tensor
    sink_state: Tensor
    state_range: tuple[int, int] | None = None
    is_deterministic: bool = True
    action_shape: torch.Size = torch.Size()
    action_dtype: torch.dtype = torch.int64
    dummy_action: int = -1
    condition_shape: torch.Size | None = None
    n_modes: int | None = 0

    def __init__(
        self,
        source_state: Shaped[Tensor, "*state"],
        sink_state: Shaped[Tensor, "*state"],
        *,
        n_actions: int,
        max_length: int,
        encoded_size: int,
        condition_shape: Sequence[int] | None = None,
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device=device, batch_size=torch.Size(batch_size))
        self._register(source_state=source_state, sink_state=sink_state)
        self.state_shape, self.state_dtype = source_state.shape, source_state.dtype
        self.n_actions, self.exit_action = n_actions, n_actions - 1
        self.max_length, self.encoded_size = max_length, encoded_size
        if condition_shape is not None:  # a class may also say it once for all
            self.condition_shape = torch.Size(condition_shape)
        self._set_specs()

    def source(self, n: int) -> StateBatch:
        """Return ``n`` rows of the source state."""
        return self.source_state.expand(n, *self.state_shape).clone()

    def is_source(self, state: StateBatch) -> Flags:
        """Return which rows are the source."""
        return flat_rows(state == self.source_state).all(1)

    def is_sink(self, state: StateBatch) -> Flags:
        """Return which rows are the sink."""
        return flat_rows(state == self.sink_state).all(1)

    def is_in_range(self, state: StateBatch) -> Flags:
        """Return which rows hold numbers within ``state_range`` alone; all if it is None."""
        if self.state_range is None:
            return torch.ones(len(state), dtype=torch.bool, device=state.device)
        low, high = self.state_range
        return flat_rows((state >= low) & (state <= high)).all(1)

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
        """Return actions of given kinds, with random parameters if actions have parameters.

        Args:
            state: states, [n, *S]; the moves start here, or lead here with ``is_backward``.
            kind: number of each action, int64 [n].
            is_backward: whether the moves lead to ``state``.
        """
        return kind

    @abstractmethod
    def forward_mask(self, state: StateBatch) -> Bool[Tensor, "n actions"]:
        """Return which actions are legal; none is in the sink."""

    @abstractmethod
    def backward_mask(self, state: StateBatch) -> Bool[Tensor, "n moves"]:
        """Return which moves could have led here; none did to the source or the sink."""

    def forward_step(self, state: StateBatch, action: ActionBatch) -> StateBatch:
        """Take one action per row; the exit action and the dummy action lead to the sink.

        Args:
            state: states, [n, *S].
            action: one action per row, [n, *A]; legal, or -1 for padding.
        """
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

    def only_moves(self, state: StateBatch) -> Shaped[Tensor, "n T *action"] | None:
        """Return the moves to each terminating state, [n, T, *A], if no others lead there.

        An environment overrides this if its graph is a tree whose terminating states all have
        equally many moves. Backward policies then have nothing to choose. Default: None.
        """
        return None

    def backward_step(self, state: StateBatch, action: ActionBatch) -> StateBatch:
        """Undo one move per row; rows with the dummy action (padding) become the sink.

        The exit action cannot be undone: the sink does not show the state before it.
        """
        is_move = self._is_move(self.kind(action))
        undone = self.undo(state, action.where(self._per_action(is_move), 0))
        return undone.where(self._per_row(is_move), self.sink_state)

    @abstractmethod
    def move(self, state: StateBatch, move: ActionBatch) -> StateBatch:
        """Make one move per row, out of place; rows where it is illegal may hold anything.

        Args:
            state: states, [n, *S].
            move: one move per row, [n, *A], not the exit action.
        """

    @abstractmethod
    def undo(self, state: StateBatch, move: ActionBatch) -> StateBatch:
        """Undo one move per row, out of place, as :meth:`move` makes them."""

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
        """Draw ``n`` conditions for new trajectories; None where the environment has none.

        Args:
            n: number of conditions.
            generator: ``torch.Generator``. Default: PyTorch's global generator.
        """
        return None

    def fixed_conditions(self, n: int) -> ConditionBatch | None:
        """Return ``n`` conditions, always the same, that span the law of ``sample_condition``.

        Metrics use them. None if the environment has no conditions. By default they are drawn with
        a fixed seed.
        """
        if self.condition_shape is None:
            return None
        device = self.source_state.device
        with torch.random.fork_rng(devices=[]):  # for methods that do not use the generator
            torch.manual_seed(0)
            return self.sample_condition(n, torch.Generator(device).manual_seed(0))

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

    def describe(self, state: StateBatch) -> list[str]:
        """Return each terminating state in words, on one line; different for different states.

        Reports, tables and ``rb.summary(env)`` show them. The default prints the numbers.
        """
        return numbers_in_words(state)

    def parse(self, words: Sequence[str]) -> StateBatch:
        """Return the terminating states that texts describe: the inverse of :meth:`describe`.

        Numbers that ``describe`` rounds, as those of continuous states, stay rounded. The default
        reads the numbers of the default of ``describe``.

        Args:
            words: text of each state.

        Raises:
            ArgumentError: a text describes no terminating state, or the environment has words of
                its own for its states and no ``parse``.
        """
        if type(self).describe is not GFNEnv.describe:
            raise ArgumentError(f"{type(self).__name__} must have a method parse to read objects")
        rows = numbers_of(words, self.state_shape.numel(), self.state_dtype)
        state = rows.to(self.source_state.device).reshape(-1, *self.state_shape)
        legal = self.forward_mask(state)[:, self.exit_action] & self.is_in_range(state)
        if len(state) and not bool(legal.all()):
            text = words[int((~legal).nonzero()[0])]
            raise ArgumentError(
                f"words must describe terminating states of {type(self).__name__}, got {text!r:.80}"
            )
        return state

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
        is R(x), where rewards depend on a condition under the first of :meth:`fixed_conditions`.
        Arguments are those of :meth:`modes_reached`.
        """
        condition = self.fixed_conditions(1)
        if condition is not None:
            log_reward = self.log_reward(state, condition.expand(len(state), *condition.shape[1:]))
        return (self.log_reward(state) if log_reward is None else log_reward).exp()

    def check_state(self, state: Tensor, name: str = "state") -> None:
        """Raise ShapeError unless ``state`` is a batch of states.

        Args:
            state: states, expected as [n, *S] of dtype ``state_dtype``.
            name: name of the argument in the message.
        """
        require_kind(name, state, Tensor)
        fits = state.ndim > 0 and state.shape[1:] == self.state_shape
        if not fits or state.dtype != self.state_dtype:
            expected = ", ".join(["n", *map(str, self.state_shape)])
            raise ShapeError(
                f"{name} must be {self.state_dtype} of shape [{expected}], got {state.dtype} of "
                f"shape {list(state.shape)}"
            )

    def check_terminating(self, state: Tensor, name: str = "state") -> None:
        """Raise as :meth:`check_state` does, or ArgumentError if an exit action is illegal."""
        self.check_state(state, name)
        legal = self.forward_mask(state)[:, self.exit_action]
        if not is_readable(legal):  # the device raises, so as not to wait for it
            assert_on_device(legal.all(), f"{name} must be terminating (its exit action legal)")
        elif not legal.all():
            row = int((~legal).nonzero()[0])
            raise ArgumentError(
                f"{name} must be terminating (its exit action legal), got {state[row].tolist()} "
                f"in row {row}"
            )

    def checked_condition(
        self,
        condition: Shaped[Tensor, "*rows_condition"] | None,
        *rows: int,
        name: str = "condition",
    ) -> Shaped[Tensor, "*rows_condition"]:
        """Return a condition if it fits the environment.

        Args:
            condition: conditions, expected as [*rows, *C].
            *rows: number of rows; none for a single condition, [*C].
            name: name of the argument in the message.

        Raises:
            ArgumentError: the condition is None, or rewards depend on none.
            ShapeError: another shape.
        """
        kind = type(self).__name__
        if condition is None:
            raise ArgumentError(f"{name} must be given for {kind}, got None")
        if self.condition_shape is None:
            raise ArgumentError(
                f"{name} must be None for {kind}, got shape {list(condition.shape)}"
            )
        if condition.shape != (*rows, *self.condition_shape):
            raise ShapeError(
                f"{name} must have shape {[*rows, *self.condition_shape]}, got "
                f"{list(condition.shape)}"
            )
        return condition

    def _is_move(self, kind: Integers) -> Flags:
        return kind.clamp(0, self.exit_action - 1) == kind  # fewer operations than two comparisons

    def _per_action(self, flag: Flags) -> Bool[Tensor, "n *ones"]:
        return flag.view(-1, *(1 for _ in self.action_shape))

    def _per_row(self, flag: Flags) -> Bool[Tensor, "n *ones"]:
        return flag.view(-1, *(1 for _ in self.state_shape))


def require_env(env: object) -> None:
    """Raise unless an argument ``env`` is an environment, and not its class or its name."""
    if not isinstance(env, GFNEnv):
        raise ArgumentError(
            f"env must be an environment such as gfn_rb.envs.HyperGrid(2, 8), got {kind_of(env)}"
        )


@lru_cache
def _random_odd(size: int, device: torch.device) -> Int64[Tensor, "size"]:
    """Return fixed odd numbers from the whole range of int64."""
    rng = random.Random(0)
    return torch.tensor([2 * rng.getrandbits(63) + 1 - 2**63 for _ in range(size)], device=device)
