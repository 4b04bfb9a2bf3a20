"""Feeding of workers: objects that a manager holds, the next ones of a worker, their arrival."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.storages import Storage, TensorStorage

from gfn_rb.arguments import require_choice, require_kind
from gfn_rb.buffers.compact import compact_rows_of
from gfn_rb.column import KeyColumn, RowChanges
from gfn_rb.containers.objects import ObjectsInRows, objects_in
from gfn_rb.errors import ArgumentError, CheckpointMismatchError
from gfn_rb.kernels.objects import Hashed, Objects
from gfn_rb.kernels.order import Order
from gfn_rb.kernels.weights import Weights
from gfn_rb.keys import INDEX, LOG_REWARD
from gfn_rb.remote.ranks import batches_of, join_batches
from gfn_rb.shapes import Bool, Float, Int64
from gfn_rb.storages import EncodedStorage
from gfn_rb.torchrl_compat import all_slots, generator_of, length_of
from gfn_rb.writers.rows import select_rows, shallow_copy

_CHUNK = 8192  # compact or ragged rows made whole at a time: all may be larger than memory
_REMEMBERED = 100_000  # objects fed earlier that are known to a worker at least


@cache
def compile_loops() -> None:
    """Compile the loops of exchanges, or read them from disk, before a peer waits for an answer.

    A machine that has not compiled them needs several seconds, and a timeout may be shorter.
    """
    objects, order, weights = Objects(64, 1), Order(64), Weights(64)
    for n in (64, 1):  # changes of many rows and of few take different loops
        slot = np.arange(n)
        objects.put(slot, objects.look_up(slot[:, None])[0])
        order.put(slot, np.zeros(n), slot)
        weights.update(torch.from_numpy(slot), torch.zeros(n, dtype=torch.float64))
    weights.draw_distinct(1)
    order.remove(order.first(1))
    order.remove(order.first(63))


class ObjectIndex:
    """The different objects in the rows of a storage, by number; rows of one share its number.

    Rows that were announced as written, moved or restored are read again. What is known of an
    object moves with it from row to row, and ends when it leaves the storage. A row that stands for
    no whole object has a number of its own that nothing finds.
    Objects are compared whole: hashes alone decide nothing.
    """

    def __init__(self, rb: ReplayBuffer, n_ranks: int = 0) -> None:
        is_plain = isinstance(rb.storage, TensorStorage) and rb.storage.ndim == 1
        if not is_plain:
            raise ArgumentError(
                "buffer cannot be followed: its storage must be a TensorStorage with ndim=1, got "
                f"{type(rb.storage).__name__} with ndim={rb.storage.ndim}"
            )
        self.storage: Storage = rb.storage
        self.encoded = rb.storage if isinstance(rb.storage, EncodedStorage) else None
        n = rb.storage.max_size
        self.number = np.full(n, -1)  # of the object in each row, -1 for an empty one
        self.arrival = np.zeros(n, np.int64)  # by number; it grows with each arrival
        # By number and rank, those of a rank side by side: whether it came from there, and whether
        # it was given to the rank.
        self.sent = np.zeros((n, n_ranks), bool, order="F")
        self.given = np.zeros((n, n_ranks), bool, order="F")
        self.subscribers: dict[int, Subscriber] = {}  # by rank
        self._compact = compact_rows_of(rb)
        self._length = 0
        self._column = KeyColumn(LOG_REWARD)
        self._objects = Objects(n, 1)  # by number
        self._n_rows = np.zeros(n, np.int64)  # by number, how many rows hold it
        self._unused = np.arange(n - 1, -1, -1)  # a stack
        self._n_unused = n
        self.n_arrived = 0
        generator = generator_of(rb)
        on_cpu = generator is not None and generator.device.type == "cpu"  # as are the choices
        self.generator = generator if on_cpu else None
        self.storage.attach(self)

    # Following the storage.

    def mark_update(self, index: int | Tensor) -> None:
        """Record that rows were written: TorchRL's call to what is attached to a storage."""
        if self.storage.initialized:
            self._column.announce(self.storage, torch.as_tensor(index, dtype=torch.int64).cpu())

    def refresh(self) -> Int64[Tensor, "m"]:
        """Bring the objects up to date with the storage, and return the rows read again."""
        length, rows = length_of(self.storage), np.empty(0, np.int64)
        emptied = np.arange(length, self._length)
        if self.storage.initialized:
            if len(emptied):
                self._column.forget()
            changed = self._column.changed(self.storage)
            if changed is None:
                rows = np.arange(length)
            elif len(changed):
                rows = np.unique(changed.numpy())
        if len(rows) or len(emptied):
            try:
                objects = self._read_objects(torch.from_numpy(rows))
            except Exception:
                self._column.forget()
                raise
            left = self.number[np.concatenate([rows, emptied])]
            self.number[emptied] = -1
            self.number[rows] = self._replace(left[left >= 0], objects)
        self._length, read = length, torch.from_numpy(rows)
        for each in self.subscribers.values():
            each.changes.note(read, self.storage.max_size)
        return read

    def read(self, rows: Int64[Tensor, "m"], max_nbytes: int | None = None) -> TensorDictBase:
        """Return copies of rows on the CPU as they came, whole where they are stored compact."""
        if self.encoded is not None:
            stored = self.encoded.padded_rows(rows).exclude(INDEX)
        else:
            stored = select_rows(all_slots(self.storage), rows, but=(INDEX,))
        if torch.device(self.storage.device).type != "cpu":
            stored = stored.cpu()
        if self._compact is None:
            return stored
        if max_nbytes is not None:
            self._compact.check_size(stored, max_nbytes)
        return self._compact.forward(stored)

    def log_reward(self, rows: Int64[Tensor, "m"]) -> Float[Tensor, "m"]:
        """Return the log-rewards of rows, integers as floats."""
        values = self._column.values(self.storage)[rows].cpu()
        return values if values.is_floating_point() else values.to(torch.float64)

    def _read_objects(self, rows: Int64[Tensor, "m"]) -> ObjectsInRows:
        if self._compact is None and self.encoded is None:
            return objects_in(all_slots(self.storage), rows)
        parts = rows.split(_CHUNK) if len(rows) else ()
        found = [objects_in(self.read(part)) for part in parts]
        at = [i * _CHUNK + each.at for i, each in enumerate(found)]
        columns = [each.columns for each in found] or [np.zeros((0, 0), np.int64)]
        return ObjectsInRows(len(rows), np.concatenate([rows[:0], *at]), np.concatenate(columns))

    # Finding.

    def find(self, objects: ObjectsInRows) -> Int64[np.ndarray, "n"]:
        """Return the numbers of objects as of the last refresh, -1 for those not known."""
        return look_up(self._objects, objects)[1]

    def new(self, objects: ObjectsInRows) -> tuple[Int64[np.ndarray, "k"], Int64[np.ndarray, "j"]]:
        """Return the positions of the objects that are neither known nor repeated."""
        _, number, first = look_up(self._objects, objects)
        is_first = first == np.arange(objects.n)
        return ((number < 0) & is_first).nonzero()[0], number[number >= 0]

    # Numbers.

    def _replace(self, left: np.ndarray, objects: ObjectsInRows) -> Int64[np.ndarray, "m"]:
        """Return the numbers of objects that rows hold now; one that moves keeps its number."""
        hashed, number, first = look_up(self._objects, objects)
        is_new = number < 0
        # What enters counts before what left is forgotten: an object that only moves is both.
        np.add.at(self._n_rows, left, -1)
        np.add.at(self._n_rows, number[~is_new], 1)
        if len(left):  # numbers that no row has are used again
            gone = np.unique(left[self._n_rows[left] == 0])
            self._unused[self._n_unused : self._n_unused + len(gone)] = gone
            self._n_unused += len(gone)
            self._objects.remove(gone)
        entering = (is_new & (first == np.arange(objects.n))).nonzero()[0]
        if n_new := len(entering):
            self._n_unused -= n_new
            new = self._unused[self._n_unused : self._n_unused + n_new][::-1].copy()
            self.sent[new] = self.given[new] = False
            self.arrival[new] = np.arange(self.n_arrived, self.n_arrived + n_new)
            self.n_arrived += n_new
            number[entering] = new
        if len(objects.at) < objects.n:  # others are no whole objects, and cannot be found
            which = np.isin(objects.at, entering).nonzero()[0]
            self._name(number[objects.at[which]], hashed.select(which))
        elif n_new:
            self._name(new, hashed if n_new == objects.n else hashed.select(entering))
        number = number[first]
        np.add.at(self._n_rows, number[is_new], 1)
        return number

    def _name(self, number: Int64[np.ndarray, "k"], hashed: Hashed) -> None:
        """Let numbers be found by their objects."""
        width = hashed.rows.shape[1]
        if self._objects.width != width:  # of a storage that is laid out, or was laid out anew
            self._objects = Objects(len(self.number), width)
            hashed = self._objects.hashed(hashed.rows)
        self._objects.put(number, hashed)

    # State.

    def subscribe(self, rank: int, terms: Any) -> None:
        """Feed a worker from now on."""
        self.subscribers[rank] = Subscriber(rank, terms, self)

    def state_dict(self) -> dict[str, Any]:
        """Return, row by row, what the storage does not hold, and the subscribers."""
        self.refresh()
        number = self.number[: length_of(self.storage)]
        rows = {
            "sent": torch.from_numpy(self.sent[number]),
            "given": torch.from_numpy(self.given[number]),
            "arrival": torch.from_numpy(self.arrival[number]),
            "n_arrived": self.n_arrived,
        }
        terms = {str(rank): each.terms for rank, each in self.subscribers.items()}
        return {"index": rows, "subscribers": terms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned, over a storage restored to that moment."""
        state, subscribers = state["index"], state["subscribers"]
        n, came = length_of(self.storage), len(state["arrival"])
        if came != n:
            raise CheckpointMismatchError(f"index of {came} rows, expected {n} as are stored")
        self._column.forget()
        self.refresh()
        number, n_ranks = self.number[:n], min(state["sent"].shape[1], self.sent.shape[1])
        for column, saved in ((self.sent, state["sent"]), (self.given, state["given"])):
            column[number] = False
            column[number, :n_ranks] = saved.numpy()[:, :n_ranks]
        self.arrival[number] = state["arrival"].numpy()
        self.n_arrived = state["n_arrived"]
        self.subscribers = {}
        for rank, terms in subscribers.items():
            self.subscribe(int(rank), {**terms, "fresh": False})


def look_up(
    held: Objects, objects: ObjectsInRows
) -> tuple[Hashed, Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
    """Return the slot of each row's object, -1 for none, and where the object comes first in rows.

    A row that stands for no whole object is like no other. The whole ones come hashed, too.
    """
    columns, at = objects.columns, objects.at
    if held.width != columns.shape[1]:  # objects of another layout are unknown
        held = Objects(1, columns.shape[1])
    hashed, found, twins = held.look_up(columns)
    if len(at) == objects.n:
        return hashed, found, twins
    slot, first = np.full(objects.n, -1), np.arange(objects.n)
    slot[at], first[at] = found, at[twins]
    return hashed, slot, first


MAX_QUOTA = 4096  # rows that are fed at a time
# Highest log-reward first, of equal ones the newest; draws without replacement in proportion to
# exp(log-reward); the last that arrived first.
POLICIES = ("top", "softmax", "newest")


def require_terms(quota: Any, policy: Any, own: Any) -> dict[str, Any]:
    """Return the terms of a subscription by name, or raise unless they can be met."""
    if type(own) is not bool:
        raise ArgumentError(f"own must be true or false, got {own!r:.80}")
    if type(quota) is not int or not 1 <= quota <= MAX_QUOTA:
        raise ArgumentError(f"quota must be an integer from 1 to {MAX_QUOTA}, got {quota!r:.80}")
    require_choice("policy", policy, POLICIES)
    return {"quota": quota, "policy": policy, "own": own}


class Subscriber:
    """A worker that a manager feeds, and the rows that it may be given next, in order.

    The order is brought up to date with the changes since the last reply. A reply therefore takes
    as long from a large buffer as from a small one.
    """

    def __init__(self, rank: int, terms: Any, index: ObjectIndex) -> None:
        if not isinstance(terms, Mapping):
            raise ArgumentError(f"subscription must be terms by name, got {terms!r:.80}")
        # Only the terms that are understood: they are saved, and others may be of any size.
        self.terms = require_terms(terms.get("quota"), terms.get("policy"), terms.get("own", False))
        self.rank, self._index, n = rank, index, index.storage.max_size
        self.changes = RowChanges()  # of the index since the last reply, at first perhaps all
        is_drawn = self.terms["policy"] == "softmax"
        self._ranking: Order | Weights = Weights(n) if is_drawn else Order(n)
        if terms.get("fresh"):  # it starts anew, without the rows that it was given
            index.given[:, rank] = False

    def next(self, quota: int | None = None) -> TensorDictBase | None:
        """Return the next rows, at most ``quota`` or those of the terms; record them as given."""
        index, most = self._index, self.terms["quota"] if quota is None else min(quota, MAX_QUOTA)
        if not index.storage.initialized:
            return None
        index.refresh()
        length, changed = length_of(index.storage), self.changes.take()
        self._rank(
            np.arange(length)
            if changed is None
            else np.unique(changed[changed < length].numpy())  # others were emptied since
        )
        picked = self._take(most)
        index.given[index.number[picked], self.rank] = True
        return index.read(torch.from_numpy(picked)) if len(picked) else None

    def _rank(self, row: Int64[np.ndarray, "m"]) -> None:
        """Put rows in their places, those that may not be given behind all others."""
        index = self._index
        log_reward = index.log_reward(torch.from_numpy(row)).to(torch.float64).numpy()
        log_reward = np.where(self._is_known(row), -math.inf, log_reward)
        if isinstance(self._ranking, Weights):
            self._ranking.update(torch.from_numpy(row), torch.from_numpy(log_reward))
            return
        arrival, is_newest = index.arrival[index.number[row]], self.terms["policy"] == "newest"
        key = np.where(log_reward == -math.inf, math.inf, -arrival if is_newest else -log_reward)
        self._ranking.put(row, key, -arrival)

    def _take(self, n: int) -> Int64[np.ndarray, "k"]:
        """Take out the next n rows that the worker does not know, or all there are."""
        taken, ranking = np.empty(0, np.int64), self._ranking
        while (left := n - len(taken)) > 0:
            if isinstance(ranking, Weights):
                row = ranking.draw_distinct(left, self._index.generator)[0]
                ranking.update(row, torch.full(row.shape, -math.inf, dtype=torch.float64))
                found = row.numpy()
            else:
                found = ranking.first(min(left, len(ranking)))
                found = found[ranking.key[found] < math.inf]
                ranking.remove(found)
            n_found = len(found)
            found = found[found < length_of(self._index.storage)]
            # The worker may have sent objects since they were ranked.
            taken = np.concatenate([taken, found[~self._is_known(found)]])
            if n_found < left:
                break
        return taken

    def _is_known(self, row: Int64[np.ndarray, "m"]) -> Bool[np.ndarray, "m"]:
        """Return which rows the worker was given or, unless it wants its own, sent."""
        index, number = self._index, self._index.number[row]
        known: np.ndarray = index.given[number, self.rank]
        return known if self.terms["own"] else known | index.sent[number, self.rank]


class Subscription:
    """A worker's subscription to rows that other workers found.

    Objects that the worker holds or was fed before are dropped on arrival.

    Args:
        buffer: second buffer, beside the worker's own, that stores the fed rows. Draw from both
            through a :class:`~gfn_rb.MergedReplayBuffer`.
        quota: highest number of rows with each reply, 1 to 4096.
        policy: which unknown rows are fed: ``"top"`` for those of highest log-reward, ``"softmax"``
            for a draw by reward, ``"newest"`` for the newest.
        own: whether rows of this worker are fed to it too.

    Raises:
        ArgumentError: ``quota`` is out of range, or ``policy`` is unknown.

    Examples:
        >>> fed = reward_prioritized_buffer(10_000)
        >>> worker = ReplayBufferWorker(transport, 0, local, subscription=Subscription(fed, 32))
        >>> rb = MergedReplayBuffer(local, fed, p="mass", batch_size=64)
    """

    def __init__(
        self, buffer: ReplayBuffer, quota: int, policy: str = "top", own: bool = False
    ) -> None:
        require_kind("buffer", buffer, ReplayBuffer)
        self._terms = require_terms(quota, policy, own)
        self.buffer = buffer
        self._room = buffer.storage.max_size  # rows that are kept for take() at most
        self._known: Objects | None = None  # held or fed, in a ring
        self._n_remembered = 0
        self._untaken: deque[TensorDictBase] = deque()
        self._n_untaken = 0

    def terms(self) -> dict[str, Any]:
        """Return the subscription as the manager needs it."""
        return {**self._terms, "fresh": len(self.buffer) == 0}

    def receive(self, rows: TensorDictBase, local: ObjectIndex | None) -> int:
        """Store the rows that neither the worker's own buffer nor this one has had.

        Args:
            rows: rows of a manager, batch size [n].
            local: objects of the worker's own buffer.

        Returns:
            Number of rows dropped.
        """
        objects = objects_in(rows)
        if self._known is None:
            self._known = Objects(_REMEMBERED + 2 * self._room, objects.columns.shape[1])
            for batch in batches_of(self.buffer):
                self._remember(self._known.hashed(objects_in(batch).columns))
        hashed, slot, first = look_up(self._known, objects)
        is_new = (slot < 0) & (first == np.arange(objects.n))
        if local is not None:
            local.refresh()
            is_new &= local.find(objects) < 0
        at = is_new.nonzero()[0]
        if n_new := len(at):
            fed = rows
            if n_new < objects.n:
                fed = select_rows(rows, torch.from_numpy(at))
                hashed = hashed.select(is_new[objects.at].nonzero()[0])
            # Kept for take() as well: the buffer's writer may not keep them all.
            self.buffer.extend(shallow_copy(fed))  # whose writer may add entries
            self._untaken.append(fed)
            self._n_untaken += n_new
            while self._n_untaken - (oldest := len(self._untaken[0])) >= self._room:
                self._untaken.popleft()
                self._n_untaken -= oldest
            self._remember(hashed)
        return objects.n - n_new

    def _remember(self, hashed: Hashed) -> None:
        """Know objects from now on, in place of those known for longest."""
        known = self._known
        if known is not None and known.width == hashed.rows.shape[1]:
            slot = (self._n_remembered + np.arange(len(hashed.code))) % known.capacity
            known.put(slot, hashed)
            self._n_remembered += len(slot)

    def take(self) -> TensorDictBase | None:
        """Return the rows stored since the last call, as ``ReplayBufferWorker.take_fed`` does."""
        batches, self._untaken, self._n_untaken = self._untaken, deque(), 0
        return join_batches(batches) if batches else None
