"""The order of slots against ``sorted``, at any mixture of changes and lookups."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from gfn_rb.kernels.order import LAST_TIE, Order

KEYS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, np.inf, -np.inf]), st.floats(-3, 3, allow_nan=False)
)


class SortedOrder:
    """The same by sorting everything at each call."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[float, int]] = {}

    @property
    def slots(self) -> list[int]:
        return [slot for _, slot in sorted((pair, slot) for slot, pair in self.rows.items())]


def check(order: Order, plain: SortedOrder) -> None:
    slots, n = plain.slots, len(plain.rows)
    assert len(order) == n
    assert order.first(n).tolist() == slots
    assert order.first(n // 2).tolist() == slots[: n // 2]
    assert order.select(np.arange(n)[::-1], False)[0].tolist() == slots[::-1]
    held = np.array([plain.rows[slot][0] for slot in slots])
    found, first, end = order.select(np.arange(n))
    assert found.tolist() == slots
    assert first.tolist() == held.searchsorted(held, "left").tolist()
    assert end.tolist() == held.searchsorted(held, "right").tolist()
    for slot in range(len(order.key)):
        assert (order.key[slot], order.tie[slot]) == plain.rows.get(slot, (np.inf, LAST_TIE))


def run(seed: int, capacity: int, n_steps: int, most: int, keys: np.ndarray) -> list[int]:
    """Change an order at random, compare it with the plain one, and return its slots."""
    rng, order, plain = np.random.default_rng(seed), Order(capacity), SortedOrder()
    for _ in range(n_steps):
        slot = rng.permutation(capacity)[: rng.integers(min(most, capacity) + 1)]
        kind = rng.integers(8)
        if kind < 5:
            key, tie = rng.choice(keys, len(slot)), rng.integers(-2, 3, len(slot))
            order.put(slot, key, tie)
            plain.rows.update(zip(slot.tolist(), zip(key, tie, strict=True), strict=True))
        elif kind < 7:
            slot = np.array([each for each in slot.tolist() if each in plain.rows], np.int64)
            if kind == 6:  # as an eviction removes the lowest ones
                slot = order.first(len(slot))
            order.remove(slot)
            for each in slot.tolist():
                del plain.rows[each]
        elif rng.integers(4) == 0:
            n = int(rng.integers(capacity + 1))
            key, tie = rng.choice(keys, n), rng.integers(-2, 3, n)
            order.assign(key, tie)
            plain.rows = dict(enumerate(zip(key, tie, strict=True)))
        check(order, plain)
    return order.first(len(order)).tolist()


@settings(deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 200),
    st.sampled_from([1, 5, 200]),
    st.lists(KEYS, min_size=1),
)
def test_an_order_is_that_of_sorted(seed: int, capacity: int, most: int, keys: list) -> None:
    run(seed, capacity, 12, most, np.array(keys))


def test_blocks_split_run_out_and_run_empty() -> None:
    for seed, most in enumerate((3, 40, 3000)):
        for n_keys in (3000, 60):
            run(seed, 3000, 60, most, np.random.default_rng(0).normal(size=n_keys))


def test_rows_that_come_in_ascending_and_descending_order() -> None:
    for sign in (1, -1):
        order, plain = Order(5000), SortedOrder()
        for start in range(0, 15_000, 50):
            slot, key = np.arange(start, start + 50) % 5000, sign * np.arange(start, start + 50.0)
            order.put(slot, key, slot)
            plain.rows.update(zip(slot.tolist(), zip(key, slot, strict=True), strict=True))
        check(order, plain)
