import torch

from gfn_rb.remote.messages import describe_error, pack, remote_error


def caught(message):
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


def test_errors_are_cut_to_a_length():
    values = describe_error(caught("x" * 10_000))
    assert len(values["message"]) == 2000
    assert all(len(value) <= 2000 for value in values.values())


def test_what_describes_no_error_is_still_an_error():
    assert remote_error(1, None).reason == "an error: not described"
    assert str(remote_error(1, {"type": "A", "message": "b"})) == "rank 1: A: b"


def test_scores_of_a_batch_and_of_its_rows_are_told_apart():
    numbers, rows = pack({"a": 1, "b": torch.tensor(2.0), "c": torch.ones(3, 2)}, 3)
    assert numbers == {"a": 1.0, "b": 2.0}
    assert rows["c"].tolist() == [[1.0, 1.0]] * 3
    # A tensor of one row is a score of that row.
    numbers, rows = pack({"each": torch.tensor([2.0])}, 1)
    assert numbers == {}
    assert rows["each"].tolist() == [2.0]
    assert pack({"all": torch.tensor([2.0])}, 3) == ({"all": 2.0}, None)
