import math

import numpy as np
import pytest
import torch

from gfn_rb.kernels.near import distance, distances, nearest
from gfn_rb.numerics.flat import equal_bits


@pytest.mark.parametrize(
    ("p", "expected"),
    [(0, 2.0), (1, 7.0), (2, 5.0), (3, 91 ** (1 / 3)), (1.5, (8 + 27**0.5) ** (2 / 3)), (200, 4.0)],
)
@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_distances_worked_out_by_hand(p, expected, dtype):
    a, b = np.array([[3, 0, 9]]).astype(dtype), np.array([[0, 4, 9]]).astype(dtype)
    assert distances(a, b, float(p)) == pytest.approx(expected, rel=1e-12)
    assert distances(a, a, float(p)) == 0.0
    number, radius = np.zeros(1, np.int64), np.ones(1)
    nearest(a, np.concatenate([b, a]), float(p), number, radius)
    assert (number[0], radius[0]) == (1, 0.0)


def test_the_largest_difference_and_large_numbers():
    a, b = np.array([[3.0, 0.0]]), np.array([[0.0, 4.0]])
    assert distances(a, b, math.inf) == 4.0
    huge = np.array([[1e30, 0.0]])
    assert distances(huge, -huge, 50.0) == 2e30
    assert distances(np.array([[2**62 + 1]]), np.array([[2**62]]), 1.0) == 1.0


@pytest.mark.parametrize("p", [0.0, 1.0, 1.5, 2.0, 7.0, math.inf])
@pytest.mark.parametrize("width", [3, 40])
def test_near_pairs_are_those_whose_distance_says_so(p, width):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 3, (30, width), generator=generator)
    for cutoff in (1.0, 2.0, 4.0, 20.0):
        for some in (rows.numpy(), rows.double().numpy()):
            for i in range(30):
                apart = float(distance(some, 0, some, i, p, math.inf))
                assert (distance(some, 0, some, i, p, cutoff) <= cutoff) == (apart <= cutoff)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        (torch.float16, [0x7E00, 0x7C01, -0x0200]),
        (torch.bfloat16, [0x7FC0, 0x7F81, -0x0040]),
        (torch.float32, [0x7FC00000, 0x7F800001, -0x400000]),
        (torch.float64, [0x7FF8000000000000, 0x7FF0000000000001, -0x8000000000000]),
    ],
)
def test_all_bits_of_nan_are_equal(dtype, bits):
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    rows = torch.tensor([*bits, 1], dtype=width).view(dtype)
    assert rows.isnan().tolist() == [True, True, True, False]
    first, *others, number = equal_bits(rows).tolist()
    assert others == [first, first]
    assert number != first


def test_both_zeros_are_equal_and_numbers_of_opposite_bits_differ():
    assert torch.equal(*equal_bits(torch.tensor([[0.0], [-0.0]])))
    assert not torch.equal(*equal_bits(torch.tensor([[1 + 2j], [1 + 3j]])))
    number = torch.tensor([2.0, 1.0, 1e-300], dtype=torch.float64)
    opposite = (~number.view(torch.int64)).view(torch.float64)
    assert opposite[0] == -1.9999999999999998
    assert not (equal_bits(number[:, None]) == equal_bits(opposite[:, None])).any()
