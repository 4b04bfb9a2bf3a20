"""Adapters of torchgfn's discrete environments and of their estimators."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from gfn.estimators import Estimator
from torch import Tensor

from gfn_rb import keys
from gfn_rb.arguments import require_kind
from gfn_rb.envs.checks import check_env
from gfn_rb.envs.enumerable import EnumerableEnv
from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.flat import equal_bits, flat_rows
from gfn_rb.rollout.outputs import StateModule
from gfn_rb.shapes import Bool, ConditionBatch, Float, Floats, Integers, StateBatch

MAX_LISTED = 100_000  # states that are listed unasked
UNKNOWN_LENGTH = 2**14  # limit of walks whose longest length nobody has given or found


class TorchGFNEnv(EnumerableEnv):
    """A discrete torchgfn environment with the interface of a ``GFNEnv``.

    :func:`adapt_env` makes it, with the same arguments, and checks it. If its states were listed it
    also gives the exact answers of an ``EnumerableEnv``. It has no modes. It is on the device of
    the environment it wraps.

    Attributes:
        inner: the environment it wraps.
        n_states: number of states; infinite if they were not listed.
    """

    n_states: float = math.inf  # type: ignore[assignment]

    def __init__(
        self, env: Any, preprocessor: Callable[..., Tensor] | None, max_length: int | None
    ) -> None:
        if not getattr(env, "is_discrete", False):
            raise ArgumentError("its actions are not discrete")
        if int(env.exit_action) != env.n_actions - 1:
            raise ArgumentError(
                f"its exit action must be the last, {env.n_actions - 1}, got {int(env.exit_action)}"
            )
        # Not a submodule, nor anything TorchRL's environments would look into.
        object.__setattr__(self, "inner", env)
        self._preprocessor = preprocessor
        shape = env.sample_conditions((1,)).shape[1:] if env.is_conditional else None
        super().__init__(
            env.s0, env.sf, n_actions=env.n_actions, max_length=max_length or 1, encoded_size=1,
            condition_shape=shape, device=env.device,
        )  # fmt: skip
        self.encoded_size = self.encode(self.source(1)).shape[1]
        if max_length is None:  # counts all states, and with them the longest trajectory
            state, found = self.source(1), []
            while len(state):
                found.append(self.state_key(state))
                if sum(map(len, found)) > MAX_LISTED:
                    raise ArgumentError(
                        f"max_length must be given where there are more than {MAX_LISTED} states "
                        "to find it among, got None"
                    )
                state = self._expand(state)[1]
            self.max_length, key = len(found), torch.cat(found)
            if len(key.unique()) == len(key):  # or paths of several lengths lead to one state
                self.n_states = len(key)

    def forward_mask(self, state: StateBatch) -> Bool[Tensor, "n actions"]:
        """Return torchgfn's mask, with nothing allowed in the sink."""
        return self.states(state).forward_masks & ~self.is_sink(state)[:, None]

    def backward_mask(self, state: StateBatch) -> Bool[Tensor, "n moves"]:
        """Return torchgfn's mask, with nothing leading to the source or the sink."""
        inside = ~(self.is_sink(state) | self.is_source(state))
        return self.states(state).backward_masks & inside[:, None]

    def forward_step(self, state: StateBatch, action: Integers) -> StateBatch:
        """Take one action per row; torchgfn takes those that do not exit."""
        return self._stepped(self.move, state, action)

    def backward_step(self, state: StateBatch, action: Integers) -> StateBatch:
        """Undo one move per row, by torchgfn's ``backward_step``."""
        return self._stepped(self.undo, state, action)

    def log_reward(self, state: StateBatch, condition: ConditionBatch | None = None) -> Floats:
        """Return torchgfn's ``log_reward``, float32."""
        self.check_terminating(state)
        given = None
        if self.condition_shape is not None:
            given = self.checked_condition(condition, len(state))
        return self.inner.log_reward(self.states(state, given)).detach().float()

    def encode(self, state: StateBatch) -> Float[Tensor, "n encoded"]:
        """Return the preprocessor's output, or the state itself; the sink's is the source's."""
        state = state.where(~self._per_row(self.is_sink(state)), self.source_state)
        out = state if self._preprocessor is None else self._preprocessor(self.states(state))
        return flat_rows(out).float()

    def sample_condition(
        self, n: int, generator: torch.Generator | None = None
    ) -> ConditionBatch | None:
        """Draw ``n`` conditions as torchgfn does, with a seed drawn from ``generator`` if given."""
        if self.condition_shape is None:
            return None
        if generator is None:
            return self.inner.sample_conditions((n,))
        seed = torch.randint(2**62, (), generator=generator, device=generator.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(seed))
            return self.inner.sample_conditions((n,))

    def fingerprint(self, state: StateBatch) -> Integers:
        """Hash states. Floats are hashed by their bits, which a sum would round away."""
        if state.is_floating_point():
            state = equal_bits(state.double())
        return super(EnumerableEnv, self).fingerprint(state)

    def state_key(self, state: StateBatch) -> Integers:
        """Return each state's hash, distinct among the states that were listed."""
        return self.fingerprint(state)

    def states(self, state: StateBatch, condition: Tensor | None = None) -> Any:
        """Return rows and their conditions as torchgfn's ``States``, which share their memory."""
        if condition is None:
            return self.inner.states_from_tensor(state)
        return self.inner.states_from_tensor(state, conditions=condition)

    def move(self, state: StateBatch, move: Integers) -> StateBatch:
        """Return the states after one move per row, by torchgfn's ``step``."""
        actions = self.inner.actions_from_tensor(move[:, None])
        return self.inner.step(self.states(state.clone()), actions).tensor

    def undo(self, state: StateBatch, move: Integers) -> StateBatch:
        """Return the states before one move per row, by torchgfn's ``backward_step``."""
        # It assumes that all sequences of a batch have one length: one call per length.
        length = getattr(self.states(state), "length", None)
        if length is None:
            length = move.new_zeros(len(move))
        out = torch.empty_like(state)
        for one in length.unique():
            rows = (length == one).nonzero()[:, 0]
            actions = self.inner.actions_from_tensor(move[rows, None])
            out[rows] = self.inner.backward_step(self.states(state[rows]), actions).tensor
        return out

    def _stepped(
        self, step: Callable[..., Tensor], state: StateBatch, action: Integers
    ) -> StateBatch:
        rows = (self._is_move(action) & ~self.is_sink(state)).nonzero()[:, 0]
        out = self.sink_state.expand_as(state).clone()
        out[rows] = step(state[rows], action[rows])
        return out


