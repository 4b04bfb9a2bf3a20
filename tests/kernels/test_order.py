"""The order of slots against ``sorted``, at any mixture of changes and lookups."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from gfn_rb.kernels.order import Order

KEYS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, np.inf, -np.inf]), st.floats(-3, 3, allow_nan=False)
)


def slots_of(order: Order) -> list[int]:
    return order.select(np.arange(len(order)), False)[0].tolist()


def check(order: Order, plain: dict[int, float]) -> None:
    """Compare an order with the keys of its slots, sorted."""
    slots, n = [slot for _, slot in sorted((key, slot) for slot, key in plain.items())], len(plain)
    assert len(order) == n
    assert order.select(np.arange(n)[::-1], False)[0].tolist() == slots[::-1]
    held = np.array([plain[slot] for slot in slots])
    found, first, end = order.select(np.arange(n))
    assert found.tolist() == slots
    assert first.tolist() == held.searchsorted(held, "left").tolist()
    assert end.tolist() == held.searchsorted(held, "right").tolist()


def run(seed: int, capacity: int, n_steps: int, most: int, keys: np.ndarray) -> list[int]:
    """Change an order at random, compare it with the plain one, and return its slots."""
    rng, order, plain = np.random.default_rng(seed), Order(capacity), dict[int, float]()
    for _ in range(n_steps):
        slot = rng.integers(0, capacity, rng.integers(min(most, capacity) + 1))
        key = rng.choice(keys, len(slot))
        if rng.integers(16) == 0:
            n = int(rng.integers(capacity + 1))
            key = rng.choice(keys, n)
            assert order.assign(key)
            plain = dict(enumerate(key.tolist()))
        else:
            assert order.put(slot, key)
            plain.update(zip(slot.tolist(), key.tolist(), strict=True))
        if rng.integers(3):  # or the next change meets blocks that are not sorted
            check(order, plain)
        some = rng.integers(0, max(len(plain), 1), 2 * bool(plain))
        order.select(some)  # which leaves some blocks sorted
    check(order, plain)
    return slots_of(order)


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
        order, plain = Order(5000), dict[int, float]()
        for start in range(0, 60_000, 50):
            slot, key = np.arange(start, start + 50) % 5000, sign * np.arange(start, start + 50.0)
            order.put(slot, key)
            plain.update(zip(slot.tolist(), key.tolist(), strict=True))
        check(order, plain)


def test_no_more_blocks_are_listed_than_there_are_when_all_rows_gather_at_one_place() -> None:
    rng, order, plain = np.random.default_rng(0), Order(3000), dict[int, float]()
    for scale in (1.0, 1e-3, 1e-6, 1e-9, 1.0):
        for _ in range(100):
            slot = rng.permutation(3000)[:60]
            key = scale * rng.normal(size=60)
            order.put(slot, key)
            plain.update(zip(slot.tolist(), key.tolist(), strict=True))
        check(order, plain)


def test_a_key_that_is_no_number_changes_nothing() -> None:
    order, plain = Order(100), dict(enumerate(np.linspace(1, 0, 100).tolist()))
    order.assign(np.array([*plain.values()]))
    assert not order.put(np.arange(3), np.array([5.0, np.nan, 6.0]))
    assert not order.assign(np.array([1.0, np.nan]))
    check(order, plain)
