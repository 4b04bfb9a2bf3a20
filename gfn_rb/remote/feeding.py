"""Objects that a manager holds, and the choice of those that a worker is given next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.storages import Storage, TensorStorage

from gfn_rb.arguments import require_choice
from gfn_rb.buffers.compact import compact_rows_of
from gfn_rb.column import KeyColumn, RowChanges
from gfn_rb.containers.objects import ObjectsInRows, objects_in, terminating_states
from gfn_rb.errors import ArgumentError, CheckpointMismatchError
from gfn_rb.kernels.objects import Hashed, Objects
from gfn_rb.kernels.order import Order
from gfn_rb.kernels.weights import Weights
from gfn_rb.keys import INDEX, LOG_REWARD
from gfn_rb.shapes import Bool, Float, Int64
from gfn_rb.storages import EncodedStorage
from gfn_rb.torchrl_compat import all_slots, generator_of, length_of
from gfn_rb.writers.rows import select_rows

_CHUNK = 8192  # compact or ragged rows made whole at a time: all may be larger than memory


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
        self.unread: dict[int, RowChanges] = {}  # by rank, rows read again since it looked
        self._compact = compact_rows_of(rb)
        self._length = 0
        self._column = KeyColumn(LOG_REWARD)
        self._objects = Objects(n, 1)  # by number
        self._n_rows = np.zeros(n, np.int64)  # by number, how many rows hold it
        self._unused = np.arange(n - 1, -1, -1)  # a stack
        self._n_unused = n
        self.n_arrived = 0
        self.storage.attach(self)

    # Following the storage.

    def mark_update(self, index: int | Tensor) -> None:
        """Record that rows were written: TorchRL's call to what is attached to a storage."""
        if self.storage.initialized:
            self._column.announce(self.storage, torch.as_tensor(index, dtype=torch.int64).cpu())

    def refresh(self) -> Int64[Tensor, "m"]:
        """Bring the objects up to date with the storage, and return the rows read again."""
        length = length_of(self.storage)
        rows, emptied = self._changed(length), np.arange(length, self._length)
        if len(rows) or len(emptied):
            try:
                objects = self._read_objects(torch.from_numpy(rows))
            except Exception:
                self._column.forget()
                raise
            left = self.number[np.concatenate([rows, emptied])]
            self.number[emptied] = -1
            self.number[rows] = self._replace(left[left >= 0], objects)
        self._length, changed = length, torch.from_numpy(rows)
        for unread in self.unread.values():
            unread.note(changed, self.storage.max_size)
        return changed

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

    def _changed(self, length: int) -> Int64[np.ndarray, "m"]:
        """Return the rows to read again, in order."""
        if not self.storage.initialized:
            return np.empty(0, np.int64)
        if length < self._length:  # it was emptied
            self._column.forget()
        rows = self._column.changed(self.storage)
        if rows is None:
            return np.arange(length)
        return np.unique(rows.numpy()) if rows.numel() else rows.numpy()

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
        if len(left):
            self._forget(np.unique(left[self._n_rows[left] == 0]))
        entering = (is_new & (first == np.arange(objects.n))).nonzero()[0]
        number[entering] = self._enter(len(entering))
        if len(objects.at) < objects.n:  # others are no whole objects, and cannot be found
            which = np.isin(objects.at, entering).nonzero()[0]
            self._name(number[objects.at[which]], hashed.select(which))
        elif len(entering):
            named = hashed if len(entering) == objects.n else hashed.select(entering)
            self._name(number[entering], named)
        number = number[first]
        np.add.at(self._n_rows, number[is_new], 1)
        return number

    def _enter(self, n: int) -> Int64[np.ndarray, "m"]:
        """Return numbers that are not used so far, of which nothing is known yet."""
        self._n_unused -= n
        number = self._unused[self._n_unused : self._n_unused + n][::-1].copy()
        self.sent[number] = self.given[number] = False
        self.arrival[number] = np.arange(self.n_arrived, self.n_arrived + n)
        self.n_arrived += n
        return number

    def _name(self, number: Int64[np.ndarray, "k"], hashed: Hashed) -> None:
        """Let numbers be found by their objects."""
        width = hashed.rows.shape[1]
        if self._objects.width != width:  # of a storage that is laid out, or was laid out anew
            self._objects = Objects(len(self.number), width)
            hashed = self._objects.hashed(hashed.rows)
        self._objects.put(number, hashed)

    def _forget(self, number: Int64[np.ndarray, "m"]) -> None:
        """Let numbers be used again."""
        self._unused[self._n_unused : self._n_unused + len(number)] = number
        self._n_unused += len(number)
        self._objects.remove(number)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return, row by row, what the storage does not hold."""
        self.refresh()
        number = self.number[: length_of(self.storage)]
        return {
            "sent": torch.from_numpy(self.sent[number]),
            "given": torch.from_numpy(self.given[number]),
            "arrival": torch.from_numpy(self.arrival[number]),
            "n_arrived": self.n_arrived,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned, over a storage restored to that moment."""
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


MAX_QUOTA = 4096  # rows that are fed at a time: diverse ones take time that grows with the square
_POOL = 8  # candidates that the diverse policy compares for each row that it feeds


