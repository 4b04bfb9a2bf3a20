"""What a DiversityWriter promises, one item at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Item(NamedTuple):
    """Items compare by key, then by age, and are never equal."""

    key: float
    age: int
    features: tuple[float, ...]
    serial: int


def apart(one: Item, other: Item, p: float) -> float:
    # The zero tells rows without numbers, which have the distance 0, from no rows.
    a, b = (torch.tensor([*each.features, 0.0]) for each in (one, other))
    return float(torch.linalg.vector_norm(a.to(torch.float64) - b.to(torch.float64), p))


def best(items, capacity):
    return sorted(items, reverse=True)[:capacity]


def replacing(stored, batch, capacity, cutoff, p):
    """Keep from the best down what is far from all kept; stored items have no quarrel."""
    kept, fresh = [], set(batch)
    for item in sorted(stored + batch, reverse=True):
        rivals = [other for other in kept if item in fresh or other in fresh]
        if all(apart(item, other, p) > cutoff for other in rivals):
            kept.append(item)
    return kept[:capacity]


def rejecting(stored, batch, capacity, cutoff, p):
    """Keep from the best down what is far from all stored and kept, then the best of all."""
    if len(stored) == capacity:
        batch = [item for item in batch if item > min(stored)]
    kept = []
    for item in sorted(batch, reverse=True):
        if all(apart(item, other, p) > cutoff for other in stored + kept):
            kept.append(item)
    return best(stored + kept, capacity)


def rule(near, when, cutoff, p, capacity):
    """The step from what is stored to what is stored after a batch."""

    def step(stored, batch):
        if cutoff < 0 or (when == "full" and len(stored) < capacity):
            return best(stored + batch, capacity)
        choose = replacing if near == "replace" else rejecting
        return choose(stored, batch, capacity, cutoff, p)

    return step
