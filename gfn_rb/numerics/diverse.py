"""The greedy choice of rows that are far from each other and from rows held before."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gfn_rb.numerics.distances import greedy
from gfn_rb.numerics.near_index import Look, NearIndex, Pairs
from gfn_rb.shapes import Shaped

Beats = Callable[[Tensor, Tensor], Tensor]


class Choice(NamedTuple):
    """What :func:`choose` chose.

    Args:
        kept: positions of the rows to keep, from the best to the worst, int64 [k].
        beaten: slots whose rows give way to them, int64 [b].
        look: the kept rows, as the index looked them up.
    """

    kept: Tensor
    beaten: Tensor
    look: Look


def choose(
    index: NearIndex,
    rows: Shaped[Tensor, "n d"],
    beats: Beats,
) -> Choice:
    """Keep each row that is near none better, whether among the rows kept or in the index.

    Goes through all rows, those in the index too, from the best to the worst, and compares each
    with what is kept alone. Rows in the index are not compared with each other.

    Args:
        index: rows held before.
        rows: candidates, from the best to the worst.
        beats: tells pair by pair whether a candidate, given by its position, is better than the
            row in a slot.
    """
    if rows.shape[0] <= index.chunk:
        look = index.look(rows)
        return _settle(look, index.near(look), index.near_each_other(look), beats)
    return _by_chunks(index, rows, beats)


def _by_chunks(index: NearIndex, rows: Tensor, beats: Beats) -> Choice:
    """Choose among some rows after the other; those kept so far are found by another index."""
    peers = index.sibling(rows.shape[0])
    parts: list[Choice] = []
    for start in range(0, rows.shape[0], index.chunk):
        part = rows[start : start + index.chunk]
        taken = torch.zeros(part.shape[0], dtype=torch.bool, device=rows.device)
        taken[peers.near(peers.look(part))[0]] = True
        here = start + (~taken).nonzero()[:, 0]
        look = index.look(rows[here])
        near = _without(index.near(look), [each.beaten for each in parts])
        chosen = _settle(look, near, index.near_each_other(look), _shifted(beats, here))
        length = peers.length + chosen.kept.shape[0]
        slot = torch.arange(peers.length, length, device=rows.device)
        peers.write(slot, peers.look(chosen.look.rows), length)
        parts.append(chosen._replace(kept=here[chosen.kept]))
    kept, beaten, looks = zip(*parts, strict=True)
    look = Look(*(torch.cat(each) for each in zip(*looks, strict=True)))
    return Choice(torch.cat(kept), torch.cat(beaten), look)


def _settle(look: Look, near: Pairs, peers: Pairs, beats: Beats) -> Choice:
    """Choose among rows, given who is near whom."""
    (i, slot), (better, worse) = near, peers
    n = look.rows.shape[0]
    if not i.shape[0] and not better.shape[0]:
        return Choice(torch.arange(n, device=look.rows.device), slot, look)
    held, place = slot.unique(return_inverse=True)
    wins, place = beats(i, slot), place + n
    better = torch.cat([better, torch.where(wins, i, place)])
    worse = torch.cat([worse, torch.where(wins, place, i)])
    stays = greedy(n + held.shape[0], better, worse)
    kept = stays[:n].nonzero()[:, 0]
    return Choice(kept, held[~stays[n:]], look.select(kept))


def _shifted(beats: Beats, here: Tensor) -> Beats:
    """Take positions among some of the rows for positions among all."""
    return lambda i, slot: beats(here[i], slot)


def _without(near: Pairs, beaten: list[Tensor]) -> Pairs:
    """Leave out the pairs whose slot has been given up."""
    i, slot = near
    if not beaten or not i.shape[0]:
        return near
    left = ~torch.isin(slot, torch.cat(beaten))
    return i[left], slot[left]
