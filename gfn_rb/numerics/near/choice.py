"""The greedy choice of rows that are far from each other and from rows held before."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gfn_rb.numerics.near.distances import greedy
from gfn_rb.numerics.near.index import NearIndex, Pairs, PreparedRows
from gfn_rb.shapes import Shaped

Beats = Callable[[Tensor, Tensor], Tensor]


class Choice(NamedTuple):
    """Rows that :func:`choose` keeps.

    Args:
        selected: positions of the rows to keep, from the best to the worst, int64 [k].
        replaced: slots whose rows give way to them, int64 [b].
        prepared: the kept rows, as the index looked them up.
    """

    selected: Tensor
    replaced: Tensor
    prepared: PreparedRows


def choose(index: NearIndex, rows: Shaped[Tensor, "n d"], beats: Beats) -> Choice:
    """Keep each row that is near none better, whether among the rows kept or in the index.

    Goes through all rows, those in the index too, from the best to the worst, and compares each
    with what is kept alone. Rows in the index are not compared with each other. Candidates come
    from the best to the worst; ``beats(position, slot)`` compares them with rows in the index.
    """
    if rows.shape[0] <= index.chunk:
        prepared = index.prepare(rows)
        return _settle(prepared, index.near(prepared), index.near_each_other(prepared), beats)
    return _by_chunks(index, rows, beats)


def _by_chunks(index: NearIndex, rows: Tensor, beats: Beats) -> Choice:
    """Choose among some rows after the other; those kept so far are found by another index."""
    peers = index.sibling(rows.shape[0])
    parts: list[Choice] = []
    for start in range(0, rows.shape[0], index.chunk):
        part = rows[start : start + index.chunk]
        taken = torch.zeros(part.shape[0], dtype=torch.bool)
        taken[peers.near(peers.prepare(part))[0]] = True
        here = start + (~taken).nonzero()[:, 0]
        prepared = index.prepare(rows[here])
        i, slot = index.near(prepared)
        if parts and i.shape[0]:
            left = ~torch.isin(slot, torch.cat([each.replaced for each in parts]))
            i, slot = i[left], slot[left]

        def beats_here(i: Tensor, slot: Tensor, here: Tensor = here) -> Tensor:
            return beats(here[i], slot)

        chosen = _settle(prepared, (i, slot), index.near_each_other(prepared), beats_here)
        length = peers.length + chosen.selected.shape[0]
        slot = torch.arange(peers.length, length)
        peers.write(slot, peers.prepare(chosen.prepared.rows), length)
        parts.append(chosen._replace(selected=here[chosen.selected]))
    selected, replaced, pieces = zip(*parts, strict=True)
    prepared = index.prepare(torch.cat([piece.rows for piece in pieces]))
    return Choice(torch.cat(selected), torch.cat(replaced), prepared)


def _settle(prepared: PreparedRows, near: Pairs, peers: Pairs, beats: Beats) -> Choice:
    """Choose among rows, given who is near whom."""
    (i, slot), (better, worse) = near, peers
    n = prepared.rows.shape[0]
    if not i.shape[0] and not better.shape[0]:
        return Choice(torch.arange(n), slot, prepared)
    held, place = slot.unique(return_inverse=True)
    wins, place = beats(i, slot), place + n
    better = torch.cat([better, torch.where(wins, i, place)])
    worse = torch.cat([worse, torch.where(wins, place, i)])
    stays = greedy(n + held.shape[0], better, worse)
    kept = stays[:n].nonzero()[:, 0]
    return Choice(kept, held[~stays[n:]], prepared.select(kept))
