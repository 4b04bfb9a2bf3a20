"""Checks of environments before a run and of their arguments, each seen to fail."""

import pytest
import torch

from gfn_rb.envs import (
    BayesianDAG,
    BitSequence,
    Box,
    DeceptiveGrid,
    HyperGrid,
    Line,
    RNABinding,
    TFBind8,
    check_env,
)
from gfn_rb.errors import ArgumentError
from gfn_rb.policies import ConditionalLogZ, ForwardPolicy
from gfn_rb.training.metrics import ExactFit


@pytest.mark.parametrize(
    "make_env",
    [
        lambda: HyperGrid(1, 2),
        lambda: HyperGrid(3, 5),  # without an inner band
        lambda: DeceptiveGrid(1, 12),
        lambda: BayesianDAG(13, n_samples=20),  # too many nodes for a list and a table
        lambda: BitSequence(24, 8, "non_autoregressive", n_modes=4, delta=6),
        lambda: RNABinding(["GGGCAAUGCC"], 4, "prepend_append"),
        lambda: Line(n_steps=1),
        lambda: Box(1.0),
    ],
)
def test_sound_environments_pass(make_env):
    check_env(make_env())


def breaking(name, function, base=HyperGrid, arguments=(2, 5)):
    """Return an environment with one method replaced by one that is given the original result."""

    class Broken(base):
        pass

    def method(self, *args):
        return function(getattr(base, name)(self, *args), *args)

    setattr(Broken, name, method)
    return Broken(*arguments)


def every_move(mask, state):  # but to the source and the sink of grids
    return (mask | True) & (state.amax(1) > 0)[:, None]


def exit_anywhere(mask, state):
    return torch.cat([mask[:, :-1], (state > -2).all(1)[:, None]], 1)


@pytest.mark.parametrize(
    ("env", "promise", "found"),
    [
        (breaking("forward_mask", lambda mask, *_: mask[:, :-1]), "the sizes and dtypes",
         "the shape of forward_mask(source(3)) is [3, 2], expected [3, 3]"),
        (breaking("backward_mask", lambda mask, *_: mask & False), "Each legal move, forward",
         "a forward move in backward_mask of its result is False, expected True, for state "
         "[0, 0] and action 0"),
        (breaking("backward_mask", every_move, DeceptiveGrid, (2, 6)),
         "ends in the source",
         "for state [-2, 0]"),
        (breaking("forward_mask", exit_anywhere, TFBind8, ()), "``every_state_terminates`` says",
         "is True, expected False, for state [-1, "),
        (breaking("describe", lambda words, *_: words[1:]), "and ``describe``",
         "the number of texts of describe(state) is "),
        (breaking("describe", lambda words, *_: ["a\nb" for _ in words]), "and ``describe``",
         r"describe gives 'a\nb', expected one line of text"),
        (breaking("describe", lambda words, *_: ["x" for _ in words]), "and ``describe``",
         "describe of states [0, 0] and [0, 1] is the same"),
        (breaking("log_reward", lambda value, *_: value.double()), "is a float32",
         "the dtype of log_reward is torch.float64, expected torch.float32"),
        (breaking("log_reward", lambda value, *_: value * torch.nan), "is a float32",
         "log_reward < inf is False, expected True, for state [0, 0]"),
        (breaking("log_reward", lambda value, *_: value.nope), "is a float32",
         "AttributeError: 'Tensor' object"),
    ],
)  # fmt: skip
def test_a_broken_promise_is_told_in_one_line(env, promise, found):
    with pytest.raises(ArgumentError) as caught:
        check_env(env)
    message = str(caught.value)
    assert message.startswith("env must keep its promises, got a Broken that breaks this one: ")
    assert promise in message
    assert found in message
    assert "\n" not in message


class Miscounted(HyperGrid):
    """A grid of 25 states."""

    n_states = 25


class Moded(HyperGrid):
    """A grid of 25 states, and a mode of each sum of coordinates."""

    def __init__(self, n_modes):
        super().__init__(2, 5)
        self.n_modes = n_modes

    def mode_index(self, state):
        return state.sum(1)


@pytest.mark.parametrize(("n_states", "found"), [
    (24, "n_states is 24, expected 25 or more"),
    (8, "n_states is 8, expected 10 or more"),
    (26, "n_states is 26, expected 25"),
    (200_000, "n_states is 200000, expected 25"),
])  # fmt: skip
def test_states_are_counted(monkeypatch, n_states, found):
    check_env(Miscounted(2, 5))
    monkeypatch.setattr(Miscounted, "n_states", n_states)
    with pytest.raises(ArgumentError, match=rf"``n_states`` states, .*\({found}\)"):
        check_env(Miscounted(2, 5))


@pytest.mark.parametrize(("n_modes", "found"), [
    (10, "mode 9 has none among all 25 terminating states, expected some for each of n_modes=10"),
    (8, r"a mode_index in \[-1, 8\) is False, expected True, for state \[4, 4\]"),
])  # fmt: skip
def test_modes_are_looked_for(n_modes, found):
    check_env(Moded(9))
    with pytest.raises(ArgumentError, match=rf"each has a terminating state. \({found}\)"):
        check_env(Moded(n_modes))


def test_what_is_too_much_to_check_is_said(monkeypatch, caplog):
    monkeypatch.setattr(Miscounted, "n_states", 200_001)
    check_env(Miscounted(2, 5))
    assert caplog.messages == [
        "check_env did not check n_states and the modes of Miscounted: n_states is 200001, and it "
        "does not list more than 200000 states"
    ]


def test_an_exit_that_is_legal_as_often_as_is_said_passes():
    check_env(HyperGrid(2, 5), every_state_terminates=True)
    check_env(TFBind8(), every_state_terminates=False)


class Weighted(HyperGrid):
    """Log-rewards are multiplied by a condition."""

    condition_shape = torch.Size([1])

    def log_reward(self, state, condition=None):
        return self.checked_condition(condition, len(state))[:, 0] * super().log_reward(state)


class Drawn(Weighted):
    def sample_condition(self, n, generator=None):
        return torch.rand(n, 1)  # not by the generator, as first attempts are written


class Seeded(Weighted):
    def sample_condition(self, n, generator=None):
        return torch.rand(n, 1, generator=generator)


def test_conditions_are_checked() -> None:
    with pytest.raises(ArgumentError, match="sample_condition is None, expected shape"):
        check_env(Weighted(2, 4))
    with pytest.raises(ArgumentError, match=r"``sample_condition`` .* repeat"):
        check_env(Drawn(2, 4))
    check_env(Seeded(2, 4))


def test_conditional_environments_have_fixed_conditions_and_scores() -> None:
    for env in (Seeded(2, 4), Drawn(2, 4)):
        fixed = env.fixed_conditions(3)
        assert fixed.shape == (3, 1)
        assert fixed.equal(env.fixed_conditions(3))
        state = env.terminating_states()
        first = env.fixed_conditions(1).expand(len(state), 1)
        assert env.score(state).equal(env.log_reward(state, first).exp())
        policy = ForwardPolicy(env)
        fit = ExactFit(env, policy, ConditionalLogZ(env))
        assert 0 < fit.columns()["total_variation"] < 1
