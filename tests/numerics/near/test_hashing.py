import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gfn_rb.numerics.near.hashing import Multimap, RowHash, equal_bits

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
keys = st.lists(st.integers(0, 20), max_size=30)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, *FLOATS])
def test_equal_rows_hash_alike_and_others_do_not(dtype):
    rows = torch.cartesian_prod(*[torch.arange(12)] * 3).to(dtype)
    key = RowHash(3, 1, rows.device)(rows)
    assert torch.equal(key, RowHash(3, 1, rows.device)(rows.clone()))
    assert int(key.min()) >= 0
    assert int(key.max()) < 2**31
    assert key.unique().shape[0] > 1720  # 1728 of 2^31 hashes: less than one pair is expected
    spread = (key[:, 0] >> 27).bincount(minlength=16)
    assert int(spread.min()) > 50  # the upper bits are used too


def test_seeds_make_other_hashes():
    rows, cpu = torch.arange(200)[:, None], torch.device("cpu")
    assert torch.equal(RowHash(1, 1, cpu, 5)(rows), RowHash(1, 1, cpu, 5)(rows))
    assert (RowHash(1, 1, cpu, 5)(rows) != RowHash(1, 1, cpu, 6)(rows)).sum() > 190


def test_both_zeros_are_equal():
    key = RowHash(1, 1, torch.device("cpu"))(torch.tensor([[0.0], [-0.0]]))
    assert key[0] == key[1]


def test_numbers_of_opposite_bits_differ():
    number = torch.tensor([2.0, 1.0, 1e-300], dtype=torch.float64)
    opposite = (~number.view(torch.int64)).view(torch.float64)
    assert opposite[0] == -1.9999999999999998
    assert not (equal_bits(number[:, None]) == equal_bits(opposite[:, None])).any()


def test_a_group_depends_on_its_columns_alone():
    hashes, rows = RowHash(5, 2, torch.device("cpu")), torch.zeros(6, 5)
    rows[1:] = torch.eye(5)
    changed = (hashes(rows)[1:] != hashes(rows)[0]).tolist()
    assert changed == [[True, False], [False, True], [True, False], [False, True], [True, False]]


@settings(max_examples=100, deadline=None)
@given(keys=keys, asked=keys)
def test_look_ups_yield_what_is_filed_under_their_keys(keys, asked):
    value = torch.arange(len(keys)) * 10
    table = Multimap(torch.tensor(keys, dtype=torch.int64), value)
    spans = table.spans(torch.tensor(asked, dtype=torch.int64))
    expected = [
        (i, 10 * j) for i, key in enumerate(asked) for j, other in enumerate(keys) if key == other
    ]
    assert spans.total == len(expected)
    got = zip(*(each.tolist() for each in table.fetch(spans)), strict=True)
    assert sorted(got) == expected
