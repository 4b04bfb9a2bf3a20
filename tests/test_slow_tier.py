"""What the slow tier checks and fills, seen to work: annotations, and memory nobody wrote."""

import jaxtyping
import numpy as np
import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from factories import in_fresh_process

from gfn_rb.envs.core import check_positive
from gfn_rb.errors import ArgumentError
from gfn_rb.kernels import order
from gfn_rb.numerics.mixtures import uniform

pytestmark = pytest.mark.slow


def test_a_dimension_that_two_arguments_share_is_checked():
    with pytest.raises(jaxtyping.TypeCheckError, match="key"):
        order.Order(8).put(np.zeros(3, np.int64), np.zeros(4))


def test_the_kind_of_a_shaped_argument_is_checked():
    with pytest.raises(jaxtyping.TypeCheckError, match="low"):
        uniform(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))


def test_where_no_shape_is_named_types_are_checked():
    with pytest.raises(BeartypeCallHintViolation, match="check_positive"):
        check_positive(height="3")


def test_what_is_returned_is_checked(monkeypatch):
    some = order.Order(8)
    monkeypatch.setattr(order, "_put", lambda slots, keys, blocks: 0.5)
    with pytest.raises(jaxtyping.TypeCheckError, match="put"):
        some.put(np.arange(1), np.zeros(1))
    monkeypatch.setattr(np, "empty", lambda shape, dtype: np.zeros(shape))  # not of int64
    with pytest.raises(jaxtyping.TypeCheckError, match="select"):
        some.select(np.arange(0))


@pytest.mark.usefixtures("unchecked")
def test_checks_can_be_switched_off():
    with pytest.raises(ArgumentError, match="height"):  # the function's own check
        check_positive(height="3")


LARGEST = 2**63 - 1


def unwritten():
    of_torch = torch.empty(5), torch.zeros(1).new_empty(5), torch.zeros(1).resize_(5)[1:]
    return [
        *(bool(each.isnan().all()) for each in of_torch),
        bool((torch.empty(5, dtype=torch.int64) == LARGEST).all()),
        bool(np.isnan(np.empty(5)).all()),
        bool((np.empty(5, np.int64) == LARGEST).all()),
    ]


def test_memory_that_nobody_wrote_is_filled():
    assert all(unwritten())
    assert all(in_fresh_process(unwritten))
