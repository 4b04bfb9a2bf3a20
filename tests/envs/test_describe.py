"""Objects in words, by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gfn_rb import envs

EDGES = [[[0, 1, 0], [0, 0, 1], [0, 0, 0]], [[0, 0, 0], [0, 0, 0], [0, 0, 0]]]


@pytest.mark.parametrize(
    ("make_env", "state", "words"),
    [
        (lambda: envs.HyperGrid(2, 8), [[3, 0], [7, 7]], ["(3, 0)", "(7, 7)"]),
        (lambda: envs.Box(), [[0.25, 1 / 3]], ["(0.25, 0.3333)"]),
        (lambda: envs.Line(), [[-1.5, 5.0]], ["(-1.5, 5)"]),
        (envs.TFBind8, [[0, 1, 2, 3, 3, 2, 1, 0]], ["ACGTTGCA"]),
        (lambda: envs.RNABinding(length=4), [[0, 1, 2, 3]], ["ACGU"]),
        (envs.QM9Strings, [[0, 3, 7, 1, 10]], ["C-C-F-c1ccccc1-O-CCC"]),
        (lambda: envs.BitSequence(8, 4, n_modes=2), [[3, 12]], ["00111100"]),
        (lambda: envs.BayesianDAG(3), EDGES, ["0->1 1->2", "no edges"]),
        (lambda: envs.HyperGrid(2, 8), [], []),
    ],
)
def test_words(make_env: Callable[[], envs.GFNEnv], state: list, words: list[str]) -> None:
    env = make_env()
    rows = torch.tensor(state, dtype=env.state_dtype).reshape(-1, *env.state_shape)
    assert env.describe(rows) == words
