"""The index of objects against a dictionary, at any mixture of changes and lookups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gfn_rb.kernels.objects import Objects


def check(objects: Objects, plain: dict[int, tuple], offered: np.ndarray) -> None:
    hashed = objects.hashed(offered)
    keys = [tuple(row) for row in offered.tolist()]
    slots = [sorted(slot for slot, row in plain.items() if row == key) for key in keys]
    assert objects.first(hashed).tolist() == [each[0] if each else -1 for each in slots]
    assert objects.twins(hashed).tolist() == [keys.index(key) for key in keys]
    found, size = objects.members(hashed)
    assert size.tolist() == [len(each) for each in slots]
    assert [sorted(part.tolist()) for part in np.split(found, size.cumsum()[:-1])] == slots


def run(seed: int, capacity: int, width: int, n_steps: int, most: int) -> list[int]:
    """Change an index at random, compare it with a dictionary, and return what it finds."""
    rng, objects, plain = np.random.default_rng(seed), Objects(capacity, width), {}
    for _ in range(n_steps):
        slot = rng.permutation(capacity)[: rng.integers(min(most, capacity) + 1)]
        kind = rng.integers(6)
        if kind < 3:
            rows = rng.integers(-2, 3, (len(slot), width))
            objects.put(slot, objects.hashed(rows))
            plain.update(zip(slot.tolist(), map(tuple, rows.tolist()), strict=True))
        elif kind == 3:
            objects.remove(slot)
            for each in slot.tolist():
                plain.pop(each, None)
        elif kind == 4:
            source = np.array([each for each in slot.tolist() if each in plain], np.int64)
            target = np.setdiff1d(np.arange(capacity), source)[: len(source)]
            source = source[: len(target)]
            objects.move(source, target)
            plain.update(
                {t: plain[s] for s, t in zip(source.tolist(), target.tolist(), strict=True)}
            )
        elif rng.integers(5) == 0:
            objects, plain = Objects(capacity, objects.width, objects.table.key), {}
        check(objects, plain, rng.integers(-2, 3, (7, width)))
    return objects.first(objects.hashed(np.ones((1, width), np.int64))).tolist()


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(0, 3), st.sampled_from([1, 5, 40]))
def test_an_index_finds_what_a_dictionary_does(
    seed: int, capacity: int, width: int, most: int
) -> None:
    run(seed, capacity, width, 15, most)


def test_rows_that_collide_under_plain_hashes_are_found_at_once() -> None:
    # All multiples of 2^32 and of 2^48, whose low bits say nothing, and signs alone.
    n = 2000
    for rows in (
        np.arange(n)[:, None] << 32,
        np.arange(n)[:, None] << 48,
        np.stack([np.arange(n), -np.arange(n)], 1),
        ((np.arange(n)[:, None] >> np.arange(11)) & 1) << 63,
    ):
        objects = Objects(n, rows.shape[1])
        hashed = objects.hashed(rows)
        assert len(np.unique(hashed.code)) > n - 9
        objects.put(np.arange(n), hashed)
        assert objects.first(hashed).tolist() == list(range(n))


def mean_search(objects: Objects, rows: np.ndarray) -> float:
    """Return by how many entries rows are behind their place on average, once they are filed."""
    end, total = 0, 0
    for place in np.sort(objects.hashed(rows).code >> objects.table.shift).tolist():
        at = max(end, place)
        total, end = total + at - place, at + 1
    return total / len(rows)


@pytest.mark.parametrize("width", [1, 2])
def test_searches_of_rows_that_count_are_short_under_every_key(width: int) -> None:
    n, rng = 1000, np.random.default_rng(0)
    rows = np.stack([np.arange(n) // 50**i for i in range(width)], 1)
    for _ in range(200):
        key = rng.integers(0, 2**32, 1 + 2 * width, np.uint64)
        key[0] = rng.integers(0, 2**63, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        assert mean_search(Objects(n, width, key), rows) < 1


def test_keys_differ_between_indexes() -> None:
    row = np.array([[1, 2, 3]])
    assert Objects(1, 3).hashed(row).code != Objects(1, 3).hashed(row).code
