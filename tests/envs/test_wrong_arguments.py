"""Errors of constructors name the argument, what came and what was expected."""

from __future__ import annotations

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
    HyperGrid,
    Line,
    QM9Strings,
    RNABinding,
    TFBind8,
)
from gfn_rb.errors import ArgumentError, NaNError, ShapeError

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
    (Box, {"delta": 1.5}, "delta must be at most 1, got 1.5"),
    (Box, {"delta": 0.0}, "delta must be positive and finite, got 0.0"),
]


@pytest.mark.parametrize(("env", "arguments", "message"), WRONG)
def test_wrong_arguments(env: type, arguments: dict[str, object], message: str) -> None:
    with pytest.raises((ArgumentError, ShapeError, NaNError), match=message):
        env(**arguments)
