from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from gfn_rb.training.metrics.discovery import KeySet

KEYS = st.integers(-3, 12) | st.sampled_from([-(2**63), 2**63 - 1])


@given(st.lists(st.lists(KEYS, max_size=12), max_size=12))
def test_it_is_a_set_that_tells_what_is_new(batches):
    keys, known = KeySet(), set()
    for batch in batches:
        new = keys.add(torch.tensor(batch, dtype=torch.int64))
        expected = [key not in known and key not in batch[:i] for i, key in enumerate(batch)]
        known.update(batch)
        assert new.tolist() == expected
        assert len(keys) == len(known)
        assert keys.keys().tolist() == sorted(known)


def test_runs_stay_few():
    keys = KeySet()
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        keys.add(torch.randint(2**60, (32,), generator=generator))
    lengths = [len(run) for run in keys._runs]
    assert sum(lengths) == len(keys) == 9600
    assert all(one > 2 * next_one for one, next_one in pairwise(lengths))
    assert len(lengths) <= 9  # log2(9600 / 32) + 1
