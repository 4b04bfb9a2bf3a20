"""Checks of an environment's functions, quick enough to precede every run."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from gfn_rb.envs.base import GFNEnv
from gfn_rb.envs.orders import EMPTY
from gfn_rb.envs.sequence import SequenceEnv
from gfn_rb.errors import ArgumentError


def check_env(env: GFNEnv, every_state_terminates: bool | None = None) -> None:
    """Check an environment by some random walks and two rewards, in a moment.

    Call it before you train on an environment of your own. Its tests should derive from
    :mod:`gfn_rb.envs.conformance`, which looks closer.

    Args:
        env: the environment, on the CPU.
        every_state_terminates: True if the exit action should be legal in every state, False if in
            some only, None to leave this unchecked. A ``SequenceEnv`` is always checked: it must
            allow the exit action in finished sequences alone.

    Raises:
        ArgumentError: a check failed; the message names the check, what came and what was expected.
    """
    if not isinstance(env, GFNEnv):
        raise ArgumentError(f"env must be a gfn_rb.envs.GFNEnv, got a {type(env).__name__}")
    walks = _FewWalks(env, every_state_terminates)
    for name in (*vars(CoreConformance), *vars(_FewWalks)):  # what others rest on first
        if name.startswith("test_"):
            _passed(getattr(walks, name), type(env).__name__)


def _passed(check: Callable[[], None], name: str) -> None:
    promise = " ".join((inspect.getdoc(check) or "").split())
    try:
        check()
    except Exception as error:  # what an environment of somebody else's raises may be anything
        first_line = str(error).strip().partition("\n")[0]
        is_told = isinstance(error, AssertionError) and first_line
        kind = "" if is_told else f"{type(error).__name__}: "
        raise ArgumentError(
            f"env must keep its promises, got a {name} that breaks this one: {promise} "
            f"({kind}{first_line})"
        ) from error


def expect(name: str, got: object, expected: object) -> None:
    """Raise AssertionError, which names what came and what was expected, unless they are equal."""
    assert got == expected, f"{name} is {got}, expected {expected}"


def expect_all(flags: Tensor, state: Tensor, what: str) -> None:
    """Raise AssertionError unless all flags hold; it shows the first state where one does not."""
    if not flags.all():
        raise AssertionError(f"{what}, in state {state[(~flags).nonzero()[0, 0]].tolist()}")


def expect_close(got: Tensor, expected: Tensor, state: Tensor, atol: float, what: str) -> None:
    """Raise AssertionError unless rows are as expected; it shows the first that is not."""
    expect(f"the shape after {what}", list(got.shape), list(expected.shape))
    wrong = ((got - expected).abs() > atol).reshape(len(got), -1).any(1)
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise AssertionError(
            f"{what} leads from {state[i].tolist()} to {got[i].tolist()}, "
            f"expected {expected[i].tolist()}"
        )


class RandomWalks(ABC):
    """Uniform random walks through the environment under test, the same at each call."""

    n_walks = 64
    atol = 0.0  # what a move and its way back may differ by, where they are sums of floats

    @abstractmethod
    def make_env(self) -> GFNEnv:
        """Return a new environment without a batch size, on the CPU."""

    def walk(self, env: GFNEnv) -> list[Tensor]:
        """Return the states of uniform random walks: ``max_length + 1`` tensors [n_walks, *S]."""
        return self.states_and_actions(env)[0]

    def states_and_actions(self, env: GFNEnv) -> tuple[list[Tensor], list[Tensor]]:
        """Return the states of the walks, and their ``max_length`` actions [n_walks]."""
        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self._walked(env, generator)

    def _walked(self, env: GFNEnv, generator: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
        states, actions = [env.source(self.n_walks)], []
        for _ in range(env.max_length):
            mask = env.forward_mask(states[-1])
            moving = mask.any(1)
            action = self.dummies(env, self.n_walks)
            if moving.any():
                draw = torch.multinomial(mask[moving].float(), 1, generator=generator)
                action[moving] = env.random_action(states[-1][moving], draw[:, 0])
            actions.append(action)
            states.append(env.forward_step(states[-1], action))
        return states, actions

    def visited(self, env: GFNEnv) -> Tensor:
        """Return the distinct states that random walks meet, without the sink."""
        state = torch.cat(self.walk(env)).unique(dim=0)
        return state[~env.is_sink(state)]

    def terminating(self, env: GFNEnv) -> Tensor:
        """Return the terminating states among the visited ones."""
        state = self.visited(env)
        return state[env.forward_mask(state)[:, env.exit_action]]

    def moves(self, env: GFNEnv, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return every legal move as a row of ``state`` and an action."""
        row, kind = env.forward_mask(state)[:, :-1].nonzero(as_tuple=True)
        return row, env.random_action(state[row], kind)

    def dummies(self, env: GFNEnv, n: int) -> Tensor:
        """Return ``n`` dummy actions."""
        return torch.full((n, *env.action_shape), env.dummy_action, dtype=env.action_dtype)

    def call_everything(self, env: GFNEnv, state: Tensor, move: Tensor) -> list[Tensor]:
        """Return what each function of states says about rows where ``move`` is legal."""
        child = env.forward_step(state, move)
        return [
            child,
            env.backward_step(child, move),
            env.states_of(move[:, None], torch.full_like(env.kind(move), 2)),
            env.forward_mask(state),
            env.backward_mask(state),
            env.encode(state),
            env.is_source(state),
            env.is_sink(state),
        ]


