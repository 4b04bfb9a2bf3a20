from __future__ import annotations

import pytest
import torch

from gfn_rb.envs import HyperGrid
from gfn_rb.errors import ArgumentError, NaNError, ShapeError
from gfn_rb.rollout import sampler as checks
from gfn_rb.rollout.categorical import exploration_from
from gfn_rb.rollout.walk import check_rewards

GRID = HyperGrid(2, 4)
ORIGIN = torch.zeros(3, 2, dtype=torch.int64)
SINK = torch.full((1, 2), -1)


def conditional() -> HyperGrid:
    env = HyperGrid(2, 4)
    env.condition_shape = torch.Size([5])
    return env


def test_unknown_options_are_listed():
    with pytest.raises(ArgumentError, match=r"among \['epsilon', .*\], got \['epsilom'\]"):
        exploration_from({"epsilom": 0.1}, False)


def test_a_backward_policy_has_no_exit_to_bias():
    assert exploration_from({"exit_bias": 1.0}, False).exit_bias == 1.0
    with pytest.raises(ArgumentError, match="exit_bias must be 0 for a backward policy"):
        exploration_from({"exit_bias": 1.0}, True)


@pytest.mark.parametrize(
    ("n", "states", "is_backward", "message"),
    [
        (None, None, False, "exactly one of n and states must be given, got neither"),
        (3, ORIGIN, False, "exactly one of n and states must be given, got both"),
        (-1, None, False, "n must be at least 0, got -1"),
        (3, None, True, "states alone must be given .*, got n=3 and no states"),
        (3, ORIGIN, True, "states alone must be given .*, got n=3 and 3 states"),
        (None, None, True, "states alone must be given .*, got n=None and no states"),
        (None, SINK, False, r"other than the sink for a forward policy, got \[-1, -1\] in row 0"),
        (None, SINK, True, r"states must be terminating .*, got \[-1, -1\] in row 0"),
    ],
)
def test_where_trajectories_cannot_start(n, states, is_backward, message):
    with pytest.raises(ArgumentError, match=message):
        checks.starting_states(GRID, n, states, is_backward)


@pytest.mark.parametrize(
    "states", [ORIGIN[0], ORIGIN[:, :1], ORIGIN.float(), torch.zeros((), dtype=torch.int64)]
)
def test_states_of_another_shape_or_dtype(states):
    with pytest.raises(ShapeError, match=r"states must be torch.int64 of shape \[n, 2\], got"):
        checks.starting_states(GRID, None, states, False)


def test_conditions():
    checks.check_conditions(GRID, ORIGIN, None)
    checks.check_conditions(GRID, ORIGIN, torch.zeros(3, 9))
    checks.check_conditions(conditional(), ORIGIN, torch.zeros(3, 5))
    with pytest.raises(
        ShapeError, match=r"conditions must have shape \[3, \.\.\.\].* got \[2, 9\]"
    ):
        checks.check_conditions(GRID, ORIGIN, torch.zeros(2, 9))
    with pytest.raises(ShapeError, match=r"conditions must have shape \[3, 5\].* got \[3, 9\]"):
        checks.check_conditions(conditional(), ORIGIN, torch.zeros(3, 9))
    with pytest.raises(ArgumentError, match="conditions must be given for HyperGrid, got None"):
        checks.check_conditions(conditional(), ORIGIN, None)


def test_log_rewards():
    checks.check_log_rewards(None, ORIGIN, False)
    checks.check_log_rewards(torch.zeros(3), ORIGIN, True)
    with pytest.raises(ArgumentError, match="log_rewards must be None for a forward policy"):
        checks.check_log_rewards(torch.zeros(3), ORIGIN, False)
    with pytest.raises(ShapeError, match=r"floating point of shape \[3\], got .* \[2\]"):
        checks.check_log_rewards(torch.zeros(2), ORIGIN, True)
    with pytest.raises(ShapeError, match=r"floating point of shape \[3\], got torch.int64"):
        checks.check_log_rewards(torch.zeros(3, dtype=torch.int64), ORIGIN, True)


def test_rewards():
    check_rewards(torch.tensor([0.0, -torch.inf, 2.0]), ORIGIN)
    with pytest.raises(NaNError, match=r"got nan for state \[0, 0\] in row 1"):
        check_rewards(torch.tensor([0.0, torch.nan, torch.nan]), ORIGIN)
