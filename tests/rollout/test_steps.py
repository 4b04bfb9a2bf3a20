from __future__ import annotations

import torch

from gfn_rb.rollout.steps import ActionDraw, Steps


def three_rows(first: int) -> Steps:
    """Row 1 ends after one step, row 0 after two, row 2 after three."""
    steps = Steps(3, first, torch.device("cpu"))
    for rows in ([0, 1, 2], [0, 2], [2]):
        row = torch.tensor(rows)
        drawn = ActionDraw(row + 10 * len(rows), row / 2, None)
        steps.add(row, row[:, None] + torch.tensor([0, 100]), drawn)
    return steps


def test_values_stand_in_their_rows_and_columns():
    steps = three_rows(0)
    assert steps.length().tolist() == [2, 1, 3]
    expected = [[30, 20, -1], [31, -1, -1], [32, 22, 12]]
    assert steps.spread(steps.action, torch.tensor(-1)).tolist() == expected
    assert steps.over_zeros(steps.log_prob).tolist() == [[0, 0, 0], [0.5, 0, 0], [1, 1, 1]]


def test_columns_before_the_first_draw_and_after_the_last_are_filled():
    steps = three_rows(1)
    assert steps.n_steps == 4
    assert steps.length().tolist() == [3, 2, 4]
    state = steps.spread(steps.state, torch.tensor([7, 8]), extra=1)
    assert state.shape == (3, 5, 2)
    assert state[0].tolist() == [[7, 8], [0, 100], [0, 100], [7, 8], [7, 8]]
    assert state[2].tolist() == [[7, 8], [2, 102], [2, 102], [2, 102], [7, 8]]


def test_nothing_drawn():
    steps = Steps(2, 1, torch.device("cpu"))
    assert steps.length().tolist() == [1, 1]
    assert steps.spread([], torch.tensor(-1)).tolist() == [[-1], [-1]]
    assert steps.over_zeros([], 3).shape == (2, 1, 3)


def test_what_is_not_drawn_is_not_kept():
    steps = three_rows(0)
    assert len(steps.log_prob) == 3
    assert steps.estimator_output == []