class CoreConformance(RandomWalks):
    """Tests of every ``GFNCore``: the part of the suite that needs no pytest."""

    def test_attributes_agree(self) -> None:
        """The source, sink, actions and masks have the sizes that the attributes tell."""
        env = self.make_env()
        source = env.source(3)
        expect("the shape of source(3)", list(source.shape), [3, *env.state_shape])
        expect("the dtype of source(3)", source.dtype, env.state_dtype)
        expect("the dtype of sink_state", env.sink_state.dtype, env.state_dtype)
        expect("the shape of sink_state", env.sink_state.shape, env.state_shape)
        expect("exit_action", env.exit_action, env.n_actions - 1)
        expect("dummy_action", env.dummy_action, -1)
        for name, width in {
            "forward_mask": env.n_actions,
            "backward_mask": env.n_actions - 1,
        }.items():
            mask = getattr(env, name)(source)
            expect(f"the shape of {name}(source(3))", list(mask.shape), [3, width])

    def test_source_has_no_parents(self) -> None:
        """The source is a beginning: itself, not the sink, with actions and no parents."""
        env = self.make_env()
        source = env.source(2)
        expect_all(env.is_source(source), source, "is_source is False")
        expect_all(~env.is_sink(source), source, "is_sink is True")
        expect_all(env.forward_mask(source).any(1), source, "no action is legal in the source")
        expect_all(~env.backward_mask(source).any(1), source, "the source has a parent")

    def test_sink_is_an_end(self) -> None:
        """The sink allows nothing, and padding with the dummy action leads to it both ways."""
        env = self.make_env()
        sink = env.sink_state.expand(2, *env.state_shape)
        expect_all(env.is_sink(sink), sink, "is_sink is False")
        expect_all(~env.is_source(sink), sink, "is_source is True")
        expect_all(~env.forward_mask(sink).any(1), sink, "an action is legal in the sink")
        expect_all(~env.backward_mask(sink).any(1), sink, "a move leads to the sink")
        dummy = self.dummies(env, 2)
        for state in (sink, env.source(2)):
            for step in (env.forward_step, env.backward_step):
                what = f"{step.__name__} with the dummy action does not lead to the sink"
                expect_all(env.is_sink(step(state, dummy)), state, what)

    def test_exit_leads_to_sink(self) -> None:
        """The exit action leads to the sink, and no legal move does."""
        env = self.make_env()
        state = self.visited(env)
        exits = state[env.forward_mask(state)[:, env.exit_action]]
        assert len(exits), "no walk met a terminating state"
        left = env.forward_step(exits, env.exits(len(exits)))
        expect_all(env.is_sink(left), exits, "the exit action does not lead to the sink")
        row, move = self.moves(env, state)
        arrived = env.forward_step(state[row], move)
        expect_all(~env.is_sink(arrived), state[row], "a legal move leads to the sink")

    def test_walks_end_within_max_length(self) -> None:
        """Uniform random walks reach the sink in at most ``max_length`` actions."""
        env = self.make_env()
        last = self.walk(env)[-1]
        expect_all(env.is_sink(last), last, f"a walk goes on after {env.max_length} actions")

    def test_backward_walks_end_in_source(self) -> None:
        """Undoing random moves from any state reaches the source, whatever the choices."""
        env = self.make_env()
        first = self.visited(env)
        state = first.clone()
        generator = torch.Generator().manual_seed(1)
        for _ in range(env.max_length - 1):
            mask = env.backward_mask(state)
            moving = mask.any(1)
            expect_all(moving | env.is_source(state), state, "no move is marked as the last")
            kind = torch.multinomial(mask[moving].float(), 1, generator=generator)[:, 0]
            action = env.random_action(state[moving], kind, is_backward=True)
            state[moving] = env.backward_step(state[moving], action)
        what = f"undoing up to {env.max_length - 1} moves"
        expect_close(state, env.source(len(state)), first, self.atol, what)

    def test_backward_step_undoes_each_legal_move(self) -> None:
        """Every legal move is marked in its result's backward mask and undone by it."""
        env = self.make_env()
        state = self.visited(env)
        row, move = self.moves(env, state)
        child = env.forward_step(state[row], move)
        marked = env.backward_mask(child).gather(1, env.kind(move)[:, None])
        what = "a legal move is missing from the backward mask of its result"
        expect_all(marked[:, 0], state[row], what)
        what = "undoing a move"
        expect_close(env.backward_step(child, move), state[row], child, self.atol, what)

    def test_forward_step_redoes_each_parent_move(self) -> None:
        """Every move in a backward mask leads to a state where it is legal and leads back."""
        env = self.make_env()
        state = self.visited(env)
        row, kind = env.backward_mask(state).nonzero(as_tuple=True)
        move = env.random_action(state[row], kind, is_backward=True)
        parent = env.backward_step(state[row], move)
        expect_all(
            ~env.is_sink(parent), state[row], "a move in the backward mask undoes to the sink"
        )
        legal = env.forward_mask(parent).gather(1, kind[:, None])
        what = "a backward mask holds a move that is illegal in the parent"
        expect_all(legal[:, 0], state[row], what)
        what = "a move in a backward mask"
        expect_close(env.forward_step(parent, move), state[row], parent, self.atol, what)

    def test_encode_tells_states_apart(self) -> None:
        """``encode`` gives finite float32 rows, different ones for different states."""
        env = self.make_env()
        state = self.visited(env)
        code = env.encode(state)
        expect("the shape of encode(state)", list(code.shape), [len(state), env.encoded_size])
        expect("the dtype of encode(state)", code.dtype, torch.float32)
        expect_all(code.isfinite().all(1), state, "encode gives NaN or inf")
        n_codes = len(code.unique(dim=0))
        expect(f"the number of encodings of {len(state)} states", n_codes, len(state))
        assert env.encode(env.sink_state[None]).isfinite().all(), (
            "encode gives NaN or inf in the sink"
        )


