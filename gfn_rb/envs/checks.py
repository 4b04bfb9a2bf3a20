"""Checks of an environment's functions, quick enough to precede every run."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.testing import assert_close

from gfn_rb.envs.base import GFNEnv
from gfn_rb.errors import ArgumentError


def check_env(make_env: Callable[[], GFNEnv]) -> None:
    """Check an environment by some random walks and two rewards, in a moment.

    Its tests should derive from :mod:`gfn_rb.envs.conformance`, which looks closer.

    Args:
        make_env: returns a new environment on the CPU.

    Raises:
        ArgumentError: it breaks a promise; the message tells which.
    """
    env = make_env()
    if not isinstance(env, GFNEnv):
        raise ArgumentError(f"env must be a gfn_rb.envs.GFNEnv, got a {type(env).__name__}")
    walks = _FewWalks(env)
    for name in (*vars(CoreConformance), *vars(_FewWalks)):  # what others rest on first
        if name.startswith("test_"):
            _passed(getattr(walks, name), type(env).__name__)


def _passed(check: Callable[[], None], name: str) -> None:
    promise = " ".join((inspect.getdoc(check) or "").split())
    try:
        check()
    except Exception as error:  # what an environment of somebody else's raises may be anything
        first_line = str(error).strip().partition("\n")[0]
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        raise ArgumentError(
            f"env must keep its promises, got a {name} that breaks this one: {promise} "
            f"({kind + first_line or 'it does not'})"
        ) from error


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
        assert source.shape == (3, *env.state_shape)
        assert source.dtype == env.sink_state.dtype == env.state_dtype
        assert env.sink_state.shape == env.state_shape
        assert env.exit_action == env.n_actions - 1
        assert env.dummy_action == -1
        assert env.forward_mask(source).shape == (3, env.n_actions)
        assert env.backward_mask(source).shape == (3, env.n_actions - 1)

    def test_source_has_no_parents(self) -> None:
        """The source is a beginning: itself, not the sink, with actions and no parents."""
        env = self.make_env()
        source = env.source(2)
        assert env.is_source(source).all()
        assert not env.is_sink(source).any()
        assert env.forward_mask(source).any(1).all(), "no action is legal in the source"
        assert not env.backward_mask(source).any(), "the source has a parent"

    def test_sink_is_an_end(self) -> None:
        """The sink allows nothing, and padding with the dummy action leads to it both ways."""
        env = self.make_env()
        sink = env.sink_state.expand(2, *env.state_shape)
        assert env.is_sink(sink).all()
        assert not env.is_source(sink).any()
        assert not env.forward_mask(sink).any(), "an action is legal in the sink"
        assert not env.backward_mask(sink).any(), "a move leads to the sink"
        dummy = self.dummies(env, 2)
        for state in (sink, env.source(2)):
            assert env.is_sink(env.forward_step(state, dummy)).all()
            assert env.is_sink(env.backward_step(state, dummy)).all()

    def test_exit_leads_to_sink(self) -> None:
        """The exit action leads to the sink, and no legal move does."""
        env = self.make_env()
        state = self.visited(env)
        exits = state[env.forward_mask(state)[:, env.exit_action]]
        assert len(exits), "no walk met a terminating state"
        exit_action = env.exits(len(exits))
        assert env.is_sink(env.forward_step(exits, exit_action)).all()
        row, move = self.moves(env, state)
        assert not env.is_sink(env.forward_step(state[row], move)).any()

    def test_walks_end_within_max_length(self) -> None:
        """Uniform random walks reach the sink in at most ``max_length`` actions."""
        env = self.make_env()
        assert env.is_sink(self.walk(env)[-1]).all(), f"a walk outlasts {env.max_length} actions"

    def test_backward_walks_end_in_source(self) -> None:
        """Undoing random moves from any state reaches the source, whatever the choices."""
        env = self.make_env()
        state = self.visited(env)
        generator = torch.Generator().manual_seed(1)
        for _ in range(env.max_length - 1):
            mask = env.backward_mask(state)
            assert (mask.any(1) | env.is_source(state)).all(), "a state has no parent"
            moving = mask.any(1)
            kind = torch.multinomial(mask[moving].float(), 1, generator=generator)[:, 0]
            action = env.random_action(state[moving], kind, is_backward=True)
            state[moving] = env.backward_step(state[moving], action)
        assert env.is_source(state).all()

    def test_backward_step_undoes_each_legal_move(self) -> None:
        """Every legal move is marked in its result's backward mask and undone by it."""
        env = self.make_env()
        state = self.visited(env)
        row, move = self.moves(env, state)
        child = env.forward_step(state[row], move)
        marked = env.backward_mask(child).gather(1, env.kind(move)[:, None])
        assert marked.all(), "a legal move is missing from the backward mask of its result"
        assert_close(env.backward_step(child, move), state[row], rtol=0, atol=self.atol)

    def test_forward_step_redoes_each_parent_move(self) -> None:
        """Every move in a backward mask leads to a state where it is legal and leads back."""
        env = self.make_env()
        state = self.visited(env)
        row, kind = env.backward_mask(state).nonzero(as_tuple=True)
        move = env.random_action(state[row], kind, is_backward=True)
        parent = env.backward_step(state[row], move)
        assert not env.is_sink(parent).any()
        legal = env.forward_mask(parent).gather(1, kind[:, None])
        assert legal.all(), "a backward mask holds a move that is illegal in the parent"
        assert_close(env.forward_step(parent, move), state[row], rtol=0, atol=self.atol)

    def test_encode_tells_states_apart(self) -> None:
        """``encode`` gives finite float32 rows, different ones for different states."""
        env = self.make_env()
        state = self.visited(env)
        code = env.encode(state)
        assert code.shape == (len(state), env.encoded_size)
        assert code.dtype == torch.float32
        assert code.isfinite().all()
        assert len(code.unique(dim=0)) == len(state), "two states share one encoding"
        assert env.encode(env.sink_state[None]).isfinite().all(), "the sink cannot be encoded"


class _FewWalks(CoreConformance):
    """Checks of one environment by few walks."""

    n_walks = 4

    def __init__(self, env: GFNEnv) -> None:
        self._env = env
        self.atol = 1e-5 if env.state_dtype.is_floating_point else 0.0

    def make_env(self) -> GFNEnv:
        return self._env

    def test_two_rewards(self) -> None:
        """``log_reward`` is a float32 number, or -inf, for each terminating state."""
        state = self.terminating(self._env)[:2]
        log_reward = self._env.log_reward(state, self._env.sample_condition(len(state)))
        assert log_reward.shape == (len(state),), f"it has shape {list(log_reward.shape)}"
        assert log_reward.dtype == torch.float32, f"it is of {log_reward.dtype}"
        assert (log_reward < torch.inf).all(), "it is NaN or inf"
