from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from factories import seeded
from hypothesis import given, strategies as st
from statistics_of_draws import chi_square_p

from gfn_rb.rollout import Exploration, masked_log_softmax
from gfn_rb.rollout.categorical import draw, draw_on_host

LOG3 = math.log(3)


def test_masked_log_softmax_is_of_legal_actions_alone_and_so_is_its_gradient():
    logits = torch.tensor([[0.0, LOG3, 50.0], [-1e4, 2.0, 2.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    log_p = masked_log_softmax(logits, mask)
    expected = torch.tensor([[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]]).log()
    torch.testing.assert_close(log_p, expected)
    log_p[0, 0].backward()
    torch.testing.assert_close(logits.grad[0], torch.tensor([0.75, -0.75, 0.0]))


def test_exit_bias_is_taken_off_before_the_temperature():
    # exit logit: (log 9 + 1 - 1) / 2 = log 3
    logits = torch.tensor([[0.0, math.log(9) + 1]])
    explored = Exploration(exit_bias=1.0, temperature=2.0)
    p = explored.probabilities(logits, torch.ones(1, 2, dtype=torch.bool))
    torch.testing.assert_close(p, torch.tensor([[0.25, 0.75]]))


@given(
    st.lists(st.tuples(st.floats(-30, 30), st.booleans()), min_size=1, max_size=6),
    st.floats(0, 1),
    st.floats(0.1, 10),
)
def test_probabilities_equal_a_plain_oracle(actions, epsilon, temperature):
    actions = [(0.5, True), *actions]
    weights = [math.exp(logit / temperature) if legal else 0.0 for logit, legal in actions]
    n_legal = sum(legal for _, legal in actions)
    expected = [
        (1 - epsilon) * weight / sum(weights) + epsilon * legal / n_legal
        for weight, (_, legal) in zip(weights, actions, strict=True)
    ]
    logits = torch.tensor([[logit for logit, _ in actions]])
    mask = torch.tensor([[legal for _, legal in actions]])
    p = Exploration(epsilon, temperature).probabilities(logits, mask)
    np.testing.assert_allclose(p[0].numpy(), expected, rtol=2e-4, atol=1e-7)
    assert (p[~mask] == 0).all()


def on_host(p, generator=None):
    u = torch.rand(len(p), 1, dtype=torch.float64, generator=generator)
    return torch.from_numpy(draw_on_host(p.double().numpy(), u.numpy()))


DRAWS = {"device": lambda p, generator=None: draw(p, generator)[0], "host": on_host}


@pytest.mark.parametrize("form", DRAWS)
def test_draw_follows_the_probabilities(form):
    p = torch.tensor([0.05, 0.0, 0.5, 0.15, 0.3, 0.0])
    action = DRAWS[form](p.expand(20_000, -1), seeded())
    assert chi_square_p(action.bincount(minlength=6), p / p.sum()) > 1e-3


@pytest.mark.parametrize("form", DRAWS)
@pytest.mark.parametrize(("u", "expected"), [(0.0, 1), (1 - 2.0**-53, 3)])
def test_extreme_uniforms_give_actions_of_positive_probability(monkeypatch, form, u, expected):
    monkeypatch.setattr(torch, "rand", lambda *a, dtype, **kw: torch.full((1, 1), u, dtype=dtype))
    p = torch.tensor([[0.0, 0.3, 0.3, 0.4, 0.0, 0.0]])
    assert DRAWS[form](p).tolist() == [expected]


@pytest.mark.parametrize("bad", [[0.0, 0.0], [math.nan, 0.5], [0.5, math.nan]])
def test_draw_tells_rows_without_a_distribution(bad):
    p = torch.tensor([[0.5, 0.5], bad])
    assert draw(p)[1].tolist() == [True, False]
    assert draw_on_host(p.double().numpy(), np.full((2, 1), 0.5)) is None