def adapt_env(
    env: Any, preprocessor: Callable[..., Tensor] | None = None, max_length: int | None = None
) -> TorchGFNEnv:
    """Return a discrete torchgfn environment as a ``GFNEnv``, for samplers, losses and trainer.

    Its promises are checked on some random walks first.

    Args:
        env: a ``gfn.env.DiscreteEnv``, torchgfn's or your own.
        preprocessor: one of ``gfn.preprocessors``, whose output our networks see instead of
            states; None means the states themselves. Adapted estimators keep their own.
        max_length: actions in the longest trajectory, the exit action included. None lists the
            states, up to 100,000, to find it; where all paths to a state have the same length,
            exact questions (``log_partition``, ``policy_log_prob``) are answered, too.

    Raises:
        ArgumentError: the environment cannot be adapted: its actions are not discrete, its exit
            action is not the last, its transitions are random, its states remember more than their
            tensor, or it breaks another promise; or ``max_length`` is needed, or is too short.
    """
    name = type(env).__name__
    try:
        adapted = TorchGFNEnv(env, preprocessor, max_length)
        longest, limit = _steady_walks(adapted), adapted.max_length
        if limit == UNKNOWN_LENGTH:
            adapted.max_length = longest
        check_env(adapted)
        adapted.max_length = limit
    except Exception as error:  # a foreign environment may raise anything
        kind = "" if isinstance(error, ArgumentError) else f"{type(error).__name__}: "
        raise ArgumentError(f"env of class {name} cannot be adapted: {kind}{error}") from error
    return adapted


