from __future__ import annotations

from typing import Any

import pytest
import torch

from gfn_rb.containers.fields import ANY, BOOL, Field, assemble
from gfn_rb.errors import ShapeError


def sizes(**known: Any) -> dict[str, Any]:
    return {"": 0, **known}


def test_a_first_field_sets_the_sizes() -> None:
    found = sizes()
    Field("x", "n T+1 *S", ANY).check(torch.zeros(3, 5, 2, 7), found, "Owner")
    assert found == {"": 0, "n": 3, "T": 4, "*S": torch.Size([2, 7])}


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 4, 1)])
def test_a_number_stands_for_itself(shape: tuple[int, ...]) -> None:
    Field("x", "n 1", ANY).check(torch.zeros(3, 1), sizes(n=3), "Owner")
    with pytest.raises(ShapeError, match=r"Owner: 'x' has shape .*; expected \[n, 1\] with n=3"):
        Field("x", "n 1", ANY).check(torch.zeros(shape), sizes(n=3), "Owner")


def test_equal_names_have_equal_sizes() -> None:
    field = Field(("next", "state"), "n *S", ANY)
    with pytest.raises(ShapeError, match=r"\('next', 'state'\) has shape \[3, 4\].*\*S=\[2\]"):
        field.check(torch.zeros(3, 4), sizes(n=3, **{"*S": torch.Size([2])}), "Owner")


def test_only_tensors_of_the_right_dtype_pass() -> None:
    with pytest.raises(ShapeError, match="Owner: 'x' is a list, not a tensor"):
        Field("x", "n", ANY).check([1], sizes(), "Owner")
    with pytest.raises(ShapeError, match=r"'x' has dtype torch.float32; expected torch.bool"):
        Field("x", "n", BOOL).check(torch.zeros(1), sizes(), "Owner")


def test_assemble_nests_tuple_keys() -> None:
    td = assemble({"a": torch.zeros(2), ("next", "b"): torch.ones(2, 3)}, (2,))
    assert td.batch_size == td["next"].batch_size == (2,)
    assert td["next", "b"].tolist() == [[1.0] * 3] * 2
