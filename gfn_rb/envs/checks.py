"""Checks of an environment's functions, quick enough to precede every run."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from gfn_rb.arguments import require_kind
from gfn_rb.envs.base import GFNEnv
from gfn_rb.envs.core import on_host
from gfn_rb.envs.orders import EMPTY
from gfn_rb.envs.sequence import SequenceEnv
from gfn_rb.errors import ArgumentError


def check_env(env: GFNEnv, every_state_terminates: bool | None = None) -> None:
    """Check an environment by some random walks and their rewards, in a moment.

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
    walks = _FewWalks(env, every_state_terminates)
    for name in (*vars(CoreConformance), *vars(_FewWalks)):  # later checks rely on earlier ones
        if name.startswith("test_"):
            check = getattr(walks, name)
            try:
                check()
            except Exception as error:  # an environment may raise anything
                message = str(error).strip().partition("\n")[0]
                if not isinstance(error, AssertionError) or not message:
                    message = f"{type(error).__name__}: {message}"
                promise = " ".join((inspect.getdoc(check) or "").split())
                raise ArgumentError(
                    f"env must keep its promises, got a {type(env).__name__} that breaks this one: "
                    f"{promise} ({message})"
                ) from error


def expect(what: str, got: object, expected: object) -> None:
    """Raise AssertionError, which shows both, unless ``got`` is as expected."""
    assert got == expected, f"{what} is {got}, expected {expected}"


def expect_rows(
    what: str,
    got: Tensor,
    expected: Tensor | bool,
    state: Tensor,
    action: Tensor | None = None,
    atol: float = 0.0,
) -> None:
    """Raise AssertionError, which shows a state and its wrong row, unless rows are as expected."""
    expected = torch.as_tensor(expected).expand_as(got) if isinstance(expected, bool) else expected
    expect(f"the shape of {what}", list(got.shape), list(expected.shape))
    right = (got.double() - expected.double()).abs() <= atol
    wrong = (~right).reshape(len(got), -1).any(1).nonzero()
    if len(wrong):
        i = int(wrong[0])
        taken = "" if action is None else f" and action {action[i].tolist()}"
        raise AssertionError(
            f"{what} is {got[i].tolist()}, expected {expected[i].tolist()}, for state "
            f"{state[i].tolist()}{taken}"
        )


