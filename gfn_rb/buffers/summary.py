"""Summary of a buffer in numbers and words: what it holds, and what it draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer, ReplayBufferEnsemble

from gfn_rb import keys
from gfn_rb.arguments import as_count, kind_of, shown
from gfn_rb.buffers.compact import compact_rows_of
from gfn_rb.buffers.merged_sampler import log_probs_of
from gfn_rb.buffers.row_objects import object_entries, objects_of
from gfn_rb.buffers.state import held, with_members
from gfn_rb.containers.convert import padded_alike
from gfn_rb.errors import ArgumentError, EmptyBufferError, GfnRbError, KeyMismatchError
from gfn_rb.kernels.objects import Objects
from gfn_rb.numerics.flat import numbers_in_words
from gfn_rb.shapes import Float64, Int64
from gfn_rb.storages.column import KeyColumn
from gfn_rb.torchrl_compat import members_of
from gfn_rb.writers.cells import Cells

Describe: TypeAlias = Callable[[Any], Sequence[str]]

N_TOP = 100  # rows whose share of the draws a summary tells
_N_BEST = 5
_QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}
_WIDTH = 70  # characters of an object in a summary
_CHUNK = 4096  # rows read at a time
_REWARDS = keys.EPISODE_LOG_REWARD, keys.LOG_REWARD, keys.REWARD  # the first that rows have


class RowColumns(NamedTuple):
    """Numbers of each stored row; of a merged buffer, those of its members one after another.

    Args:
        log_reward: what rows are ranked by, usually log-rewards in nats; None if rows have none.
        age: number of policy versions since the row was made; None if rows have no
            ``policy_version``.
        log_prob: log-probability of the row in a single draw; None if the sampler cannot tell it.
        object_number: equal for rows of one object, from 0; -1 for rows that are no whole object,
            such as transitions before the last one; None if rows have no object.
        key: entry that rows are ranked by.
        entries: entries of which one may be the object, where rows do not tell which.
    """

    log_reward: Float64[Tensor, "n"] | None
    age: Int64[Tensor, "n"] | None
    log_prob: Float64[Tensor, "n"] | None
    object_number: Int64[Tensor, "n"] | None
    key: NestedKey = keys.LOG_REWARD
    entries: tuple[NestedKey, ...] = ()

    def best(self, k: int) -> Int64[Tensor, "m"]:
        """Return the best row of each of the k best objects, best first; none without rewards."""
        if self.log_reward is None or self.object_number is None:
            return torch.empty(0, dtype=torch.int64)
        whole = (self.object_number >= 0).nonzero()[:, 0]
        order = whole[self.log_reward[whole].argsort(descending=True, stable=True)]
        _, first = np.unique(self.object_number[order].numpy(), return_index=True)
        return order[torch.from_numpy(np.sort(first)[:k])]


@dataclass(frozen=True)
class BufferSummary:
    """A buffer in numbers, which ``str`` turns into at most 12 lines.

    Args:
        n_rows: number of stored rows.
        capacity: number of rows that the buffer can hold.
        log_rewards: lowest, lower quartile, median, upper quartile and highest log-reward of the
            rows in nats; None if rows have no rewards.
        n_objects: number of distinct objects; None if rows have no object.
        ages: lowest, median and highest age of the rows in policy versions; None if rows have no
            ``policy_version``.
        effective_rows: effective number of rows drawn, 1 / sum p^2, where p is the probability of
            a row in a single draw; None if the sampler cannot tell it.
        top_share: share of the draws that go to the 100 rows of highest reward, from 0 to 1.
        mean_draw_age: mean age of a drawn row in policy versions.
        best: the five best objects in words, each with its log-reward, best first.
        key: entry that rows are ranked by; numbers are in nats if it is a log-reward.
        entries: entries of which ``objects`` may name one, where rows do not tell their objects.
    """

    n_rows: int
    capacity: int
    log_rewards: tuple[float, ...] | None
    n_objects: int | None
    ages: tuple[int, ...] | None
    effective_rows: float | None
    top_share: float | None
    mean_draw_age: float | None
    best: tuple[tuple[str, float], ...]
    key: NestedKey = keys.LOG_REWARD
    entries: tuple[NestedKey, ...] = ()

    def __str__(self) -> str:
        values = {"rows": f"{self.n_rows:,} of {self.capacity:,}"}
        name = "log-reward" if is_log_reward(self.key) else shown_name(self.key)
        if self.log_rewards is None:
            values[name] = "none stored" if self.n_rows else "no rows yet"
        else:
            low, *quartiles, high = (f"{each:.4g}" for each in self.log_rewards)
            values[name] = f"{low} to {high}, quartiles {' '.join(quartiles)}"
        if self.n_objects is not None:
            values["distinct objects"] = f"{self.n_objects:,}"
        elif self.entries:
            of = ", ".join(map(shown_name, self.entries))
            values["objects"] = f"not known: summary(objects=...) names the entry, of {of:.70}"
        if self.ages is not None:
            low, median, high = (f"{each:,}" for each in self.ages)
            values["age"] = f"{low} to {high} policy versions, median {median}"
        if self.effective_rows is not None:
            share = self.effective_rows / self.n_rows
            values["effective rows drawn"] = f"{self.effective_rows:,.1f} ({share:.1%} of the rows)"
        if self.top_share is not None:
            values[f"draws of the best {N_TOP}"] = f"{self.top_share:.1%}"
        if self.mean_draw_age is not None:
            values["mean age of a draw"] = f"{self.mean_draw_age:,.1f} policy versions"
        lines = [f"{name:<22}{value}" for name, value in values.items()]
        for i, (words, log_reward) in enumerate(self.best):
            words = words if len(words) <= _WIDTH else f"{words[: _WIDTH - 3]}..."
            lines.append(f"{'' if i else 'best objects':<22}{log_reward:<10.4g}  {words}")
        return "\n".join(lines)


def is_log_reward(key: NestedKey) -> bool:
    """Return whether numbers under a key are log-rewards in nats."""
    return key in (keys.LOG_REWARD, keys.EPISODE_LOG_REWARD)


def shown_name(key: NestedKey) -> str:
    """Return a key as it is shown."""
    return keys.key_path(key)


def best_rows(rb: ReplayBuffer, k: int, key: NestedKey | None = None) -> TensorDictBase:
    """Return the k best rows of a buffer or a merged one, see ``GFNReplayBuffer.best``."""
    is_merged, parts = isinstance(rb, ReplayBufferEnsemble), []
    with locked(rb) as members:
        for number, member in enumerate(members):
            if not len(member.storage):
                continue
            if (value := ranks_of(member, key)) is None:
                raise KeyMismatchError(
                    f"rb must hold rewards for best, got rows without {key or _key(member)!r}: "
                    "best(key=...) names another entry of one number per row"
                )
            slot = value.argsort(descending=True, stable=True)[:k]
            rows = whole_rows(member, slot).exclude(keys.INDEX).set(keys.INDEX, slot)
            if is_merged:
                rows.set(keys.BUFFER_ID, torch.full_like(slot, number))
            parts.append((rows, value[slot]))
    if not parts:
        raise EmptyBufferError("rb must hold rows for best, got an empty buffer")
    order = torch.cat([value for _, value in parts]).argsort(descending=True, stable=True)[:k]
    return torch.cat(padded_alike([rows for rows, _ in parts]))[order]


def summarize(
    rb: ReplayBuffer,
    describe: Any = None,
    named: NestedKey | None = None,
    key: NestedKey | None = None,
) -> BufferSummary:
    """Return a summary of a buffer or a merged one, see ``GFNReplayBuffer.summary``."""
    words = as_describe(describe)
    with locked(rb) as members:
        columns = read_columns(rb, members, named, key)
        best = columns.best(_N_BEST)
        objects, conditions = objects_at(members, best, columns.key, named)
        texts = words_of(words, objects)
        if conditions:
            texts = [f"{name} under {each}" for name, each in zip(texts, conditions, strict=True)]
        return summarized(columns, members, best, texts)


def table_of(rb: ReplayBuffer, env: Any = None, k: int | None = None) -> dict[str, list[Any]]:
    """Return the objects of a buffer as columns; see :func:`gfn_rb.checkpoint.export_table`."""
    with locked(rb) as members:
        columns = read_columns(rb, members)
        n_rows = sum(len(each.storage) for each in members)
        best = columns.best(n_rows if k is None else as_count("k", k))
        objects, conditions = objects_at(members, best, columns.key)
        table: dict[str, list[Any]] = {"object": words_of(as_describe(env), objects)}
    if conditions:
        table[keys.CONDITION] = conditions
    key = keys.LOG_REWARD if is_log_reward(columns.key) else shown_name(columns.key)
    for name, column in ((key, columns.log_reward), ("age", columns.age)):
        if column is not None:
            table[name] = column[best].tolist()
    return table


def frame_of(rb: ReplayBuffer, env: Any = None, k: int | None = None) -> Any:
    """Return the objects of a buffer as a ``pandas.DataFrame``."""
    try:
        import pandas
    except ImportError as error:
        raise ArgumentError(f"to_pandas needs pandas (pip install pandas): {error}") from error
    return pandas.DataFrame(table_of(rb, env, k))


def summarized(
    columns: RowColumns,
    members: Sequence[ReplayBuffer],
    best: Int64[Tensor, "k"],
    words: Sequence[str],
) -> BufferSummary:
    """Return the summary of the rows of some buffers, whose best objects are given in words."""
    reward, age, log_prob, number, key, entries = columns
    p = None if log_prob is None else log_prob.exp()
    top = None if reward is None else reward.argsort(descending=True, stable=True)[:N_TOP]
    return BufferSummary(
        n_rows=sum(len(each.storage) for each in members),
        capacity=sum(each.storage.max_size for each in members),
        log_rewards=None if reward is None else quantiles(reward, *_QUANTILES.values()),
        n_objects=None if number is None else len(number[number >= 0].unique()),
        ages=None if age is None else (*map(int, quantiles(age.double(), 0.0, 0.5, 1.0)),),
        effective_rows=None if p is None else float(1 / p.square().sum()),
        top_share=None if p is None or top is None else float(p[top].sum()),
        mean_draw_age=None if p is None or age is None else float(p @ age.double()),
        best=tuple(zip(words, [] if reward is None else reward[best].tolist(), strict=True)),
        key=key,
        entries=entries,
    )


def read_columns(
    rb: ReplayBuffer,
    members: Sequence[ReplayBuffer],
    named: NestedKey | None = None,
    key: NestedKey | None = None,
) -> RowColumns:
    """Return the numbers of each row of a buffer, which is :func:`locked` and has these members.

    ``named`` is the entry that holds the objects, and ``key`` what rows are ranked by; None for
    those that rows tell.
    """
    held = [each for each in members if len(each.storage)]
    if not held:
        return RowColumns(None, None, None, None)
    try:
        log_prob = log_probs_of(rb.sampler, rb.storage).detach().cpu().double()
    except GfnRbError:  # of a sampler without a known law, or of rows that have no weight
        log_prob = None
    key = _key(held[0]) if key is None else key
    reward, age = _joined([ranks_of(each, key) for each in held]), _joined([*map(ages_of, held)])
    number, entries = _object_numbers(held, key, named), ()
    if number is None:
        entries = (*object_entries(whole_rows(held[0], torch.arange(1)), key),)
    return RowColumns(reward, age, log_prob, number, key, entries)


def numbers_of(rb: ReplayBuffer) -> dict[str, Float64[Tensor, "n"]]:
    """Return what the rows of a buffer are ranked by as "key", and their ages as "age".

    What rows do not have is left out, and so is all of an empty buffer.
    """
    known = {"key": ranks_of(rb), "age": ages_of(rb)} if len(rb.storage) else {}
    return {name: value.double() for name, value in known.items() if value is not None}


def archive_of(rb: ReplayBuffer, cells: Cells) -> dict[str, float]:
    """Return the share of cells that hold a row, and the sum of the highest key of each cell."""
    best = torch.full((cells.n_cells,), -math.inf, dtype=torch.float64)
    known = numbers_of(rb).get("key")
    if known is None:
        return {"coverage": 0.0, "qd_score": 0.0}
    for index in torch.arange(len(known)).split(_CHUNK):
        number = cells(whole_rows(rb, index)).cpu()
        best.scatter_reduce_(0, number, known[index].cpu(), "amax")
    held = best[best > -math.inf]
    score = float((held - cells.offset).sum())
    return {"coverage": len(held) / cells.n_cells, "qd_score": score}


def quantiles_of(rb: ReplayBuffer) -> dict[str, float]:
    """Return quantiles of what :func:`numbers_of` returns, by name."""
    return {
        f"{what}_{name}": value
        for what, numbers in numbers_of(rb).items()
        for name, value in zip(_QUANTILES, quantiles(numbers, *_QUANTILES.values()), strict=True)
    }


def slots_of(
    members: Sequence[ReplayBuffer], index: Int64[Tensor, "m"]
) -> Iterator[tuple[ReplayBuffer, Int64[Tensor, "k"], Int64[Tensor, "k"]]]:
    """Yield members, positions of their rows among those of an index of all rows, and slots."""
    start = 0
    for member in members:
        at = ((index >= start) & (index < start + len(member.storage))).nonzero()[:, 0]
        if len(at):
            yield member, at, index[at] - start
        start += len(member.storage)


def objects_at(
    members: Sequence[ReplayBuffer],
    index: Int64[Tensor, "m"],
    key: NestedKey,
    named: NestedKey | None = None,
) -> tuple[Any, list[str]]:
    """Return the objects of some rows of ``RowColumns``, a tensor or a list, and their conditions.

    Conditions are texts of numbers, and none unless all rows have one.
    """
    found: dict[int, Any] = {}
    conditions: dict[int, str] = {}
    for member, at, slot in slots_of(members, index):
        rows = whole_rows(member, slot)
        objects, condition = objects_of(rows, key, named), rows.get(keys.CONDITION, None)
        found |= zip(at.tolist(), [] if objects is None else objects[0], strict=True)
        if isinstance(condition, Tensor):
            conditions |= zip(at.tolist(), numbers_in_words(condition), strict=True)
    listed = [found[i] for i in range(len(index))]
    named = [conditions[i] for i in sorted(conditions)] if len(conditions) == len(index) else []
    shapes = {each.shape if isinstance(each, Tensor) else None for each in listed}
    return torch.stack(listed) if len(shapes) == 1 and None not in shapes else listed, named


def as_describe(describe: Any) -> Describe:
    """Return a callable from objects to texts, such as the method of an environment."""
    if describe is None:
        return default_words
    words = getattr(describe, "describe", describe)  # environments are callable, too
    if not callable(words) or isinstance(describe, type):
        raise ArgumentError(
            "describe must be an environment or a callable from states to a text for each, got "
            f"{kind_of(describe)}"
        )
    return words  # type: ignore[no-any-return]


def words_of(describe: Describe, objects: Any) -> list[str]:
    """Return the text of each object, on one line; raise unless the callable returns as many."""
    try:
        words = [*describe(objects)] if len(objects) else []
    except Exception as error:  # of a user's code
        raise ArgumentError(
            f"describe must return a text for each state, it raised {type(error).__name__}: "
            f"{shown(str(error))}"
        ) from error
    if len(words) != len(objects) or not all(isinstance(each, str) for each in words):
        raise ArgumentError(
            f"describe must return a text for each of {len(objects)} states, got {shown(words)}"
        )
    return [" ".join(each.split()) for each in words]


def default_words(objects: Any) -> list[str]:
    """Return objects as their numbers or their text."""
    if isinstance(objects, Tensor):
        return numbers_in_words(objects)
    return [
        numbers_in_words(each[None])[0] if isinstance(each, Tensor) else str(each)
        for each in objects
    ]


@contextmanager
def locked(rb: ReplayBuffer) -> Iterator[list[ReplayBuffer]]:
    """Keep others from writing; yield the members of a merged buffer, or the buffer alone."""
    with held(with_members(rb), captures=False):
        yield [*members_of(rb)] or [rb]


# What rows hold.


def _key(rb: ReplayBuffer) -> NestedKey:
    """Return the key that rows are ranked by."""
    key = getattr(rb.writer, "key", None)
    if key not in (None, keys.INDEX):
        return key
    return next((key for key in _REWARDS if _column(rb, key) is not None), keys.LOG_REWARD)


def _column(rb: ReplayBuffer, key: NestedKey) -> Tensor | None:
    try:
        return KeyColumn(key).values(rb.storage).detach().cpu().clone()
    except GfnRbError:  # rows have no such number
        return None


def ranks_of(rb: ReplayBuffer, key: NestedKey | None = None) -> Float64[Tensor, "n"] | None:
    """Return what the rows of a buffer are ranked by, on the host; None if they have no key."""
    value = _column(rb, _key(rb) if key is None else key)
    return None if value is None else value.double().nan_to_num(-torch.inf, torch.inf, -torch.inf)


def ages_of(rb: ReplayBuffer) -> Int64[Tensor, "n"] | None:
    """Return the ages of rows in policy versions, on the host; None if they have no version."""
    version, statistics = _column(rb, keys.POLICY_VERSION), getattr(rb, "statistics", None)
    if version is None:
        return None
    newest = version.max() if statistics is None else max(version.max(), statistics.newest.cpu())
    return newest - version.long()


def whole_rows(rb: ReplayBuffer, index: Int64[Tensor, "m"]) -> TensorDictBase:
    """Return stored rows as they were added; rows of several lengths are padded."""
    rows, compact = rb.storage.get(index), compact_rows_of(rb)
    if getattr(rb, "use_limit", None) is not None:  # or the entry is the user's
        rows = rows.exclude(keys.N_USES)
    return rows if compact is None else compact(rows)


def _object_numbers(
    members: Sequence[ReplayBuffer], key: NestedKey, named: NestedKey | None
) -> Tensor | None:
    """Return a number for each distinct object, -1 for rows that are no whole object: int64 [n]."""
    parts = []
    for rb in members:
        for index in torch.arange(len(rb.storage)).split(_CHUNK):
            try:
                found = objects_of(whole_rows(rb, index), key, named)
            except GfnRbError:  # rows of no known kind
                if named is not None:
                    raise
                return None
            if found is None:
                return None
            _, whole, columns = found
            is_whole = torch.ones(len(index), dtype=torch.bool) if whole is None else whole.cpu()
            parts.append((columns.cpu(), is_whole))
    if len({columns.shape[1] for columns, _ in parts}) > 1:
        return None
    columns, is_whole = (torch.cat(each) for each in zip(*parts, strict=True))
    index = Objects(1, columns.shape[1])
    number = torch.from_numpy(index.twins(index.hashed(columns.numpy())))
    return number.where(is_whole, -1)


def _joined(columns: Sequence[Tensor | None]) -> Tensor | None:
    known = [each for each in columns if each is not None]
    return torch.cat(known) if len(known) == len(columns) else None


def quantiles(value: Float64[Tensor, "n"], *shares: float) -> tuple[float, ...]:
    """Return quantiles that are values themselves: torch's own stop at 16 million."""
    ordered = value.sort().values
    return tuple(float(ordered[round(share * (len(ordered) - 1))]) for share in shares)
