"""Keeping the items of highest reward among those that are far apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from gfn_rb.errors import ArgumentError, CheckpointMismatchError
from gfn_rb.keys import LOG_REWARD
from gfn_rb.numerics.near.choice import Choice, choose
from gfn_rb.numerics.near.distances import check_norm
from gfn_rb.numerics.near.index import NearIndex, PreparedRows
from gfn_rb.torchrl_compat import bump_mutation_revision, set_length
from gfn_rb.writers.features import Features, Unique
from gfn_rb.writers.followed_index import FollowedIndex
from gfn_rb.writers.reward import RewardPrioritizedWriter, Tie
from gfn_rb.writers.rows import no_slots, overwrite, relocate

Near = Literal["replace", "reject"]
When = Literal["always", "full"]


class DiversityWriter(RewardPrioritizedWriter):
    """A writer that keeps items of high key, any two of them further apart than a cutoff.

    Each batch is gone through together with what is stored, from the highest key to the lowest:
    an item is kept if it lies further than ``cutoff_distance`` from every item kept before it,

        ``(sum_j |x_j - y_j|^p)^(1/p) > cutoff_distance``,

    until ``capacity`` items are kept. So the best of each neighbourhood stays, and nothing gives
    way to an item that is itself dropped. An item may take the place of several; the slots left
    over go to other rows of the batch, then to rows from the end of the storage, which thus has no
    holes but may become shorter.

    The search is exact. Equal items are found by hashing, integers that differ in few columns
    (and small Hamming distances) by hashing groups of columns, all others by the triangle
    inequality: see :mod:`gfn_rb.numerics`. The features of what is stored are held beside it, on
    the storage's device, and read anew if the storage was written to by others. Rows written by
    others are not compared with each other.

    Args:
        key: the key to rank items by, one float per item.
        features: what distances are measured between: a key, whose entry is flattened, or a
            callable from items, batch size [n], to a tensor [n, d]. An item's ``condition`` is
            appended. By default the terminating state of trajectories, the state and the next one
            of transitions, and the state of all other items.
        cutoff_distance: items this close or closer do not stand beside each other. 0 refuses
            exact duplicates only; below 0 nothing is compared.
        p: of the norm, at least 1 or ``inf``; 0 counts the features that differ (Hamming).
        near: whether a better item shall "replace" the stored ones near it, or "reject" an item
            near a stored one, whatever its key.
        when: whether to compare "always", or only batches that find the storage "full".
        tie: among equal keys, whether the "newest" or the "oldest" items are kept.
        unique: refused, as no two items are equal at a cutoff of 0 or more.

    Raises:
        ArgumentError: an option breaks its rule.

    Examples:
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(4), writer=DiversityWriter(cutoff_distance=1.0)
        ... )
        >>> state, log_reward = torch.tensor([[0], [1], [2]]), torch.tensor([1.0, 3.0, 2.0])
        >>> rb.extend(TensorDict({"state": state, "log_reward": log_reward}, [3]))
        tensor([-1,  0, -1])
    """

    _compared: FollowedIndex

    def __init__(
        self,
        key: NestedKey = LOG_REWARD,
        features: NestedKey | Callable[[TensorDictBase], Tensor] | None = None,
        cutoff_distance: float | int = 0.0,
        p: float | int = 1.0,
        near: Near = "replace",
        when: When = "always",
        tie: Tie = "newest",
        unique: Unique = None,
    ) -> None:
        super().__init__(key, tie)
        if unique is not None:
            raise ArgumentError(
                f"unique has no meaning for a DiversityWriter, got {unique!r}: equal items never "
                "stand beside each other at cutoff_distance >= 0, and the better of them stays; "
                "name what they are compared by in features"
            )
        if math.isnan(cutoff_distance):
            raise ArgumentError("cutoff_distance must be a number, got nan")
        if near not in ("replace", "reject"):
            raise ArgumentError(f"near must be 'replace' or 'reject', got {near!r}")
        if when not in ("always", "full"):
            raise ArgumentError(f"when must be 'always' or 'full', got {when!r}")
        self.cutoff_distance = float(cutoff_distance)
        self.p = check_norm(p)
        self.near = near
        self.when = when
        self.measure(features)

    def measure(self, features: NestedKey | Callable[[TensorDictBase], Tensor] | None) -> None:
        """Measure distances between other features from now on.

        Args:
            features: see the class.
        """
        self.features = features
        self._compared = FollowedIndex(Features(features), self.p, self.cutoff_distance)

    # Choosing.

    def _offer(self, data: TensorDictBase, key: Tensor, highest: float) -> Tensor:
        full = len(self._storage) == self._storage.max_size
        if self.cutoff_distance < 0 or (self.when == "full" and not full):
            return self._offer_any(data, key, highest)
        rows = self._compared.features(data)
        floor = self._lowest() if full else -math.inf
        device = (self._allocated() if full else self._in_step()).device
        rows, key = rows.to(device), key.to(device, torch.float64)
        if key.shape[0] == 0 or (full and not self._beats(highest, floor)):
            return no_slots(key)
        index = self._compared.follow(self._storage, rows)
        value, order = self._worst_first(key)
        hopeless = self._below(value, floor) if full else 0
        order = order.flip(0)
        choice = self._chosen(index, rows, key, order[: order.shape[0] - hopeless])
        # Fewer rows come in than go out: there is room for the hopeless after all.
        if hopeless and choice.selected.shape[0] < choice.replaced.shape[0]:
            choice = self._chosen(index, rows, key, order)
        return self._carry_out(data, key, choice, index)

    def _chosen(self, index: NearIndex, rows: Tensor, key: Tensor, order: Tensor) -> Choice:
        """Choose among rows in an order from the best to the worst; name them by their place."""
        stored = self._allocated().key

        def beats(i: Tensor, slot: Tensor) -> Any:
            return self._beats(key[order[i]], stored[slot])

        rows = rows.index_select(0, order)
        choice = choose(index, rows, beats if self.near == "replace" else _never)
        if choice.selected.shape[0] == order.shape[0]:
            return choice._replace(selected=order)
        return choice._replace(selected=order.index_select(0, choice.selected))

    # Writing.

    def _carry_out(
        self, data: TensorDictBase, key: Tensor, choice: Choice, index: NearIndex
    ) -> Tensor:
        """Cut what was chosen to the capacity, write it, and return one slot per row."""
        stored = index.length
        chosen, removed, prepared = choice
        value = key.index_select(0, chosen)
        free = self._storage.max_size - stored + removed.shape[0]
        if chosen.shape[0] > free:
            out = self._pushed_out(value[free:], removed)
            n = free + out.shape[0]
            chosen, value, prepared = chosen[:n], value[:n], prepared.first(n)
            removed = torch.cat([removed, out]) if removed.shape[0] else out
        if chosen.shape[0] > removed.shape[0]:  # rows line up at the end as they came
            chosen, place = chosen.sort()
            value, prepared = value.index_select(0, place), prepared.select(place)
        move = _moves(chosen.shape[0], removed, stored)
        self._store(data, chosen, move, stored)
        self._follow_up(index, move, value, self._rank(chosen), prepared)
        slot = no_slots(key)
        slot[chosen] = move.target
        return slot

    def _pushed_out(self, contest: Tensor, replaced: Tensor) -> Tensor:
        """Return the slots of the worst items, each of which loses against one of the keys.

        Args:
            contest: from the best down; the first meets the worst item, and so on.
            replaced: slots given up already.
        """
        extremes = self._allocated()
        n = min(contest.shape[0] + replaced.shape[0], len(self._storage))
        if not replaced.shape[0]:
            return self._driven_out(contest[:n])
        slot = extremes.smallest(n).rows(n)
        slot = slot[~torch.isin(slot, replaced)]
        slot = slot[extremes.rank[slot].argsort()]
        value, place = extremes.key[slot].sort(stable=True)
        n = min(contest.shape[0], slot.shape[0])
        return slot[place[: int(self._beats(contest[:n], value[:n]).sum())]]

    def _store(self, data: TensorDictBase, chosen: Tensor, move: _Moves, before: int) -> None:
        storage = self._storage
        if not storage.initialized:
            self._write(move.target, data, chosen, move.length)
            return
        overwrite(storage, move.target, data, chosen)
        if move.source.shape[0]:
            relocate(storage, move.source, move.hole)
        if move.length != before:
            set_length(storage, move.length)
        if move.length < before:
            bump_mutation_revision(storage)  # or samplers would take it for a write to some rows
        changed = torch.cat([move.target, move.hole]) if move.hole.shape[0] else move.target
        self._announce(changed, chosen.shape[0])

    def _follow_up(
        self, index: NearIndex, move: _Moves, key: Tensor, rank: Tensor, prepared: PreparedRows
    ) -> None:
        """Do to the extremes and to the index what was done to the storage."""
        extremes = self._allocated()
        extremes.update(move.target, key, rank)
        index.write(move.target, prepared, max(move.length, index.length))
        if move.source.shape[0]:
            extremes.update(move.hole, extremes.key[move.source], extremes.rank[move.source])
            index.write(move.hole, index.prepare(index.rows[move.source]), index.length)
        if move.length < index.length:
            extremes.remove(torch.arange(move.length, index.length, device=extremes.device))
            index.shorten(move.length)
        self._now_in_step(self._column.version(self._storage))
        self._compared.wrote(self._storage)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return what the storage does not hold; see :meth:`RewardPrioritizedWriter.state_dict`."""
        return {**super().state_dict(), "cutoff_distance": self.cutoff_distance, "p": self.p}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. Features are read from the storage.

        Args:
            state_dict: from a writer of the same ``tie``, ``cutoff_distance`` and ``p``.

        Raises:
            CheckpointMismatchError: it comes from another, or from a larger storage.
        """
        came = (state_dict.get("cutoff_distance"), state_dict.get("p"))
        if came != (self.cutoff_distance, self.p):
            raise CheckpointMismatchError(
                f"writer state is of cutoff_distance={came[0]} and p={came[1]}, expected "
                f"cutoff_distance={self.cutoff_distance} and p={self.p}"
            )
        super().load_state_dict(state_dict)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(key={self.key!r}, features={self.features!r}, "
            f"cutoff_distance={self.cutoff_distance}, p={self.p}, near={self.near!r}, "
            f"when={self.when!r}, tie={self.tie!r})"
        )


class _Moves(NamedTuple):
    """Which rows of a storage are written and moved.

    Args:
        target: slots for the new rows.
        source: slots of rows that move, all of them from ``length`` on.
        hole: where these move to.
        length: of the storage afterwards.
    """

    target: Tensor
    source: Tensor
    hole: Tensor
    length: int


def _never(row: Tensor, slot: Tensor) -> Tensor:
    return torch.zeros_like(row, dtype=torch.bool)


def _moves(n: int, removed: Tensor, stored: int) -> _Moves:
    """Put n rows over removed ones and then at the end, or close holes with rows from the end."""
    length = stored + n - removed.shape[0]
    if length == stored:
        none = removed[:0]
        return _Moves(removed, none, none, length)
    if length > stored:
        fresh = torch.arange(stored, length, device=removed.device)
        return _Moves(torch.cat([removed, fresh]), fresh[:0], fresh[:0], length)
    removed = removed.sort().values
    tail = torch.arange(length, stored, device=removed.device)
    source = tail[~torch.isin(tail, removed)]
    return _Moves(removed[:n], source, removed[n : n + source.shape[0]], length)