class CoreConformance(ABC):
    """Tests of every ``GFNEnv`` that need no pytest, on random walks, the same at each call."""

    n_walks = 64
    atol = 0.0  # allowed rounding of a move that is made and undone

    @abstractmethod
    def make_env(self) -> GFNEnv:
        """Return a new environment without a batch size, on the CPU."""

    def walk(self, env: GFNEnv) -> tuple[Tensor, Tensor]:
        """Return states [n_walks, max_length + 1, *S] and actions [n_walks, max_length, *A]."""
        states, actions = [env.source(self.n_walks)], []
        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # for random_action
            for _ in range(env.max_length):
                mask = env.forward_mask(states[-1])
                moving = mask.any(1)
                action = self.dummies(env, self.n_walks)
                if moving.any():
                    draw = torch.multinomial(mask[moving].float(), 1, generator=generator)
                    action[moving] = env.random_action(states[-1][moving], draw[:, 0])
                actions.append(action)
                states.append(env.forward_step(states[-1], action))
        return torch.stack(states, 1), torch.stack(actions, 1)

    def visited(self, env: GFNEnv) -> Tensor:
        """Return the distinct states of random walks, without the sink."""
        state = self.walk(env)[0].flatten(0, 1).unique(dim=0)
        return state[~env.is_sink(state)]

    def terminating(self, env: GFNEnv) -> Tensor:
        """Return the terminating states among the visited ones."""
        state = self.visited(env)
        return state[env.forward_mask(state)[:, env.exit_action]]

    def moves(
        self, env: GFNEnv, state: Tensor, is_backward: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return every legal move from (or to) the states: its state, its kind and its action."""
        mask = env.backward_mask(state) if is_backward else env.forward_mask(state)[:, :-1]
        row, kind = mask.nonzero(as_tuple=True)
        return state[row], kind, env.random_action(state[row], kind, is_backward)

    def dummies(self, env: GFNEnv, n: int) -> Tensor:
        """Return ``n`` dummy actions."""
        return torch.full((n, *env.action_shape), env.dummy_action, dtype=env.action_dtype)

    def test_attributes_agree(self) -> None:
        """The source, sink, actions and masks have the sizes and dtypes of the attributes."""
        env = self.make_env()
        source = env.source(3)
        expect("the shape of source(3)", list(source.shape), [3, *env.state_shape])
        expect("the dtype of source(3)", source.dtype, env.state_dtype)
        expect("the dtype of sink_state", env.sink_state.dtype, env.state_dtype)
        expect("the shape of sink_state", env.sink_state.shape, env.state_shape)
        expect("exit_action", env.exit_action, env.n_actions - 1)
        expect("dummy_action", env.dummy_action, -1)
        mask, backward_mask = env.forward_mask(source), env.backward_mask(source)
        expect("the shape of forward_mask(source(3))", list(mask.shape), [3, env.n_actions])
        shape = [3, env.n_actions - 1]
        expect("the shape of backward_mask(source(3))", list(backward_mask.shape), shape)

    def test_source_has_no_parents(self) -> None:
        """The source is the start: not the sink, with legal actions and without parents."""
        env = self.make_env()
        source = env.source(2)
        expect_rows("is_source", env.is_source(source), True, source)
        expect_rows("is_sink", env.is_sink(source), False, source)
        expect_rows("forward_mask(source).any(1)", env.forward_mask(source).any(1), True, source)
        expect_rows("backward_mask(source).any(1)", env.backward_mask(source).any(1), False, source)

    def test_sink_is_an_end(self) -> None:
        """The sink has no legal action, and the dummy action leads to it, forward and backward."""
        env = self.make_env()
        sink, source = env.sink_state.expand(2, *env.state_shape), env.source(2)
        expect_rows("is_sink", env.is_sink(sink), True, sink)
        expect_rows("is_source", env.is_source(sink), False, sink)
        expect_rows("forward_mask(sink).any(1)", env.forward_mask(sink).any(1), False, sink)
        expect_rows("backward_mask(sink).any(1)", env.backward_mask(sink).any(1), False, sink)
        dummy = self.dummies(env, 2)
        for state in (sink, source):
            for step in (env.forward_step, env.backward_step):
                left = env.is_sink(step(state, dummy))
                expect_rows(f"is_sink({step.__name__})", left, True, state, dummy)

    def test_exit_leads_to_sink(self) -> None:
        """The exit action leads to the sink, and no legal move does."""
        env = self.make_env()
        state = self.terminating(env)
        assert len(state), "the number of terminating states in random walks is 0, expected some"
        action = env.exits(len(state))
        left = env.is_sink(env.forward_step(state, action))
        expect_rows("is_sink(forward_step)", left, True, state, action)
        state, _, action = self.moves(env, self.visited(env))
        left = env.is_sink(env.forward_step(state, action))
        expect_rows("is_sink(forward_step)", left, False, state, action)

    def test_walks_end_within_max_length(self) -> None:
        """Uniform random walks reach the sink in at most ``max_length`` actions."""
        env = self.make_env()
        last = self.walk(env)[0][:, -1]
        expect_rows(f"is_sink after {env.max_length} actions", env.is_sink(last), True, last)

    def test_backward_step_undoes_each_legal_move(self) -> None:
        """Every legal move is in the backward mask of the state after it, and is undone by it."""
        env = self.make_env()
        state, kind, action = self.moves(env, self.visited(env))
        child = env.forward_step(state, action)
        marked = env.backward_mask(child).gather(1, kind[:, None])[:, 0]
        expect_rows("a move in backward_mask of its result", marked, True, state, action)
        undone = env.backward_step(child, action)
        expect_rows("backward_step", undone, state, child, action, self.atol)

    def test_forward_step_redoes_each_parent_move(self) -> None:
        """Every move in a backward mask is legal in the state before it, and leads back."""
        env = self.make_env()
        state, kind, action = self.moves(env, self.visited(env), is_backward=True)
        parent = env.backward_step(state, action)
        expect_rows("is_sink(backward_step)", env.is_sink(parent), False, state, action)
        legal = env.forward_mask(parent).gather(1, kind[:, None])[:, 0]
        what = "a move of backward_mask, in forward_mask of the state before it,"
        expect_rows(what, legal, True, state, action)
        redone = env.forward_step(parent, action)
        what = "forward_step(backward_step), of a move of backward_mask,"
        expect_rows(what, redone, state, state, action, self.atol)

    def test_backward_walks_end_in_source(self) -> None:
        """Every walk of backward moves from a visited state ends in the source."""
        env = self.make_env()
        first = self.visited(env)
        state = first.clone()
        generator = torch.Generator().manual_seed(1)
        for _ in range(env.max_length - 1):
            mask = env.backward_mask(state)
            moving = mask.any(1)
            begun = moving | env.is_source(state)
            expect_rows("backward_mask.any(1) or is_source", begun, True, state)
            kind = torch.multinomial(mask[moving].float(), 1, generator=generator)[:, 0]
            action = env.random_action(state[moving], kind, is_backward=True)
            state[moving] = env.backward_step(state[moving], action)
        what = f"the state after up to {env.max_length - 1} backward moves"
        expect_rows(what, state, env.source(len(state)), first, atol=self.atol)

    def test_encode_tells_states_apart(self) -> None:
        """``encode`` gives finite float32 rows, different ones for different states."""
        env = self.make_env()
        state = self.visited(env)
        code = env.encode(state)
        expect("the shape of encode(state)", list(code.shape), [len(state), env.encoded_size])
        expect("the dtype of encode(state)", code.dtype, torch.float32)
        expect_rows("encode(state).isfinite().all(1)", code.isfinite().all(1), True, state)
        _, which = code.unique(dim=0, return_inverse=True)
        same = (which[:, None] == which).triu(1).nonzero()
        assert not len(same), (
            f"encode of states {state[same[0]].tolist()} is the same, expected different rows"
        )
        sink = env.sink_state[None]
        is_finite = env.encode(sink).isfinite().all(1)
        expect_rows("encode(sink).isfinite().all(1)", is_finite, True, sink)

    def test_words_tell_states_apart(self) -> None:
        """``describe`` gives one line of text per terminating state, no two the same."""
        env = self.make_env()
        state = self.terminating(env)
        words = env.describe(state)
        expect("the number of texts of describe(state)", len(words), len(state))
        for text in words:
            is_line = isinstance(text, str) and "\n" not in text
            assert is_line, f"describe gives {text!r}, expected one line of text"
        if env.state_dtype.is_floating_point:  # which are shown rounded
            return
        first: dict[str, int] = {}
        for i, text in enumerate(words):
            other = first.setdefault(text, i)
            assert other == i, (
                f"describe of states {state[other].tolist()} and {state[i].tolist()} is the same, "
                f"{text!r}, expected different texts"
            )

    def test_log_reward_is_a_float32_vector(self) -> None:
        """``log_reward`` is a float32 number, or -inf, for each terminating state."""
        env = self.make_env()
        state = self.terminating(env)[: self.n_walks]
        log_reward = env.log_reward(state, env.sample_condition(len(state)))
        expect("the shape of log_reward", list(log_reward.shape), [len(state)])
        expect("the dtype of log_reward", log_reward.dtype, torch.float32)
        expect_rows("log_reward < inf", log_reward < torch.inf, True, state)

    def test_host_forms_agree(self) -> None:
        """What a method computes on NumPy arrays is what it computes on tensors."""
        env = self.make_env()
        state = self.visited(env)
        parent, _, move = self.moves(env, state)
        child = env.move(parent, move)
        calls: list[tuple[Any, ...]] = [(env.move, parent, move), (env.undo, child, move)]
        of_states = env.forward_mask, env.backward_mask, env.is_source, env.encode
        for method, *tensors in [*calls, *((each, state) for each in of_states)]:
            name = f"the host form of {method.__name__}"
            expected = method(*tensors)
            found = torch.from_numpy(on_host(method)(*(each.numpy() for each in tensors)))
            expect(f"the dtype of {name}", found.dtype, expected.dtype)
            expect(f"the shape of {name}", found.shape, expected.shape)
            is_same = torch.isclose(found, expected, 0, 0, equal_nan=True)
            is_same = is_same.reshape(len(found), -1).all(1)
            expect_rows(f"{name} == {method.__name__}", is_same, True, tensors[0])


class _FewWalks(CoreConformance):
    """Checks of one environment by few walks."""

    n_walks = 4

    def __init__(self, env: GFNEnv, every_state_terminates: bool | None) -> None:
        self._env, self._every_state_terminates = env, every_state_terminates
        self.atol = 1e-5 if env.state_dtype.is_floating_point else 0.0

    def make_env(self) -> GFNEnv:
        return self._env

    def test_exit_is_legal_where_it_should_be(self) -> None:
        """The exit action is legal in terminating states alone."""
        state = self.visited(self._env)
        legal = self._env.forward_mask(state)[:, self._env.exit_action]
        what = "the exit action in forward_mask"
        if isinstance(self._env, SequenceEnv):
            unfinished = (state == EMPTY).any(1)
            expect_rows(what, legal & unfinished, False, state)
        elif self._every_state_terminates:
            expect_rows(what, legal, True, state)
        elif self._every_state_terminates is False:
            assert not legal.all(), (
                f"{what} is True in all {len(state)} states of random walks, {state[0].tolist()} "
                "among them, expected False in some: every_state_terminates is False"
            )
