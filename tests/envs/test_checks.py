"""Checks of an environment before a run, each seen to fail."""

import pytest
import torch
from factories import CountOnes

from gfn_rb.envs import (
    BitSequence,
    Box,
    ConditionalHyperGrid,
    DeceptiveGrid,
    HyperGrid,
    Line,
    RNABinding,
    TFBind8,
)
from gfn_rb.envs.checks import check_env
from gfn_rb.errors import ArgumentError


@pytest.mark.parametrize(
    "make_env",
    [
        lambda: HyperGrid(1, 2),
        lambda: HyperGrid(3, 5),  # without an inner band
        lambda: ConditionalHyperGrid(2, 5),
        lambda: DeceptiveGrid(1, 12),
        lambda: DeceptiveGrid(3, 6),
        TFBind8,
        lambda: CountOnes(1, 3),
        lambda: BitSequence(8, 2, "prepend_append", n_modes=2, seed=1),
        lambda: BitSequence(8, 1, n_modes=5, delta=2),
        lambda: BitSequence(24, 8, "non_autoregressive", n_modes=4, delta=6),
        lambda: RNABinding(["GGGCAAUGCC"], 4, "prepend_append"),
        lambda: Line((0.0, 3.0, -1.0), (0.2, 1.0, 0.6), start=1.0, n_steps=3),
        lambda: Line(n_steps=1),
        lambda: Box(1.0),
    ],
)
def test_sound_environments_pass(make_env):
    check_env(make_env)


def breaking(name, function):
    """A grid with one method replaced by one that is given the original result."""

    class Broken(HyperGrid):
        pass

    def method(self, *args):
        return function(getattr(HyperGrid, name)(self, *args), *args)

    setattr(Broken, name, method)
    return lambda: Broken(2, 5)


@pytest.mark.parametrize(
    ("make_env", "promise"),
    [
        (breaking("forward_mask", lambda mask, *_: mask[:, :-1]), "sizes that the attributes"),
        (breaking("forward_mask", lambda mask, *_: mask | True), "The sink allows nothing"),
        (breaking("backward_mask", lambda mask, *_: mask & False), "Undoing random moves"),
        (breaking("undo", lambda state, *_: state + 1), "Undoing random moves"),
        (breaking("encode", lambda code, *_: code * torch.nan), "``encode`` gives finite"),
        (breaking("log_reward", lambda value, *_: value.double()), "it is of torch.float64"),
        (breaking("log_reward", lambda value, *_: value * torch.nan), "it is NaN or inf"),
        (breaking("log_reward", lambda value, *_: value.nope), "AttributeError: 'Tensor' object"),
    ],
)
def test_a_broken_promise_is_told_in_one_line(make_env, promise):
    with pytest.raises(ArgumentError) as caught:
        check_env(make_env)
    message = str(caught.value)
    assert message.startswith("env must keep its promises, got a Broken that breaks this one: ")
    assert promise in message
    assert "\n" not in message


def test_what_is_no_environment_is_named():
    with pytest.raises(ArgumentError, match=r"env must be a gfn_rb\.envs\.GFNEnv, got a dict"):
        check_env(dict)
