"""The exchange of rows against a slow rule that sorts all rows anew."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from gfn_rb.kernels.exchange import (
    BEST,
    BEST_UNLESS_STORED,
    DUPLICATE,
    GROUP_FULL,
    KEEP,
    LENGTH,
    N_MOVED,
    N_REJECTED,
    N_RESULTS,
    N_TWINS,
    NO_SLOT,
    NOT_COMPARED,
    REFRESH,
    ROW,
    SLOT_OF,
    SOURCE,
    TARGET,
    WORST,
    KnownRows,
    Rules,
    empty_slots,
    hold,
)
from gfn_rb.kernels.objects import Objects

# The whole check: GFN_RB_SEQUENCES=10000 pytest tests/kernels/test_exchange.py
SEQUENCES = int(os.environ.get("GFN_RB_SEQUENCES", "100"))
NO_PUT = torch.zeros(0, dtype=torch.int64)


class Row(NamedTuple):
    """Rows in the order in which they leave, the worst first."""

    key: float
    age: int
    object: int
    group: int


def kept(old: list[Row], new: list[Row], mode: int, capacity: int, per_group: int) -> list[Row]:
    """Return the rows that a storage holds after a batch, the best first."""
    stored = defaultdict(list)
    for row in old:
        stored[row.object].append(row)
    if mode in (REFRESH, KEEP):
        new = [*{row.object: row for row in new}.values()]
    elif mode != NOT_COMPARED:
        new = [*{row.object: row for row in sorted(new)}.values()]
    if mode in (KEEP, BEST_UNLESS_STORED):
        new = [row for row in new if row.object not in stored]
    if mode == BEST:
        new = [row for row in new if all(row > other for other in stored[row.object])]
    came = {row.object for row in new} if mode in (REFRESH, BEST) else set()
    # The first row of an object is refreshed; the best one takes the place of all.
    gone = [row for each in came for row in (stored[each] if mode == BEST else stored[each][:1])]
    groups: dict[int, list[Row]] = defaultdict(list)
    for row in sorted([*(row for row in old if row not in gone), *new], reverse=True):
        if not per_group or len(groups[row.group]) < per_group:
            groups[row.group].append(row)
    return sorted((row for each in groups.values() for row in each), reverse=True)[:capacity]


class Sequence:
    """A storage by rows in slots, and what the loops know of it."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.rows, self.offered = rng, dict[int, Row](), 0
        self.capacity = int(rng.choice([1, 3, 8, 40, 3000]))
        self.mode = int(rng.choice([NOT_COMPARED, REFRESH, KEEP, BEST, BEST_UNLESS_STORED]))
        self.per_group, self.is_newest = int(rng.choice([0, 1, 4])), bool(rng.integers(2))
        self.n_keys = int(rng.choice([2, 10, 10_000]))
        self.known = self.held([])
        if not self.per_group:  # rows of others, of one object perhaps
            self.rows = dict(enumerate(self.batch(int(rng.integers(self.capacity + 1)))))
            self.known = self.held([*self.rows.values()])

    def batch(self, n: int) -> list[Row]:
        key = self.rng.integers(0, self.n_keys, n).astype(float)
        sign, first = (1 if self.is_newest else -1), self.offered
        age = [sign * each for each in range(first, first + n)]
        objects, groups = self.rng.integers(
            0, [[2 * self.capacity], [self.capacity // 3 + 1]], (2, n)
        )
        self.offered += n
        return [
            Row(*each)
            for each in zip(key.tolist(), age, objects.tolist(), groups.tolist(), strict=True)
        ]

    def held(self, rows: list[Row]) -> KnownRows:
        n = self.capacity
        known = KnownRows(empty_slots(n), Objects(n, 1), Objects(n, 1))
        key, age = (np.array([row[i] for row in rows], kind) for i, kind in ((0, float), (1, int)))
        tables = known.objects.table, known.groups.table
        hold(key, age, *(each.numpy() for each in self.columns(rows)), known.slots, *tables)
        return known

    def columns(self, rows: list[Row]) -> list[torch.Tensor]:
        columns = torch.tensor(rows or [Row(0, 0, 0, 0)])[: len(rows), 2:].long()
        is_compared = self.mode != NOT_COMPARED, self.per_group > 0
        return [
            columns[: len(rows) * is_used, [i]].contiguous()
            for i, is_used in enumerate(is_compared)
        ]

    def step(self) -> None:
        rng, state, first = self.rng, self.known.slots.state, self.offered
        new = self.batch(int(rng.integers(0, min(2 * self.capacity, 600) + 1)))
        most = rng.integers(len(self.rows) // 3 + 1) if rng.random() < 0.3 else 0
        removed, n = np.sort(rng.permutation(len(self.rows))[:most]), len(new)
        results = torch.full((N_RESULTS, 2 * n + len(removed) + int(state[N_TWINS])), NO_SLOT)
        rules = Rules(first, self.is_newest, self.mode, self.per_group, DUPLICATE, np.nan)
        key = torch.tensor([row.key for row in new], dtype=torch.float64)
        out = torch.from_numpy(removed.astype(np.int64))
        n_in = self.known.exchange(key, *self.columns(new), rules, out, results, NO_PUT)
        left = {slot: row for slot, row in self.rows.items() if slot not in {*removed.tolist()}}
        expected = kept(
            [left[slot] for slot in sorted(left)], new, self.mode, self.capacity, self.per_group
        )
        self.follow(results.numpy(), n_in, int(state[N_MOVED]), int(state[LENGTH]), new)
        assert sorted(self.rows.values(), reverse=True) == expected
        slots = results[SLOT_OF, :n].tolist()
        assert [slot >= 0 for slot in slots] == [row in expected for row in new]
        assert sum(state[N_REJECTED:].tolist()) == n - n_in
        assert all(
            self.rows[slot] == row for slot, row in zip(slots, new, strict=True) if slot >= 0
        )
        held = self.known.slots.held
        assert not held["came"].any()
        assert [*held["key"][: len(expected)]] == [self.rows[i].key for i in range(len(expected))]

    def follow(
        self, results: np.ndarray, n_in: int, n_moved: int, length: int, new: list[Row]
    ) -> None:
        """Write the rows that move and come in, as a caller does."""
        target, before = results[TARGET], dict(self.rows)
        for source, hole in zip(
            results[SOURCE, :n_moved], target[n_in : n_in + n_moved], strict=True
        ):
            self.rows[int(hole)] = before[int(source)]
        for row, slot in zip(results[ROW, :n_in], target[:n_in], strict=True):
            self.rows[int(slot)] = new[row]
        self.rows = {slot: row for slot, row in self.rows.items() if slot < length}
        assert sorted(self.rows) == [*range(length)]


@settings(max_examples=SEQUENCES, deadline=None)
@given(st.integers(0, 2**32))
def test_an_exchange_keeps_what_sorting_all_rows_does(seed: int) -> None:
    sequence = Sequence(np.random.default_rng(seed))
    for _ in range(8):
        sequence.step()


def test_each_reason_is_counted() -> None:
    state = empty_slots(2)
    known = KnownRows(state, Objects(2, 1), Objects(2, 1))
    results = torch.full((N_RESULTS, 10), NO_SLOT)
    columns = torch.tensor([[1], [1], [2], [3], [4]]), torch.tensor([[0], [0], [0], [1], [2]])
    rules = Rules(0, True, REFRESH, 1, DUPLICATE, np.nan)
    key = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0], dtype=torch.float64)
    assert known.exchange(key, *columns, rules, NO_PUT, results, NO_PUT) == 2
    counts: dict[int, Any] = {}
    for reason in (DUPLICATE, GROUP_FULL, WORST):
        counts[reason] = int(state.state[N_REJECTED + DUPLICATE - reason])
    assert counts == {DUPLICATE: 1, GROUP_FULL: 1, WORST: 1}
