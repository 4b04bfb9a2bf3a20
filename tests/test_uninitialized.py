"""The slow tier fills memory that nobody wrote, in this process and in those that tests start."""

import numpy as np
import pytest
import torch
from factories import in_fresh_process

LARGEST = 2**63 - 1


def unwritten() -> list[bool]:
    of_torch = torch.empty(5), torch.zeros(1).new_empty(5), torch.zeros(1).resize_(5)[1:]
    return [
        *(bool(each.isnan().all()) for each in of_torch),
        bool((torch.empty(5, dtype=torch.int64) == LARGEST).all()),
        bool(np.isnan(np.empty(5)).all()),
        bool((np.empty(5, np.int64) == LARGEST).all()),
    ]


@pytest.mark.slow
def test_memory_that_nobody_wrote_is_filled() -> None:
    assert all(unwritten())
    assert all(in_fresh_process(unwritten))
