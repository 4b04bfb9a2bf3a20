"""Checks of environments before a run and of their arguments, each seen to fail."""

import math

import pytest
import torch
from factories import CountOnes

from gfn_rb.envs import (
    BayesianDAG,
    BitSequence,
    Box,
    ConditionalHyperGrid,
    DeceptiveGrid,
    Funnel,
    Gaussians25,
    HyperGrid,
    Line,
    Manywell,
    QM9Strings,
    RNABinding,
    TFBind8,
    check_env,
)
from gfn_rb.errors import ArgumentError, NaNError, ShapeError


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
        (breaking("forward_mask", lambda mask, *_: mask | True), "the sink neither",
         "forward_mask(sink).any(1) is True, expected False, for state [-1, -1]"),
        (breaking("backward_mask", lambda mask, *_: mask & False), "Each legal move, forward",
         "a forward move in backward_mask of its result is False, expected True, for state "
         "[0, 0] and action 0"),
        (breaking("backward_mask", every_move, DeceptiveGrid, (2, 6)),
         "ends in the source",
         "for state [-2, 0]"),
        (breaking("forward_mask", exit_anywhere, TFBind8, ()), "in terminating states alone",
         "is True, expected False, for state [-1, "),
        (breaking("undo", lambda state, *_: state + 1), "Each legal move",
         "backward_step is [1, 1], expected [0, 0], for state [1, 0] and action 0"),
        (breaking("encode", lambda code, *_: code * 0), "``encode``, ``fing",
         "encode of states [0, 0] and [0, 1] is the same"),
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


def test_an_exit_that_is_legal_too_often_or_too_seldom_is_found():
    check_env(HyperGrid(2, 5), every_state_terminates=True)
    check_env(TFBind8(), every_state_terminates=False)
    with pytest.raises(ArgumentError, match=r"True in all \d+ states.*\[0, 0\].*expected False"):
        check_env(HyperGrid(2, 5), every_state_terminates=False)
    with pytest.raises(ArgumentError, match=r"is False, expected True, for state \[-"):
        check_env(Line(), every_state_terminates=True)


def test_what_is_no_environment_is_named(request):
    if request.config.option.all:
        pytest.skip("annotations refuse it, where they are checked")
    with pytest.raises(ArgumentError, match="env must be a GFNEnv, got a dict"):
        check_env({})


WRONG = [
    (HyperGrid, {"ndim": 0, "height": 8}, "ndim must be at least 1, got 0"),
    (HyperGrid, {"ndim": 2, "height": 1}, "height must be at least 2, got 1"),
    (HyperGrid, {"ndim": 2, "height": 8, "r0": 0.0}, "r0 must be positive and finite, got 0.0"),
    (HyperGrid, {"ndim": 2, "height": 8, "r2": math.nan}, "r2 must be positive"),
    (ConditionalHyperGrid, {"ndim": 2, "height": 8, "min_beta": 2.0}, "got 2.0 and 2.0"),
    (ConditionalHyperGrid, {"ndim": 2, "height": 8, "min_beta": math.nan}, "ascending order"),
    (ConditionalHyperGrid, {"ndim": 2, "height": 8, "max_beta": math.inf}, "got 0.5 and inf"),
    (DeceptiveGrid, {"ndim": 2, "height": 5}, "height must be at least 6, got 5"),
    (CountOnes, {"n_letters": 0, "length": 3}, "n_letters must be at least 1, got 0"),
    (CountOnes, {"n_letters": 2, "length": 0}, "length must be at least 1, got 0"),
    (CountOnes, {"n_letters": 2, "length": 3, "form": "insert"}, "form .*'append'.*got 'insert'"),
    (BitSequence, {"n_bits": 12}, "n_bits must be a positive multiple of 8, got 12"),
    (BitSequence, {"word_bits": 7}, r"divisor of n_bits=120 in \[1, 16\], got 7"),
    (BitSequence, {"word_bits": 20}, "word_bits must be a divisor"),
    (BitSequence, {"n_bits": 8, "n_modes": 6}, r"n_modes must be in \[1, 5\] for 8 bits, got 6"),
    (BitSequence, {"beta": 0.0}, "beta must be positive and finite, got 0.0"),
    (BitSequence, {"delta": 121}, r"delta must be in \[0, 120\], got 121"),
    (TFBind8, {"beta": math.inf}, "beta must be positive and finite, got inf"),
    (TFBind8, {"min_reward": 0.0}, r"min_reward must be in \(0, 1\], got 0.0"),
    (TFBind8, {"modes": "all"}, "modes must be 'published' or 'top', got 'all'"),
    (QM9Strings, {"beta": 0.0}, "beta must be positive"),
    (RNABinding, {"targets": "RNA1"}, "targets must be a sequence of one or more, got 'RNA1'"),
    (RNABinding, {"targets": []}, r"targets must be a sequence of one or more, got \[\]"),
    (RNABinding, {"targets": ["GATTACA"]}, r"among \['RNA1', .* spelt in ACGU, got 'GATTACA'"),
    (RNABinding, {"targets": ["AAAA"]}, "targets must bind their complement, 'AAAA' has"),
    (RNABinding, {"min_reward": 0.0}, r"min_reward must be in \(0, 1\], got 0.0"),
    (RNABinding, {"threshold": 0.0}, "finite and at least min_reward=0.001, got 0.0"),
    (RNABinding, {"targets": ["RNA4"], "modes": "published"}, "published"),
    (RNABinding, {"modes": "top"}, "modes must be 'threshold' or 'published', got 'top'"),
    (BayesianDAG, {"n_nodes": 1}, "n_nodes must be at least 2, got 1"),
    (BayesianDAG, {"n_samples": 0}, "n_samples must be at least 1, got 0"),
    (BayesianDAG, {"data": "nowhere.csv"}, "data must be a .npy or .csv file of numbers"),
    (BayesianDAG, {"data": torch.ones(3, 1)}, r"of 2 nodes or more, got shape \[3, 1\]"),
    (BayesianDAG, {"n_nodes": 4, "data": torch.ones(3, 2)}, "n_nodes=4 columns, got 2"),
    (BayesianDAG, {"data": torch.full((3, 2), math.nan)}, "data must hold finite numbers"),
    (Line, {"means": (1.0,)}, "means and scales must be as many, at least one, got 1 and 2"),
    (Line, {"scales": (1.0, 0.0)}, r"scales must be positive and finite, got \[1.0, 0.0\]"),
    (Line, {"start": math.inf}, "means and start must be finite, got .* and inf"),
    (Line, {"n_steps": 0}, "n_steps must be at least 1, got 0"),
    (Gaussians25, {"sigma": 0.0}, "sigma must be positive and finite, got 0.0"),
    (Funnel, {"ndim": 1}, "ndim must be at least 2, got 1"),
    (Manywell, {"ndim": 3}, "ndim must be even and from 2 to 64, got 3"),
    (Manywell, {"ndim": 66}, "ndim must be even and from 2 to 64, got 66"),
    (Box, {"delta": 1.5}, "delta must be at most 1, got 1.5"),
    (Box, {"delta": 0.0}, "delta must be positive and finite, got 0.0"),
]


@pytest.mark.parametrize(("env", "arguments", "message"), WRONG)
def test_wrong_arguments(env, arguments, message):
    with pytest.raises((ArgumentError, ShapeError, NaNError), match=message):
        env(**arguments)