class Feeder:
    """Feeds workers from a manager's buffer."""

    def __init__(self, rb: ReplayBuffer | None, n_ranks: int) -> None:
        self.index = None if rb is None else ObjectIndex(rb, n_ranks)
        self.subscribers: dict[int, Subscriber] = {}
        generator = None if rb is None else generator_of(rb)
        on_cpu = generator is not None and generator.device.type == "cpu"  # as are the choices
        self.generator = generator if on_cpu else None

    def subscribe(self, rank: int, terms: Any) -> None:
        """Feed a worker from now on."""
        self.subscribers[rank] = Subscriber(rank, terms, self)

    def next_for(self, rank: int, quota: int | None = None) -> TensorDictBase | None:
        """Return the next rows for a worker, at most ``quota``; None without any."""
        subscriber = self.subscribers.get(rank)
        if subscriber is None or quota == 0:
            return None
        return subscriber.next(subscriber.quota if quota is None else min(quota, MAX_QUOTA))

    def state_dict(self) -> dict[str, Any]:
        """Return the record of objects and subscribers, without the buffer."""
        return {
            "index": None if self.index is None else self.index.state_dict(),
            "subscribers": {str(rank): each.terms for rank, each in self.subscribers.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned, over a buffer restored to that moment."""
        if self.index is not None and state["index"] is not None:
            self.index.load_state_dict(state["index"])
            self.subscribers = {
                int(rank): Subscriber(int(rank), {**terms, "fresh": False}, self)
                for rank, terms in state["subscribers"].items()
            }


class Subscriber:
    """A worker that a manager feeds, and the rows that it may be given next, in order.

    The order is brought up to date with the changes since the last reply. A reply therefore takes
    as long from a large buffer as from a small one.
    """

    def __init__(self, rank: int, terms: Any, feeder: Feeder) -> None:
        if (index := feeder.index) is None:
            raise ArgumentError("this manager keeps no items, so that nobody can be fed from it")
        self.rank = rank
        if not isinstance(terms, Mapping):
            raise ArgumentError(f"subscription must be terms by name, got {terms!r:.80}")
        quota, own = terms.get("quota"), terms.get("own", False)
        policy: Any = terms.get("policy")
        if type(own) is not bool:
            raise ArgumentError(f"own must be true or false, got {own!r:.80}")
        if type(quota) is not int or not 1 <= quota <= MAX_QUOTA:
            raise ArgumentError(
                f"quota must be an integer from 1 to {MAX_QUOTA}, got {quota!r:.80}"
            )
        require_choice("policy", policy, POLICIES)
        self.quota, self.own, self.policy = quota, own, policy
        # Only the terms that are understood: they are saved, and others may be of any size.
        self.terms = {"quota": self.quota, "policy": policy, "own": own}
        n, self._index, self._generator = index.storage.max_size, index, feeder.generator
        index.unread[rank] = self._changes = RowChanges()  # at first perhaps all
        self._ranking: Order | Weights = Weights(n) if policy == "softmax" else Order(n)
        if terms.get("fresh"):  # it starts anew, without the rows that it was given
            index.given[:, rank] = False

    def next(self, quota: int) -> TensorDictBase | None:
        """Return the next rows, and record that they were given."""
        index = self._index
        if not index.storage.initialized:
            return None
        index.refresh()
        length, changed = length_of(index.storage), self._changes.take()
        self._rank(
            np.arange(length)
            if changed is None
            else np.unique(changed[changed < length].numpy())  # others were emptied since
        )
        is_diverse = self.policy == "diverse"
        picked = self._take(_POOL * quota if is_diverse else quota)
        if is_diverse and len(picked) > quota:
            states = terminating_states(index.read(torch.from_numpy(picked)))
            chosen = np.arange(quota) if states is None else _furthest(states[0], quota)
            self._rank(np.delete(picked, chosen))
            picked = picked[chosen]
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
        arrival, is_newest = index.arrival[index.number[row]], self.policy == "newest"
        key = np.where(log_reward == -math.inf, math.inf, -arrival if is_newest else -log_reward)
        self._ranking.put(row, key, -arrival)

    def _take(self, n: int) -> Int64[np.ndarray, "k"]:
        """Take out the next n rows that the worker does not know, or all there are."""
        taken, ranking = np.empty(0, np.int64), self._ranking
        while (left := n - len(taken)) > 0:
            if isinstance(ranking, Weights):
                row = ranking.draw_distinct(left, self._generator)[0]
                ranking.update(row, torch.full(row.shape, -math.inf))
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
        return known if self.own else known | index.sent[number, self.rank]


# Highest log-reward first, of equal ones the newest; of the 8 k best, the best and then repeatedly
# the one whose terminating state is furthest in L1 from all before (Gonzalez 1985); draws without
# replacement in proportion to exp(log-reward); the last that arrived first.
POLICIES = ("top", "diverse", "softmax", "newest")


def _furthest(state: Tensor, k: int) -> Int64[np.ndarray, "k"]:
    """Return k positions, the first and then those furthest from all before."""
    point = state.reshape(len(state), -1).to("cpu", torch.float64)
    taken = torch.zeros(k, dtype=torch.int64)
    nearest = torch.full(point.shape[:1], math.inf, dtype=torch.float64)
    for i in range(1, k):
        last = int(taken[i - 1])
        nearest = torch.minimum(nearest, (point - point[last]).abs().sum(1))
        nearest[last] = -1.0
        taken[i] = nearest.argmax()
    return taken.numpy()
