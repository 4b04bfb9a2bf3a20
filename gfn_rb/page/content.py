"""What a page shows of a buffer, as numbers and words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer

from gfn_rb.buffers.compact import compact_rows_of
from gfn_rb.buffers.summary import (
    BufferSummary,
    Describe,
    RowColumns,
    as_describe,
    default_words,
    locked,
    objects_at,
    read_columns,
    slots_of,
    summarized,
    whole_rows,
    words_of,
)
from gfn_rb.codec.primitives import one_line
from gfn_rb.envs import GFNEnv
from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.flat import flat_rows
from gfn_rb.shapes import Bool, Float, Float64, Int64, Shaped
from gfn_rb.writers.features import Features

FeatureSource: TypeAlias = NestedKey | Callable[[TensorDictBase], Tensor] | None

MAX_ROWS = 20_000  # shown one by one
YOUNG = 50  # policy versions
_MAX_COLUMNS = 4096  # of one-hot states
_BATCH_SIZE = 64  # of a buffer that has none of its own
_NEWTON_STEPS = 50
_WIDTH = 200  # characters of an object


@dataclass
class Content:
    """The rows of a buffer.

    Attributes:
        columns: numbers of each row.
        summary: what the buffer holds and draws.
        row: numbers of the rows shown one by one, those of lowest reward first.
        batch_size: number of rows of a batch.
        draws: expected number of draws of each row in a batch; None if it is unknown.
        words: the objects of the rows shown, in words.
        is_mode: whether each of them reaches a mode; None if no modes are defined.
        modes: number of modes that they reach, of all if that is known, in words.
        position: their places on the map; None if there is no map.
        axes: names of the axes of the map.
        limit: which rows are not shown one by one, in words.
        notes: what could not be shown and why, by the part of the page that lacks it.
    """

    columns: RowColumns
    summary: BufferSummary
    row: Int64[Tensor, "m"]
    batch_size: int
    draws: Float64[Tensor, "n"] | None
    words: list[str] = field(default_factory=list)
    is_mode: Bool[Tensor, "m"] | None = None
    modes: str = ""
    position: Float64[Tensor, "m 2"] | None = None
    axes: tuple[str, str] = ("", "")
    limit: str = ""
    notes: dict[str, str] = field(default_factory=dict)


def read_content(
    rb: ReplayBuffer,
    env: GFNEnv | None = None,
    describe: Describe | None = None,
    features: FeatureSource = None,
    batch_size: int | None = None,
) -> Content:
    """Return what a page shows of a buffer, which is not changed. What fails becomes a note.

    Args:
        rb: the buffer.
        env: environment of its rows.
        describe: callable from objects to words, instead of that of ``env``.
        features: what the map is made of, see :func:`gfn_rb.view`.
        batch_size: number of rows of a batch. Default: that of the buffer, else 64.
    """
    read = None if features is None else Features(features)
    words = as_describe(env if describe is None else describe)
    batch_size = batch_size or rb.batch_size or _BATCH_SIZE
    with locked(rb) as members:
        columns = read_columns(rb, members)
        n, number = sum(len(each.storage) for each in members), columns.object_number
        whole = torch.arange(n) if number is None else (number >= 0).nonzero()[:, 0]
        ranked = torch.zeros(n) if columns.log_reward is None else columns.log_reward
        row = whole[shown_rows(ranked[whole], MAX_ROWS)]
        draws = None
        if columns.log_prob is not None:
            is_distinct = getattr(rb.sampler, "replacement", True) is not True
            draws = draws_per_batch(columns.log_prob.exp(), batch_size, is_distinct)
        summary = summarized(columns, members, row[:0], [])
        content = Content(columns, summary, row, batch_size, draws)
        if not n:
            return content
        objects = None if number is None else objects_at(members, row)
        with _noted(content.notes, "map"):
            x = _features(members, row, objects, env, read)
            content.position, content.axes = plane(x.cpu())
    if len(row) < len(whole):
        content.limit = (
            f"{len(row):,} of {len(whole):,} rows are shown one by one: the best, and a random "
            "part of the others. Shares and means are of all rows."
        )
    if objects is None:
        content.words = [f"row {i}" for i in row.tolist()]
        return content
    content.words, failure = words_for(words, objects)
    content.words = [
        each if len(each) <= _WIDTH else f"{each[: _WIDTH - 3]}..." for each in content.words
    ]
    content.notes |= {"words": failure} if failure else {}
    if env is not None and env.n_modes != 0 and isinstance(objects, Tensor):
        with _noted(content.notes, "modes"):
            reward = ranked[row].float()
            content.is_mode = which_reach_modes(env, objects, reward)
            n_modes = len(env.modes_reached(objects, reward).unique())
            content.modes = f"{n_modes:,} of {env.n_modes:,}" if env.n_modes else f"{n_modes:,}"
    return content


@contextmanager
def _noted(notes: dict[str, str], part: str) -> Iterator[None]:
    """Note why a part of a page cannot be shown, so that the other parts still are."""
    try:
        yield
    except Exception as error:  # perhaps of the user's code
        notes[part] = f"No {part}: {one_line(error)}"


def shown_rows(log_reward: Float[Tensor, "n"], most: int) -> Int64[Tensor, "m"]:
    """Return the rows shown one by one, lowest reward first: all, or the best and some others.

    Args:
        log_reward: log R of all rows, nats.
        most: number of rows; half of them are the best, the others a fixed random draw of the rest.
    """
    order = log_reward.argsort(stable=True)
    if len(order) > most:
        rest, best = order[: -(most // 2)], order[-(most // 2) :]
        drawn = torch.randperm(len(rest), generator=torch.Generator().manual_seed(0))
        order = torch.cat([rest[drawn[: most - most // 2].sort().values], best])
    return order


def draws_per_batch(
    p: Float64[Tensor, "n"], batch_size: int, is_distinct: bool
) -> Float64[Tensor, "n"]:
    """Return the expected number of draws of each row in a batch.

    A batch of distinct rows contains row i with a probability of about 1 - exp(-t p_i), where t
    makes the sum the size of the batch (Rosen 1972, successive sampling).

    Args:
        p: probability of each row in a single draw.
        batch_size: number of rows of a batch.
        is_distinct: whether rows are drawn without replacement where there are enough.
    """
    if not is_distinct or batch_size >= int((p > 0).sum()):
        return p * batch_size
    t = float(batch_size)
    for _ in range(_NEWTON_STEPS):  # from below, to the root of a concave function
        missed = (-t * p).exp()
        t += float((batch_size - (1 - missed).sum()) / (p * missed).sum())
    return 1 - (-t * p).exp()


def words_for(describe: Describe, objects: Any) -> tuple[list[str], str]:
    """Return objects in words, and a note if some could not be described: those show numbers."""
    try:
        return words_of(describe, objects), ""
    except ArgumentError as error:
        first_error = error
    words, n_failed = [], 0
    for i in range(len(objects)):
        one = objects[i : i + 1]
        try:
            words += words_of(describe, one)
        except ArgumentError as error:
            first_error, n_failed = first_error if n_failed else error, n_failed + 1
            words += default_words(one)
    return words, f"{n_failed:,} of {len(objects):,} rows show numbers: {first_error}"


def which_reach_modes(
    env: GFNEnv, state: Shaped[Tensor, "n *S"], log_reward: Float[Tensor, "n"]
) -> Bool[Tensor, "n"]:
    """Return which terminating states reach a mode, by halves: environments tell it of a batch."""
    if not len(env.modes_reached(state, log_reward)):
        return torch.zeros(len(state), dtype=torch.bool)
    if len(state) == 1:
        return torch.ones(1, dtype=torch.bool)
    middle = len(state) // 2
    halves = slice(None, middle), slice(middle, None)
    return torch.cat([which_reach_modes(env, state[half], log_reward[half]) for half in halves])


def _features(
    members: Sequence[ReplayBuffer],
    row: Int64[Tensor, "m"],
    objects: Any,
    env: GFNEnv | None,
    read: Features | None,
) -> Shaped[Tensor, "m d"]:
    """Return the features of rows: a user's, those of a writer, an environment or the objects."""
    own = getattr(members[0].writer, "features", None)
    if read is None and own is not None and len(members) == 1 and not compact_rows_of(members[0]):
        read = Features(own)
    if read is not None:
        parts = [(at, read.of(whole_rows(rb, slot))) for rb, at, slot in slots_of(members, row)]
        return torch.cat([x for _, x in parts])[torch.cat([at for at, _ in parts]).argsort()]
    if objects is None:
        raise ArgumentError("features must be given for rows without objects")
    if env is not None and isinstance(objects, Tensor) and objects[:1].numel() > 2:
        return env.encode(objects)
    return columns_of(objects)


