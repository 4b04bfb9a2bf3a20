"""Storage of the rows of frames: those of many frames by one call, with the outcome of each row."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer

from gfn_rb.codec.primitives import one_line
from gfn_rb.containers.objects import objects_in
from gfn_rb.remote.channel import check_rows
from gfn_rb.remote.feeding import ObjectIndex
from gfn_rb.remote.ranks import join_batches
from gfn_rb.shapes import Bool, Int64
from gfn_rb.torchrl_compat import entry_of, new_tensordict
from gfn_rb.writers.rows import select_rows, shallow_copy

log = logging.getLogger(__name__)

_STORED, _REJECTED, _DUPLICATE = range(3)
_OUTCOMES = ("stored", "rejected", "duplicates")
_MOST_LAYOUTS = 1024  # that are remembered

Batch = tuple[int, TensorDictBase]  # the rank that sent rows, and the rows
Layout = tuple[tuple[Any, Any, tuple[int, ...]], ...]


@dataclass
class StoredFrame:
    """What became of the rows of a frame.

    Attributes:
        outcomes: numbers of rows by outcome.
        log_reward: log-reward of each row; None for refused rows.
        error: why they were refused.
    """

    outcomes: dict[str, int]
    log_reward: Tensor | None = None
    error: Exception | None = None


class FrameStore:
    """Stores frames of rows in a buffer, and records in its index who sent which object.

    A call of ``extend`` costs much more than a row of it, so frames that wait are stored by one.
    If that fails, each is stored by itself, so that an error costs the frame alone that causes it.
    Only layouts that the buffer took before are joined: joining pads trajectories, and the buffer
    might take padded what it refuses as it came.

    Args:
        buffer: buffer of the rows; None to check them alone.
        index: index of the buffer; None without a buffer.
        drops_duplicates: whether rows are dropped whose object is held.
        below: log-reward that a frame must not reach; None for no limit.
        peers: ranks of other managers. What one of them sends counts as sent by all of them, so
            that it is not sent on.
    """

    def __init__(
        self,
        buffer: ReplayBuffer | None,
        index: ObjectIndex | None,
        drops_duplicates: bool,
        below: float | None,
        peers: Sequence[int] = (),
    ) -> None:
        self._buffer, self._index, self._peers = buffer, index, peers
        self._drops, self._below = drops_duplicates, below
        self._layouts: set[Layout] = set()  # that the buffer took

    def store(self, batches: Sequence[Batch]) -> list[StoredFrame]:
        """Store the rows of frames, and return what became of each frame."""
        if len(batches) == 1 or self._index is None:
            return [self._store_one(each) for each in batches]
        layouts = [layout_of(rows) for _, rows in batches]
        results: dict[int, StoredFrame] = {}
        for group in self._groups(batches, layouts):
            chosen, alike = [batches[i] for i in group], {layouts[i] for i in group}
            stored = self._store_joined(chosen, alike) if len(group) > 1 else None
            stored = stored or [self._store_one(each) for each in chosen]
            results |= zip(group, stored, strict=True)
            if len(group) == 1 and stored[0].error is None and len(self._layouts) < _MOST_LAYOUTS:
                self._layouts.add(layouts[group[0]])
        return [results[i] for i in range(len(batches))]

    def _groups(self, batches: Sequence[Batch], layouts: Sequence[Layout]) -> Iterator[list[int]]:
        """Yield positions of frames to store together, of at most as many rows as there is room."""
        assert self._index is not None
        room, groups = self._index.storage.max_size, dict[Any, tuple[list[int], int]]()
        for i, layout in enumerate(layouts):
            if layout not in self._layouts:
                yield [i]
                continue
            # All but the length of trajectories, to which rows are padded.
            kind = tuple([(name, dtype, shape[1:]) for name, dtype, shape in layout])
            group, n = groups.get(kind, ([], 0))
            n_rows = batches[i][1].batch_size[0]
            if group and n + n_rows > room:
                yield group
                group, n = [], 0
            groups[kind] = [*group, i], n + n_rows
        yield from (group for group, _ in groups.values())

    def _store_joined(
        self, batches: Sequence[Batch], layouts: set[Layout]
    ) -> list[StoredFrame] | None:
        """Store frames of some layouts by one call; return None if nothing could be stored."""
        senders, rows = zip(*batches, strict=True)
        sizes = [each.batch_size[0] for each in rows]
        try:
            joined = _joined(rows, *layouts) if len(layouts) == 1 else join_batches(rows)
            log_reward = check_rows(joined, self._below)
            outcome = self._store(joined, np.repeat(senders, sizes))
        except Exception:  # of one of them: which, and why, is found one by one
            return None
        frame, n = np.repeat(np.arange(len(rows)), sizes), len(_OUTCOMES)
        counts = np.bincount(n * frame + outcome, minlength=n * len(rows)).reshape(-1, n).tolist()
        return [
            StoredFrame(dict(zip(_OUTCOMES, count, strict=True)), values)
            for count, values in zip(counts, log_reward.split(sizes), strict=True)
        ]

    def _store_one(self, batch: Batch) -> StoredFrame:
        source, rows = batch
        try:
            log_reward = check_rows(rows, self._below)
            if self._index is None:
                return StoredFrame({"scored": log_reward.shape[0]}, log_reward)
            counts = np.bincount(self._store(rows, source), minlength=len(_OUTCOMES)).tolist()
            return StoredFrame(dict(zip(_OUTCOMES, counts, strict=True)), log_reward)
        except Exception as error:  # a writer, transform or storage may raise anything
            return StoredFrame({"refused": rows.batch_size[0]}, error=error)

    def _store(
        self, rows: TensorDictBase, sender: int | Int64[np.ndarray, "n"]
    ) -> Int64[np.ndarray, "n"]:
        """Offer rows of one sender, or of one each, to the buffer; return the outcome of each."""
        index, buffer = self._index, self._buffer
        assert index is not None
        assert buffer is not None
        if index.encoded is not None:
            rows = index.encoded.padded(rows)
        objects = objects_in(rows)  # refuses rows that the index could not follow once stored
        n, first = objects.n, None
        outcome, slot, new = np.empty(n, np.int64), np.empty(n, np.int64), np.arange(n)
        outcome.fill(_DUPLICATE)
        if self._drops:
            # A checkpoint or its owner may have written to the buffer: the index is refreshed
            # before it is asked, and again once rows are in.
            index.refresh()
            number, first = index.look_up(objects)
            is_known = number >= 0
            new = (~is_known & (first == new)).nonzero()[0]
            self._mark_sent(number[is_known], _of(sender, is_known))
        if n_new := len(new):
            # A buffer writes the slots into the rows that it is given.
            chosen = shallow_copy(rows) if n_new == n else select_rows(rows, torch.from_numpy(new))
            slot.fill(-1)
            slot[new] = stored = torch.as_tensor(buffer.extend(chosen)).reshape(-1).cpu().numpy()
            outcome[new] = stored < 0  # rejected, or else stored
            try:
                index.refresh()
                if first is not None:  # rows that repeat another one are where it is
                    slot = slot[first]
                is_in = slot >= 0
                self._mark_sent(index.number[slot[is_in]], _of(sender, is_in))
            except Exception as error:  # rows that are stored are not refused
                log.warning("rows were stored, and cannot be fed yet: %s", one_line(error)[:500])
        return outcome

    def _mark_sent(
        self, number: Int64[np.ndarray, "m"], sender: int | Int64[np.ndarray, "m"]
    ) -> None:
        assert self._index is not None
        is_of_peer = not isinstance(sender, np.ndarray) and sender in self._peers
        for rank in self._peers if is_of_peer else (sender,):
            self._index.sent.add(number, rank)


def _of(
    sender: int | Int64[np.ndarray, "n"], which: Bool[np.ndarray, "n"]
) -> int | Int64[np.ndarray, "k"]:
    return sender[which] if isinstance(sender, np.ndarray) else sender


def _joined(rows: Sequence[TensorDictBase], layout: Layout) -> TensorDictBase:
    """Return rows of one layout as one batch, in a tenth of the time of ``join_batches``."""
    names = [name for name, _, _ in layout]
    if any(type(name) is not str or dtype is None for name, dtype, _ in layout):
        return join_batches(rows)  # nested ones, and text
    columns = {name: torch.cat([entry_of(each, name) for each in rows]) for name in names}
    n = sum(each.batch_size[0] for each in rows)
    return new_tensordict(columns, torch.Size([n]))


def layout_of(rows: TensorDictBase) -> Layout:
    """Return names, dtypes and shapes per row of all entries."""
    leaves = sorted(rows.items(True, True), key=lambda entry: str(entry[0]))
    return tuple([(name, getattr(leaf, "dtype", None), leaf.shape[1:]) for name, leaf in leaves])
