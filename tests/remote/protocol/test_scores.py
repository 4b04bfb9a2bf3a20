import pytest
import torch

from gfn_rb.errors import ArgumentError
from gfn_rb.remote.protocol.messages import pack, unpack


def test_scores_survive_the_journey():
    numbers, rows = pack({"a": 1, "b": torch.tensor(2.0), "c": torch.ones(3, 2)}, 3)
    assert numbers == {"a": 1.0, "b": 2.0}
    assert rows["c"].shape == (3, 2)
    scores = unpack(numbers, rows)
    assert (scores["a"], scores["b"], scores["c"].tolist()) == (1.0, 2.0, [[1.0, 1.0]] * 3)


def test_a_tensor_of_one_row_is_a_score_of_that_row():
    numbers, rows = pack({"each": torch.tensor([2.0])}, 1)
    assert numbers == {}
    assert rows["each"].tolist() == [2.0]
    assert pack({"all": torch.tensor([2.0])}, 3) == ({"all": 2.0}, None)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "score must return a dict of scores by name, got None"),
        ({1: 2.0}, "score must return a dict of scores by name"),
        ({"a": "b"}, "score 'a' must be a number or a tensor of 3 rows, got str"),
        ({"a": torch.zeros(2)}, r"score 'a' must be a number or a tensor of 3 rows, got \(2,\)"),
    ],
)
def test_what_is_no_score_is_named(result, message):
    with pytest.raises(ArgumentError, match=message):
        pack(result, 3)