def columns_of(objects: Any) -> Shaped[Tensor, "n d"]:
    """Return objects as numbers: states, those of few integers one-hot, or counts of letters."""
    if not isinstance(objects, Tensor):  # of several lengths
        codes = [torch.tensor([*map(ord, each)] if isinstance(each, str) else each.tolist())
                 for each in objects]  # fmt: skip
        value, code = torch.cat([each.flatten() for each in codes]).unique(return_inverse=True)
        length = torch.tensor([each.numel() for each in codes])
        counts = torch.zeros(len(codes), len(value[:_MAX_COLUMNS]))
        row = torch.arange(len(codes)).repeat_interleave(length)
        return counts.index_put_((row, code), torch.ones(()), accumulate=True)
    flat = flat_rows(objects)
    if flat.is_floating_point() or flat.shape[1] <= 2:
        return flat
    value = flat.unique()
    is_short = len(value) * flat.shape[1] <= _MAX_COLUMNS
    return (flat[:, :, None] == value).flatten(1) if is_short else flat


def plane(x: Shaped[Tensor, "n d"]) -> tuple[Float64[Tensor, "n 2"], tuple[str, str]]:
    """Return the first two principal components of features, and what to call them.

    One or two features are used as they are.
    """
    x = x.double()
    if x.shape[1] <= 2:
        return torch.nn.functional.pad(x, (0, 2 - x.shape[1])), ("feature 1", "feature 2")
    x = x - x.mean(0)
    with torch.random.fork_rng(devices=[]):  # the method is random, and its seed is fixed
        torch.manual_seed(0)
        _, size, vector = torch.pca_lowrank(x, min(*x.shape, 8), center=False)
    vector = vector[:, :2]
    sign = vector.gather(0, vector.abs().argmax(0, keepdim=True)).sign()
    share = size[:2].square() / x.square().sum().clamp(min=1e-300)
    first, second = (f"component {i + 1} ({share[i]:.0%} of the variance)" for i in range(2))
    return x @ (vector * sign), (first, second)
