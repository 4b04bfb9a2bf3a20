"""The checks of annotations that the test run installs, each seen to fail."""

import jaxtyping
import pytest
import torch
from beartype.roar import BeartypeCallHintViolation

from gfn_rb.envs.core import check_positive
from gfn_rb.errors import ArgumentError
from gfn_rb.numerics import blocks
from gfn_rb.numerics.distinct import FirstOccurrences
from gfn_rb.numerics.top_k import TopK

pytestmark = pytest.mark.slow  # of the run that checks types


def test_a_dimension_that_two_arguments_share_is_checked():
    extremes = TopK(8)
    with pytest.raises(jaxtyping.TypeCheckError, match="rank"):
        extremes.assign(torch.zeros(3), torch.zeros(4, dtype=torch.int64))


def test_the_kind_of_a_shaped_argument_is_checked():
    with pytest.raises(jaxtyping.TypeCheckError, match="values"):
        FirstOccurrences(3)(torch.zeros(3).numpy())


def test_where_no_shape_is_named_types_are_checked():
    with pytest.raises(BeartypeCallHintViolation, match="check_positive"):
        check_positive(height="3")


def test_what_is_returned_is_checked(monkeypatch):
    extremes = TopK(8)
    extremes._key = torch.zeros(8)  # not of float64
    with pytest.raises(jaxtyping.TypeCheckError, match="key"):
        _ = extremes.key
    monkeypatch.setattr(blocks, "block_size", lambda capacity: 0.5)
    with pytest.raises(BeartypeCallHintViolation, match="return"):
        blocks.block_count(8)


@pytest.mark.usefixtures("unchecked")
def test_checks_can_be_switched_off():
    with pytest.raises(ArgumentError, match="height"):  # the function's own check
        check_positive(height="3")