class _FewWalks(CoreConformance):
    """Checks of one environment by few walks."""

    n_walks = 4

    def __init__(self, env: GFNEnv, every_state_terminates: bool | None) -> None:
        self._env, self._every_state_terminates = env, every_state_terminates
        self.atol = 1e-5 if env.state_dtype.is_floating_point else 0.0

    def make_env(self) -> GFNEnv:
        return self._env

    def test_exit_is_legal_where_it_should(self) -> None:
        """The exit action is legal in finished objects alone."""
        state = self.visited(self._env)
        legal = self._env.forward_mask(state)[:, self._env.exit_action]
        if isinstance(self._env, SequenceEnv):
            finished = (state != EMPTY).all(1)
            expect_all(legal <= finished, state, "it is legal in an unfinished sequence")
        elif self._every_state_terminates is not None:
            every = self._every_state_terminates
            expect("every_state_terminates by the masks", bool(legal.all()), every)

    def test_two_rewards(self) -> None:
        """``log_reward`` is a float32 number, or -inf, for each terminating state."""
        state = self.terminating(self._env)[:2]
        log_reward = self._env.log_reward(state, self._env.sample_condition(len(state)))
        expect("the shape of log_reward", list(log_reward.shape), [len(state)])
        expect("the dtype of log_reward", log_reward.dtype, torch.float32)
        expect_all(log_reward < torch.inf, state, "log_reward is NaN or inf")
