"""Drawing groups of rows, such as several answers to each prompt."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb.arguments import (
    as_count,
    as_keys,
    name_of,
    require_choice,
    require_device_of,
    require_key,
    shown,
)
from gfn_rb.errors import ArgumentError, EmptyBufferError, NaNError
from gfn_rb.kernels.groups import GroupedSlots, draw_weighted, normalise
from gfn_rb.kernels.weights import LARGEST, Weights
from gfn_rb.keys import DRAW_LOG_PROB, INDEX, LOG_REWARD
from gfn_rb.numerics.flat import on_host
from gfn_rb.samplers.base import DrawInfo, KeySampler, Parameter, Replacement
from gfn_rb.shapes import Float64, Int64
from gfn_rb.storages.column import EqualKeys, KeyColumn
from gfn_rb.torchrl_compat import length_of, outside_graph
from gfn_rb.writers.features import ObjectColumns, Unique, read_stored


class GroupStatistics(NamedTuple):
    """Numbers of groups: their sizes, and mean, variance and highest of their keys, each [g]."""

    size: Int64[Tensor, "g"]
    mean: Float64[Tensor, "g"]
    variance: Float64[Tensor, "g"]
    best: Float64[Tensor, "g"]


_WEIGHTS = ("uniform", "size", "best", "variance")
GroupWeight = Literal["uniform", "size", "best", "variance"] | Callable[[GroupStatistics], Tensor]
_HOST = torch.device("cpu")


class GroupSampler(KeySampler):
    r"""Draws groups, and k rows of each, in a batch that holds the rows group by group.

    Group g is drawn with probability :math:`p_g \propto w_g`, and row i of it with probability
    :math:`p_{i|g} \propto \exp(\log R_i / T)`. The batch has the layout of TorchRL's
    ``PromptGroupSampler``, which group-relative advantages need (``MCAdvantage``). It works with
    every writer; with ``group`` and ``per_group`` of a writer, all groups stay small.

    With ``weight="variance"``, groups whose rows have one reward, of which an advantage relative to
    the group teaches nothing, are never drawn (DAPO, Yu et al. 2025, arXiv:2503.14476). The others
    are drawn in proportion to the variance of their rewards, p (1 - p) for a success rate p.

    A draw takes as long for large groups as for small ones where temperature is inf, and reads the
    rows of the drawn groups where it is not. Groups are found on the host, so rows on a device are
    read anew after each write.

    Args:
        group: what rows are grouped by: "state" (terminating state and condition), another key, a
            list of keys, or a callable from rows [n] to int64 fingerprints [n] or [n, d].
        num_groups: number of groups in a batch. Give this or ``samples_per_group``; the other
            follows from the size of the batch.
        samples_per_group: number of rows k of each group in a batch.
        weight: weight of a group: "uniform" (1), "size" (its number of rows), "best" (exp of its
            highest key), "variance" (of its keys), or a callable from :class:`GroupStatistics` to
            log-weights [g], -inf for groups that are not drawn. The constructor calls it once with
            the statistics of three groups.
        key: entry that holds the log-reward of each row, in nats. It is not read where neither
            ``weight`` nor ``temperature`` depends on it.
        temperature: T, not 0; inf draws the rows of a group uniformly. A negative one draws rows of
            low keys, and one near 0 the k rows of highest (or lowest) key.
        within: entry by which the rows of a group are drawn, if not by ``key``. "policy_version"
            draws recent rows, and an entropy with a negative temperature decided ones.
        small: what to do with groups of fewer rows of positive weight than k. "drop" never draws
            them, and "fill" draws some of their rows again. Default: "drop" with
            ``samples_per_group``, "fill" with ``num_groups`` or ``replacement=True``.
        replacement: True draws groups and rows with replacement, with a ``draw_log_prob`` of each
            row. False draws different ones. ``"auto"`` draws different ones as far as there are
            as many, and then returns the same ones again.
    """

    temperature = Parameter("a number, not 0", lambda value: value == value != 0)

    def __init__(
        self,
        group: Unique,
        *,
        num_groups: int | None = None,
        samples_per_group: int | None = None,
        weight: GroupWeight = "uniform",
        key: NestedKey = LOG_REWARD,
        temperature: float = math.inf,
        replacement: Replacement = "auto",
        within: NestedKey | None = None,
        small: Literal["drop", "fill"] | None = None,
    ) -> None:
        if (num_groups is None) == (samples_per_group is None):
            raise ArgumentError(
                "either num_groups or samples_per_group must be given, got "
                f"{shown(num_groups)} and {shown(samples_per_group)}"
            )
        if not callable(weight) and weight not in _WEIGHTS:
            raise ArgumentError(
                "weight must be 'uniform', 'size', 'best', 'variance' or a callable, got "
                f"{shown(weight)}"
            )
        if callable(weight):
            _require_weights(weight)
        if group is None:
            raise ArgumentError("group must be a key, a list of keys or a callable, got None")
        for name, value in (("num_groups", num_groups), ("samples_per_group", samples_per_group)):
            setattr(self, name, None if value is None else as_count(name, value))
        if small is None:
            small = "fill" if num_groups is not None or replacement is True else "drop"
        require_choice("small", small, ("drop", "fill"))
        if within is not None:
            require_key("within", within)
        self.group, self.weight, self.within, self.small = as_keys(group), weight, within, small
        self._within_column = None if within is None else KeyColumn(within)
        self._least = 1  # rows of a group that is drawn
        self._features = ObjectColumns(group, "group")
        self._groups: GroupedSlots | None = None
        self._stored = 0
        super().__init__(key, replacement)
        self.temperature = temperature

    def _parameter_changed(self) -> None:
        """Read the key from now on where the temperature makes rows differ."""
        draws_by_key = self.temperature != math.inf and self.within is None
        is_read = self.weight not in ("uniform", "size") or draws_by_key
        self._column = KeyColumn(self.key) if is_read else EqualKeys(INDEX)
        self._column.watch_also(self._reads)

    def _reads(self, name: NestedKey) -> bool:
        return self._features.reads(name) or name == self.within

    def _ask_for(self, k: int) -> None:
        """Draw groups of at least k rows from now on, where smaller ones are dropped."""
        least = k if self.small == "drop" else 1
        if least != self._least:
            self._least = least
            self._column.forget()

    # Drawing.

    @outside_graph
    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draw the indices of a batch, and the ``draw_log_prob`` of each as a single draw."""
        n, k = self.shape_of(as_count("batch_size", batch_size))
        if not length_of(storage):
            raise EmptyBufferError(f"cannot draw {batch_size} items: the buffer is empty")
        if self._rng is not None:
            require_device_of(self._rng, _HOST, "groups")
        self._ask_for(k)
        distribution = self.follow(storage)
        assert self._groups is not None
        if not distribution.has_mass:
            lacks = f" or fewer than {k} rows (small='drop')" * (self.small == "drop")
            raise EmptyBufferError(
                f"no group can be drawn: each has weight zero (all -inf?){lacks}"
            )
        if self.replacement is True:
            first, log_prob = distribution.draw(n, self._rng)
        else:
            n_drawn = min(n, len(self._groups))
            first, log_prob, enough = distribution.draw_distinct(n_drawn, self._rng)
            if self.replacement is False and (n_drawn < n or not enough):
                raise ArgumentError(f"num_groups={n} exceeds the groups, and replacement is False")
            if not enough:
                first, log_prob = distribution.draw(n, self._rng)
            elif n_drawn < n:
                again = torch.arange(n) % n_drawn
                first, log_prob = first[again], log_prob[again]
        slot, of_row = self._draw_rows(storage, self._groups.numbers_of(first.numpy()), k)
        log_prob = log_prob.repeat_interleave(k) + of_row
        return slot, DrawInfo({DRAW_LOG_PROB: log_prob.to(torch.float32)})

    @outside_graph
    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether :meth:`sample` returns a batch of this size, whatever groups it draws."""
        n, k = self.shape_of(as_count("batch_size", batch_size))
        if not len(storage):
            return False
        self._ask_for(k)
        distribution = self.follow(storage)
        assert isinstance(distribution, Weights)
        assert self._groups is not None
        if self.replacement is not False or not distribution.has_mass:
            return distribution.has_mass
        first = np.flatnonzero(distribution.log_weight.numpy() > -np.inf)
        _, size, log_prob = self._within(storage, self._groups.numbers_of(first))
        return len(first) >= n and bool((_n_positive(size, log_prob) >= k).all())

    @outside_graph
    def log_probs(self, storage: Storage) -> Float64[Tensor, "len"]:
        """Return the log-probability of every stored row: of its group, times that within it.

        Args:
            storage: storage to draw from.

        Returns:
            One log-probability per row, in nats; ``-inf`` for rows that cannot be drawn.
        """
        log_prob = torch.empty(len(storage), dtype=torch.float64)
        if not len(storage):
            return log_prob
        of_group = self.follow(storage).log_probs(len(storage)).numpy()
        assert self._groups is not None
        number = self._groups.numbers()
        slot, size, within = self._within(storage, number)
        log_prob.numpy()[slot] = within + np.repeat(of_group[self._groups.first(number)], size)
        return log_prob

    def shape_of(self, batch_size: int) -> tuple[int, int]:
        """Return the numbers of groups and of rows of each in a batch."""
        name = "samples_per_group" if self.num_groups is None else "num_groups"
        given: int = getattr(self, name)
        if batch_size % given:
            raise ArgumentError(
                f"batch_size must be a multiple of {name}={given}, got {batch_size}"
            )
        other = batch_size // given
        return (other, given) if self.num_groups is None else (given, other)

    def _within(
        self, storage: Storage, number: Int64[np.ndarray, "g"]
    ) -> tuple[Int64[np.ndarray, "m"], Int64[np.ndarray, "g"], Float64[np.ndarray, "m"]]:
        """Return the slots of groups, the sizes of these, and log p of each row in its group."""
        assert self._groups is not None
        slot, size = self._groups.members(number), self._groups.sizes(number)
        if abs(self.temperature) == math.inf:
            return slot, size, -np.log(size).repeat(size)
        weight = self._values(storage, torch.from_numpy(slot), within=True)
        np.minimum(weight / self.temperature, LARGEST, out=weight)
        normalise(weight, size)
        return slot, size, weight

    def _draw_rows(
        self, storage: Storage, number: Int64[np.ndarray, "g"], k: int
    ) -> tuple[Int64[Tensor, "n"], Float64[Tensor, "n"]]:
        """Draw k rows of each group, different ones unless there is replacement."""
        groups, are_different = self._groups, self.replacement is not True
        assert groups is not None
        uniform = torch.rand(len(number), k, dtype=torch.float64, generator=self._rng).numpy()
        if abs(self.temperature) == math.inf:
            slot, size = groups.draw(number, uniform, are_different), groups.sizes(number)
            log_prob, fewest = -np.log(size).repeat(k), int(size.min())
        else:
            slots, size, log_probs = self._within(storage, number)
            place = np.empty(uniform.shape, np.int64)
            fewest = draw_weighted(log_probs, size, uniform, are_different, place)
            slot, log_prob = slots[place], log_probs[place.reshape(-1)]
        if fewest < k and self.replacement is False:
            raise ArgumentError(
                f"samples_per_group={k} exceeds the {fewest} rows of positive weight of a "
                "group, and replacement is False"
            )
        return torch.from_numpy(slot.reshape(-1)), torch.from_numpy(log_prob)

    def load_loops(self) -> None:
        """Compile the loops of draws, or read them from disk, before the first draw."""
        super().load_loops()
        groups, one = GroupedSlots(2, 1), np.zeros(1, np.int64)
        groups.put(np.arange(2), np.zeros((2, 1), np.int64))
        groups.members(one)
        groups.draw(one, np.zeros((1, 1)), True)
        if self.temperature < math.inf:
            log_prob, size = np.zeros(2), np.array([2])
            normalise(log_prob, size)
            draw_weighted(log_prob, size, np.zeros((1, 1)), True, np.zeros((1, 1), np.int64))

    # Following the storage.

    def _values(
        self, storage: Storage, slot: Int64[Tensor, "m"], within: bool = False
    ) -> Float64[np.ndarray, "m"]:
        column = self._within_column if within and self._within_column else self._column
        values = column.values(storage)
        some: np.ndarray = values[slot.to(values.device)].cpu().to(torch.float64).numpy()
        if np.isnan(some).any():
            raise NaNError(f"the storage holds NaN under {column.key!r}: expected numbers or -inf")
        return some

    def _follow(self, storage: Storage) -> Weights:
        groups, distribution, stored = self._groups, self._distribution, length_of(storage)
        rows = None if groups is None else self._column.changed(storage)
        if groups is None or rows is None or stored < self._stored:
            self._column.changed(storage)
            self._features.register_storage(storage)
            columns, slot = read_stored(self._features, storage), np.arange(stored)
            groups = self._groups = GroupedSlots(storage.max_size, columns.shape[1])
            distribution = self._distribution = Weights(groups.capacity)
        elif rows.shape[0]:
            rows = rows.unique()
            slot = rows.numpy()
            columns = on_host(self._features(storage.get(rows)))[0].numpy()
        else:
            assert isinstance(distribution, Weights)
            return distribution
        assert isinstance(distribution, Weights)
        former, changed = groups.put(slot, columns)
        self._stored = stored
        # A group is drawn by the weight of its lowest slot, which the others do not have.
        members, size = groups.members(changed), groups.sizes(changed)
        weight = self._weight_of(storage, members, size)
        if self._least > 1:
            weight = np.where(
                self._n_drawn_of(storage, members, size) < self._least, -np.inf, weight
            )
        distribution.update(*_weights(former, -np.inf))
        distribution.update(*_weights(groups.first(changed), weight))
        return distribution

    def _n_drawn_of(
        self, storage: Storage, slot: Int64[np.ndarray, "m"], size: Int64[np.ndarray, "g"]
    ) -> Int64[np.ndarray, "g"]:
        """Return how many rows of each group have positive weight; where none has, all count."""
        if abs(self.temperature) == math.inf or not len(size):
            return size
        values = self._values(storage, torch.from_numpy(slot), within=True)
        n = _n_positive(size, values / self.temperature)
        return np.where(n == 0, size, n)

    def _weight_of(
        self, storage: Storage, slot: Int64[np.ndarray, "m"], size: Int64[np.ndarray, "g"]
    ) -> Float64[np.ndarray, "g"]:
        """Return the log-weights of groups, given the slots and the size of each."""
        if self.weight in ("uniform", "size"):
            return np.log(size) if self.weight == "size" else np.zeros(len(size))
        values, start = self._values(storage, torch.from_numpy(slot)), size.cumsum() - size
        best = np.maximum.reduceat(values, start)
        if self.weight == "best":
            return best
        if self.weight == "variance" and not np.isfinite(values).all():
            raise ArgumentError("weight='variance' needs finite keys, got infinite ones")
        with np.errstate(invalid="ignore"):  # of infinite keys, which a callable may ignore
            mean = np.add.reduceat(values, start) / size
            square = np.square(values - mean.repeat(size))
        is_equal = np.minimum.reduceat(values, start) == best  # whose variance may round above 0
        variance = np.where(is_equal, 0.0, np.add.reduceat(square, start) / size)
        if not callable(self.weight):
            with np.errstate(divide="ignore"):
                return np.log(variance)
        statistics = GroupStatistics(*map(torch.from_numpy, (size, mean, variance, best)))
        weight = _weights_of(self.weight, statistics)
        if weight.isnan().any():
            raise ArgumentError(f"weight must return {len(size)} numbers, got {weight!r:.80}")
        return weight.to(torch.float64).cpu().numpy()

    def _log_weight(self, value: Tensor) -> Tensor:
        return value

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return what it draws by, and the temperature."""
        within = None if self.within is None else str(self.within)
        names = {"group": name_of(self.group), "weight": name_of(self.weight)}
        return {**super().state_dict(), **names, "within": within, "small": self.small}

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        # Earlier versions did not save these.
        own = self.state_dict()
        added = {name: own[name] for name in ("weight", "small", "within")}
        super()._check_state({**added, **state_dict})

    def _empty(self) -> None:
        self._groups = self._distribution = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is read from the storage again."""
        return {**super().__getstate__(), "_groups": None}


def _weights_of(weight: Callable[[GroupStatistics], Tensor], groups: GroupStatistics) -> Tensor:
    """Return what a callable makes of groups, a number for each."""
    found, n = weight(groups), len(groups.size)
    if not isinstance(found, Tensor) or found.shape != (n,):
        raise ArgumentError(f"weight must return {n} numbers, got {shown(found)}")
    return found


def _require_weights(weight: Callable[[GroupStatistics], Tensor]) -> None:
    """Raise unless a callable takes the statistics of groups and returns a number for each."""
    number = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    groups = GroupStatistics(torch.tensor([1, 2, 4]), number, number * (1 - number), number)
    try:
        _weights_of(weight, groups)
    except ArgumentError:
        raise
    except Exception as error:  # of the user's code
        raise ArgumentError(
            f"weight must be a callable of one GroupStatistics ({', '.join(groups._fields)}), it "
            f"raised {type(error).__name__}: {shown(str(error))}"
        ) from error


def _n_positive(
    size: Int64[np.ndarray, "g"], log_prob: Float64[np.ndarray, "m"]
) -> Int64[np.ndarray, "g"]:
    """Return how many rows of each group can be drawn."""
    return np.add.reduceat(log_prob > -np.inf, size.cumsum() - size, dtype=np.int64)


def _weights(slot: Int64[np.ndarray, "m"], weight: Any) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(slot), torch.from_numpy(np.broadcast_to(weight, slot.shape).copy())
