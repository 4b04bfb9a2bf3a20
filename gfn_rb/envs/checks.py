"""Laws of environments that are quick to check, and ``check_env``, which precedes a run."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gfn_rb.arguments import require_kind
from gfn_rb.envs.base import GFNEnv
from gfn_rb.envs.core import host_form
from gfn_rb.envs.enumerable import EnumerableEnv
from gfn_rb.envs.sequence import EMPTY, SequenceEnv
from gfn_rb.errors import ArgumentError

MOST_LISTED = 200_000  # states
_log = logging.getLogger("gfn_rb.envs")


def check_env(env: GFNEnv, every_state_terminates: bool | None = None) -> None:
    """Check an environment by some random walks and their rewards, in a moment.

    All states of an ``EnumerableEnv`` are counted, and its modes looked for, if ``n_states`` is at
    most 200,000. Of a larger one, a line in the log says that this is not checked.

    Call it before you train on an environment of your own. Tests of the environment should derive
    from :mod:`gfn_rb.envs.conformance`, which checks more.

    Args:
        env: the environment, on the CPU.
        every_state_terminates: True if the exit action should be legal in every state, False if it
            should be illegal in some. None does not check this, except for a ``SequenceEnv``, which
            must allow the exit action in finished sequences alone.

    Raises:
        ArgumentError: a check failed; the message names the check, the state, what came and what
            was expected.
    """
    require_kind("env", env, GFNEnv)
    given = {"make_env": lambda _: env, "every_state_terminates": every_state_terminates}
    laws = type("Given", (QuickLaws,), {**given, "n_walks": 4})()
    for name in vars(QuickLaws):  # later laws rely on earlier ones
        if name.startswith("test_"):
            law = getattr(laws, name)
            try:
                law()
            except Exception as error:  # an environment may raise anything
                message = str(error).strip().partition("\n")[0]
                if not isinstance(error, AssertionError) or not message:
                    message = f"{type(error).__name__}: {message}"
                promise = " ".join((inspect.getdoc(law) or "").split())
                raise ArgumentError(
                    f"env must keep its promises, got a {type(env).__name__} that breaks this one: "
                    f"{promise} ({message})"
                ) from error
    if isinstance(env, EnumerableEnv) and env.n_states > MOST_LISTED:
        _log.warning(
            f"check_env did not check n_states and the modes of {type(env).__name__}: n_states is "
            f"{env.n_states:.6g}, and it does not list more than {MOST_LISTED} states"
        )


def check_same(
    what: str,
    got: object,
    expected: object,
    state: Tensor | None = None,
    action: Tensor | None = None,
    atol: float = 0.0,
) -> None:
    """Raise AssertionError, which shows the first wrong row, its state and its action.

    ``expected`` is as ``got``, or one flag for all of a tensor.
    """
    if not isinstance(got, Tensor):
        assert got == expected, f"{what} is {got}, expected {expected}"
        return
    expected = torch.as_tensor(expected)
    expected = expected if expected.ndim else expected.expand_as(got)
    check_same(f"the shape of {what}", list(got.shape), list(expected.shape))
    check_same(f"the dtype of {what}", got.dtype, expected.dtype)
    right = torch.isclose(got, expected, 0, atol, equal_nan=True)
    for i in (~right).reshape(len(got), got.shape[1:].numel()).any(1).nonzero()[:1, 0].tolist():
        at = "" if state is None else f", for state {state[i].tolist()}"
        taken = "" if action is None else f" and action {action[i].tolist()}"
        raise AssertionError(
            f"{what} is {got[i].tolist()}, expected {expected[i].tolist()}{at}{taken}"
        )


class QuickLaws(ABC):
    """Laws of every ``GFNEnv`` that are quick to check on random walks, the same at each call.

    Attributes:
        n_walks: number of random walks.
        every_state_terminates: True if the exit action must be legal in every state, False if it
            must be illegal in some, None to check neither. A subclass may set it.
    """

    n_walks = 64
    every_state_terminates: bool | None = None

    @abstractmethod
    def make_env(self) -> GFNEnv:
        """Return a new environment without a batch size, on the CPU."""

    @cached_property
    def env(self) -> Any:
        """The environment, one for each test."""
        return self.make_env()

    @property
    def atol(self) -> float:
        """Allowed rounding of a move that is made and undone."""
        return 1e-5 if self.env.state_dtype.is_floating_point else 0.0

    @cached_property
    def walks(self) -> tuple[Tensor, Tensor]:
        """States [n_walks, max_length + 1, *S] and actions [n_walks, max_length, *A]."""
        env, actions = self.env, list[Tensor]()
        states = [env.source(self.n_walks)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for _ in range(env.max_length):
                mask = env.forward_mask(states[-1])
                moving = mask.any(1)
                action = self.dummies(self.n_walks)
                if moving.any():
                    draw = torch.multinomial(mask[moving].float(), 1)[:, 0]
                    action[moving] = env.random_action(states[-1][moving], draw)
                actions.append(action)
                states.append(env.forward_step(states[-1], action))
        return torch.stack(states, 1), torch.stack(actions, 1)

    @cached_property
    def visited(self) -> Tensor:
        """The distinct states of random walks, without the sink."""
        state = self.walks[0].flatten(0, 1).unique(dim=0)
        return state[~self.env.is_sink(state)]

    @cached_property
    def terminating(self) -> Tensor:
        """The terminating states among the visited ones."""
        return self.visited[self.env.forward_mask(self.visited)[:, self.env.exit_action]]

    def moves(self, state: Tensor, is_backward: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return every legal move from (or to) the states: its state, its kind and its action."""
        env = self.env
        mask = env.backward_mask(state) if is_backward else env.forward_mask(state)[:, :-1]
        row, kind = mask.nonzero(as_tuple=True)
        return state[row], kind, env.random_action(state[row], kind, is_backward)

    def dummies(self, n: int) -> Tensor:
        """Return ``n`` dummy actions."""
        env = self.env
        return torch.full((n, *env.action_shape), env.dummy_action, dtype=env.action_dtype)

    def test_attributes_agree(self) -> None:
        """Every function returns the sizes and dtypes that the attributes name."""
        env = self.env
        source, shape = env.source(3), list(env.state_shape)
        forward, backward = env.forward_mask(source), env.backward_mask(source)
        for what, tensor, sizes, dtype in (
            ("source(3)", source, [3, *shape], env.state_dtype),
            ("sink_state", env.sink_state, shape, env.state_dtype),
            ("forward_mask(source(3))", forward, [3, env.n_actions], torch.bool),
            ("backward_mask(source(3))", backward, [3, env.n_actions - 1], torch.bool),
            ("encode(source(3))", env.encode(source), [3, env.encoded_size], torch.float32),
            ("fingerprint(source(3))", env.fingerprint(source), [3], torch.int64),
        ):
            check_same(f"the shape of {what}", list(tensor.shape), sizes)
            check_same(f"the dtype of {what}", tensor.dtype, dtype)
        check_same("exit_action", env.exit_action, env.n_actions - 1)
        check_same("dummy_action", env.dummy_action, -1)

    def test_source_and_sink_are_the_ends(self) -> None:
        """The source has moves and no parents, the sink neither; the dummy action leads to it."""
        env, dummy = self.env, self.dummies(2)
        sink, source = env.sink_state.expand(2, *env.state_shape), env.source(2)
        for name, state, is_source in (("source", source, True), ("sink", sink, False)):
            forward, backward = env.forward_mask(state).any(1), env.backward_mask(state).any(1)
            check_same(f"is_source({name})", env.is_source(state), is_source, state)
            check_same(f"is_sink({name})", env.is_sink(state), not is_source, state)
            check_same(f"forward_mask({name}).any(1)", forward, is_source, state)
            check_same(f"backward_mask({name}).any(1)", backward, False, state)
            for step in (env.forward_step, env.backward_step):
                left = env.is_sink(step(state, dummy))
                check_same(f"is_sink({step.__name__})", left, True, state, dummy)

    def test_conditions_have_their_shape(self) -> None:
        """``sample_condition`` and ``fixed_conditions`` have ``condition_shape`` and repeat."""
        env, generator = self.env, torch.Generator()
        for draw in (
            lambda: env.fixed_conditions(3),
            lambda: env.sample_condition(3, generator.manual_seed(3)),
        ):
            condition = draw()
            if env.condition_shape is None:
                check_same("condition", condition, None)
                continue
            assert condition is not None, (
                f"sample_condition is None, expected shape {[3, *env.condition_shape]}"
            )
            check_same("the shape of conditions", condition.shape, (3, *env.condition_shape))
            check_same("condition", draw(), condition)
            code = env.encode_condition(condition)
            check_same("encode_condition", code, code.view(3, -1).float())

    def test_exit_leads_to_sink(self) -> None:
        """The exit action leads to the sink from some visited states."""
        env, state = self.env, self.terminating
        assert len(state), "the number of terminating states in random walks is 0, expected some"
        action = env.exits(len(state))
        left = env.is_sink(env.forward_step(state, action))
        check_same("is_sink(forward_step)", left, True, state, action)

    def test_exit_is_legal_where_it_should_be(self) -> None:
        """The exit action is legal where ``every_state_terminates`` says."""
        state = self.visited
        legal = self.env.forward_mask(state)[:, self.env.exit_action]
        what = "the exit action in forward_mask"
        if isinstance(self.env, SequenceEnv):
            check_same(what, legal & (state == EMPTY).any(1), False, state)
        elif self.every_state_terminates:
            check_same(f"{what}, as every_state_terminates is True,", legal, True, state)
        elif self.every_state_terminates is False:
            assert not legal.all(), (
                f"{what} is True in all {len(state)} states of random walks, {state[0].tolist()} "
                "among them, expected False in some: every_state_terminates is False"
            )

    def test_walks_end_within_max_length(self) -> None:
        """Random walks reach the sink in ``max_length`` actions, all within ``state_range``."""
        env, state = self.env, self.walks[0]
        what = f"is_sink after {env.max_length} actions"
        check_same(what, env.is_sink(state[:, -1]), True, state[:, -1])
        if env.state_range is not None:
            is_inside = env.is_in_range(state)
            check_same(f"a number within state_range={env.state_range}", is_inside, True, state)

    def test_moves_are_undone(self) -> None:
        """Each legal move, forward or backward, is legal in reverse and undone by it."""
        env = self.env
        forward = "forward", env.forward_step, env.forward_mask
        backward = "backward", env.backward_step, env.backward_mask
        for (way, step, _), (back, undo, undo_mask) in ((forward, backward), (backward, forward)):
            state, kind, action = self.moves(self.visited, way == "backward")
            there = step(state, action)
            check_same(f"is_sink({way}_step)", env.is_sink(there), False, state, action)
            marked = undo_mask(there).gather(1, kind[:, None])[:, 0]
            check_same(f"a {way} move in {back}_mask of its result", marked, True, state, action)
            check_same(f"{back}_step", undo(there, action), state, there, action, self.atol)

    def test_backward_walks_end_in_source(self) -> None:
        """Every walk of backward moves from a visited state ends in the source."""
        env, state = self.env, self.visited.clone()
        generator = torch.Generator().manual_seed(1)
        for _ in range(env.max_length - 1):
            mask = env.backward_mask(state)
            moving = mask.any(1)
            begun = moving | env.is_source(state)
            check_same("backward_mask.any(1) or is_source", begun, True, state)
            kind = torch.multinomial(mask[moving].float(), 1, generator=generator)[:, 0]
            action = env.random_action(state[moving], kind, is_backward=True)
            state[moving] = env.backward_step(state[moving], action)
        what = f"the state after up to {env.max_length - 1} backward moves"
        check_same(what, state, env.source(len(state)), self.visited, atol=self.atol)

    def test_states_are_told_apart(self) -> None:
        """``encode``, ``fingerprint`` and ``describe`` differ for different states."""
        env, state, terminating = self.env, self.visited, self.terminating
        for at in (state, env.sink_state[None]):
            check_same("encode.isfinite().all(1)", env.encode(at).isfinite().all(1), True, at)
        words = env.describe(terminating)
        check_same("the number of texts of describe(state)", len(words), len(terminating))
        for text in words:
            is_line = isinstance(text, str) and "\n" not in text
            assert is_line, f"describe gives {text!r}, expected one line of text"
        if type(env).describe is GFNEnv.describe or type(env).parse is not GFNEnv.parse:
            parsed, atol = env.parse(words), 1e-3 * max(1.0, float(terminating.abs().max()))
            is_rounded = env.state_dtype.is_floating_point
            what = "parse(describe(state))"
            check_same(what, parsed, terminating, terminating, atol=atol if is_rounded else 0.0)
        for what, at, values in (
            ("encode", state, [*map(tuple, env.encode(state).tolist())]),
            ("fingerprint", state, env.fingerprint(state).tolist()),
            ("describe", terminating, words),
        ):
            first: dict[Any, int] = {}
            for i, value in enumerate(values):
                other = first.setdefault(value, i)
                is_rounded = what == "describe" and env.state_dtype.is_floating_point
                assert other == i or is_rounded, (
                    f"{what} of states {at[other].tolist()} and {at[i].tolist()} is the same"
                )

    @cached_property
    def listed(self) -> Tensor | None:
        """All states that moves reach from the source; None where they cannot be listed."""
        env = self.env
        if not isinstance(env, EnumerableEnv) or env.n_states > MOST_LISTED:
            return None
        layers, n = [env.source(1)], 1
        while n <= env.n_states and len(layers[-1]):  # a wrong number ends the search, too
            before, _, move = self.moves(layers[-1])
            layers.append(env.forward_step(before, move).unique(dim=0))
            n += len(layers[-1])
        return torch.cat(layers)

    def test_states_are_as_many_as_is_said(self) -> None:
        """Moves from the source reach ``n_states`` states, each after one number of moves."""
        if (state := self.listed) is None:
            return
        n_states, different = self.env.n_states, len(state.unique(dim=0))
        assert different <= n_states, f"n_states is {n_states}, expected {different} or more"
        check_same("the number of states by their number of moves", len(state), different)
        check_same("n_states", n_states, different)

    def test_modes_have_terminating_states(self) -> None:
        """Modes are numbered from 0 below ``n_modes``, and each has a terminating state."""
        if (state := self.listed) is None:
            return
        state = state[self.env.forward_mask(state)[:, self.env.exit_action]]
        mode, n_modes = self.env.mode_index(state), self.env.n_modes
        is_known = (mode >= -1) & (mode < n_modes)
        check_same(f"a mode_index in [-1, {n_modes})", is_known, True, state)
        lacking = sorted({*range(n_modes)} - {*mode.tolist()})
        assert not lacking, (
            f"mode {lacking[0]} has none among all {len(state)} terminating states, expected some "
            f"for each of n_modes={n_modes}"
        )

    def test_log_reward_is_a_float32_vector(self) -> None:
        """``log_reward`` is a float32 number, or -inf, for each terminating state."""
        state = self.terminating[: self.n_walks]
        log_reward = self.env.log_reward(state, self.env.sample_condition(len(state)))
        check_same("the shape of log_reward", list(log_reward.shape), [len(state)])
        check_same("the dtype of log_reward", log_reward.dtype, torch.float32)
        check_same("log_reward < inf", log_reward < torch.inf, True, state)

    def test_functions_are_pure(self) -> None:
        """Rows give the same alone, as NumPy arrays and in no batch, and inputs are left alone."""
        env = self.env
        state, _, move = self.moves(self.visited)
        child, source = env.forward_step(state, move), env.source(1).clone()
        env.source(1).fill_(99)
        check_same("source(1)", env.source(1), source)
        calls: list[tuple[Any, ...]] = [
            *((each, state, move) for each in (env.move, env.forward_step)),
            *((each, child, move) for each in (env.undo, env.backward_step)),
            *((each, state) for each in (env.forward_mask, env.backward_mask, env.encode)),
            *((each, state) for each in (env.is_source, env.is_sink, env.fingerprint)),
        ]
        for method, *given in calls:
            name, before = method.__name__, [each.clone() for each in given]
            result = method(*given)
            for tensor, old in zip(given, before, strict=True):
                check_same(f"the input of {name}", tensor, old)
            few = zip(*(each[:8].split(1) for each in given), strict=True)
            alone = torch.cat([method(*row) for row in few])
            check_same(f"{name} of one row", alone, result[:8], state)
            check_same(f"{name} of no row", method(*(each[:0] for each in given)), result[:0])
            found = torch.from_numpy(host_form(method)(*(each.numpy() for each in given)))
            check_same(f"the host form of {name}", found, result, state)