def _steady_walks(env: TorchGFNEnv) -> int:
    """Walk as far as possible, check that each step repeats itself, count the longest walk."""
    state, generator = env.source(64), torch.Generator(env.source_state.device).manual_seed(0)
    for taken in range(env.max_length):
        mask = env.forward_mask(state)
        mask[:, -1] &= ~mask[:, :-1].any(1)
        state, mask = state[mask.any(1)], mask[mask.any(1)]
        if not len(state):
            return taken
        action = mask.float().multinomial(1, generator=generator)[:, 0]
        first, second = (env.forward_step(state, action) for _ in range(2))
        if not first.equal(second):
            raise ArgumentError("its transitions are random")
        state = first
    if not env.is_sink(state).all():
        raise ArgumentError(f"a walk outlasts max_length={env.max_length} actions")
    return env.max_length


class TorchGFNNetwork(StateModule):
    """A torchgfn estimator with its preprocessor and parameters. See :func:`adapt_estimator`.

    It reads "state" and, if the environment has conditions, "condition". It writes "logits",
    unmasked, or "log_flow".

    Attributes:
        is_backward: whether it is a backward policy.
    """

    def __init__(self, estimator: Any, env: TorchGFNEnv) -> None:
        super().__init__()
        self.estimator, self.is_backward = estimator, bool(estimator.is_backward)
        is_conditional = env.condition_shape is not None
        self.in_keys = [keys.STATE] + [keys.CONDITION] * is_conditional
        self.out_keys = [keys.LOGITS if _is_policy(estimator) else keys.LOG_FLOW]
        self._takes_condition = len(inspect.signature(estimator.forward).parameters) > 1
        self._states = env.states

    def evaluate(
        self, state: StateBatch, condition: ConditionBatch | None = None
    ) -> Float[Tensor, "n ..."]:
        """Return the estimator's output for each row."""
        states = self._states(state, condition)
        out: Tensor = self.estimator(states, *[condition] * self._takes_condition)
        return out.squeeze(1) if self.out_keys == [keys.LOG_FLOW] else out


def adapt_estimator(estimator: Any, env: object) -> TorchGFNNetwork:
    """Return a torchgfn estimator as a policy, or as an estimator of state flows.

    Args:
        estimator: a ``DiscretePolicyEstimator``, forward or backward; or a ``ScalarEstimator`` of
            log F(s). Either may be conditional.
        env: the result of :func:`adapt_env`.

    Raises:
        ArgumentError: the estimator is none of torchgfn or is recurrent, its outputs are no logits
            of the environment's actions, or it takes conditions that the environment has not.
    """
    name = type(estimator).__name__
    if not isinstance(env, TorchGFNEnv):
        raise ArgumentError(f"env must be what adapt_env returned, got a {type(env).__name__}")
    require_kind("estimator", estimator, Estimator)
    if hasattr(estimator, "init_carry"):
        raise ArgumentError(f"estimator must not be recurrent, {name} cannot be adapted")
    expected = env.n_actions - bool(estimator.is_backward) if _is_policy(estimator) else 1
    if (size := estimator.expected_output_dim) != expected:
        raise ArgumentError(
            f"estimator must give {expected} numbers per state, {name} gives {size}"
        )
    network = TorchGFNNetwork(estimator, env)
    if network._takes_condition and env.condition_shape is None:
        raise ArgumentError(
            f"env must have conditions for {name}, {type(env.inner).__name__} has none"
        )
    return network


def _is_policy(estimator: Any) -> bool:
    """Tell a policy from a scalar: the conditional scalar derives from the conditional policy."""
    return hasattr(estimator, "n_actions") and estimator.n_actions > 1
