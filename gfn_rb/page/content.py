"""Numbers and words that a page shows of a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer

from gfn_rb.buffers import summary as stored
from gfn_rb.buffers.compact import compact_rows_of
from gfn_rb.codec.primitives import one_line
from gfn_rb.envs import GFNEnv
from gfn_rb.errors import ArgumentError, GfnRbError
from gfn_rb.numerics.flat import flat_rows
from gfn_rb.page.logos import Logo, read_logos
from gfn_rb.shapes import Float, Float64, Int64, Shaped
from gfn_rb.writers.features import Features

FeatureSource: TypeAlias = NestedKey | Callable[[TensorDictBase], Tensor] | None

MAX_ROWS = 20_000  # shown one by one
_MAX_COLUMNS = 4096  # of objects as numbers
_BATCH_SIZE = 64  # of a buffer that has none of its own
_WIDTH = 200  # characters of an object
_LEAST_KEPT = 0.2  # of the variance of features, by a map that is shown


class NothingKeptError(GfnRbError):
    """A map of some features would keep next to nothing of their distances."""


@dataclass
class BufferContent:
    """The rows of a buffer.

    Attributes:
        columns: numbers of each row.
        summary: what the buffer holds and draws.
        row: rows shown one by one, those of lowest reward first.
        batch_size: number of rows of a batch.
        draws: probability of each row to be in a batch, drawn with replacement; None if unknown.
        words: the objects of the rows shown.
        modes: number of modes that they reach, in words.
        position, axes: their places on the map and the names of its axes; None if there is no map.
        logos: letters of the best objects by place, if the objects are sequences of one length.
        notes: what could not be shown and why, by the part of the page that lacks it.
    """

    columns: stored.RowColumns
    summary: stored.BufferSummary
    row: Int64[Tensor, "m"]
    batch_size: int
    draws: Float64[Tensor, "n"] | None = None
    words: list[str] = field(default_factory=list)
    modes: str = ""
    position: Float64[Tensor, "m 2"] | None = None
    axes: tuple[str, str] = ("", "")
    logos: dict[str, Logo] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def reward_key(self) -> str:
        """What rows are ranked by."""
        return stored.shown_name(self.columns.key)

    @property
    def reward_title(self) -> str:
        """The heading of the numbers that rows are ranked by; their unit where it is known."""
        return "log R, nats" if stored.is_log_reward(self.columns.key) else self.reward_key

    @property
    def reward_axis(self) -> str:
        """The label of an axis of these numbers."""
        known = stored.is_log_reward(self.columns.key)
        return "log-reward log R(x), nats" if known else self.reward_key


def read_content(
    rb: ReplayBuffer,
    env: GFNEnv | None = None,
    describe: stored.Describe | None = None,
    features: FeatureSource = None,
    batch_size: int | None = None,
    named: NestedKey | None = None,
    key: NestedKey | None = None,
) -> BufferContent:
    """Return what a page shows of a buffer, see :func:`gfn_rb.view`. What fails becomes a note."""
    read = None if features is None else Features(features)
    words = stored.as_describe(env if describe is None else describe)
    with stored.locked(rb) as members:
        columns = stored.read_columns(rb, members, named, key)
        n, number = sum(len(each.storage) for each in members), columns.object_number
        whole = torch.arange(n) if number is None else (number >= 0).nonzero()[:, 0]
        ranked = torch.zeros(n) if columns.log_reward is None else columns.log_reward
        row = whole[shown_rows(ranked[whole], MAX_ROWS)]
        summary = stored.summarized(columns, members, row[:0], [])
        content = BufferContent(columns, summary, row, batch_size or rb.batch_size or _BATCH_SIZE)
        if not n:
            return content
        objects = None
        if number is not None:
            objects = stored.objects_at(members, row, columns.key, named)[0]
        with _noted(content, "map"):
            x = _features(members, row, objects, env, read)
            try:
                content.position, content.axes = plane(x.cpu())
            except NothingKeptError as error:
                content.notes["kept"] = f"No map: {error}."
    if columns.log_prob is not None:
        missed = torch.log1p(-columns.log_prob.exp()) * content.batch_size
        content.draws = -missed.expm1()
    if len(row) < len(whole):
        content.notes["rows"] = (
            f"{len(row):,} of {len(whole):,} rows are shown one by one: the best, and a random "
            "part of the others. Shares and means are of all rows."
        )
    if objects is None:
        content.words = [f"row {i}" for i in row.tolist()]
        if columns.entries:
            names = ", ".join(map(stored.shown_name, columns.entries))
            content.notes["objects"] = (
                f"Objects are not known: view(..., objects=...) names their entry, of {names}"
            )
        return content
    with _noted(content, "words"):
        content.words = stored.words_of(words, objects)
    if columns.log_reward is not None:
        with _noted(content, "letters"):
            content.logos = read_logos(content.words, env, words)
    content.words = [
        each if len(each) <= _WIDTH else f"{each[: _WIDTH - 3]}..."
        for each in content.words or stored.default_words(objects)
    ]
    if env is not None and env.n_modes != 0 and isinstance(objects, Tensor):
        with _noted(content, "modes"):
            reward = ranked[row].float().to(objects.device)
            n_modes = len(env.modes_reached(objects, reward).unique())
            content.modes = f"{n_modes:,} of {env.n_modes:,}" if env.n_modes else f"{n_modes:,}"
    return content


@contextmanager
def _noted(content: BufferContent, part: str) -> Iterator[None]:
    """Note why a part of a page cannot be shown, so that the other parts still are."""
    try:
        yield
    except Exception as error:  # perhaps of the user's code
        content.notes[part] = f"No {part}: {one_line(error)}"


def shown_rows(log_reward: Float[Tensor, "n"], most: int) -> Int64[Tensor, "m"]:
    """Return the rows shown one by one, lowest reward first.

    Of more than ``most`` rows, half of those shown are the best, and the others a random draw, the
    same each time.
    """
    order = log_reward.argsort(stable=True)
    if len(order) > most:
        rest, best = order[: -(most // 2)], order[-(most // 2) :]
        drawn = torch.randperm(len(rest), generator=torch.Generator().manual_seed(0))
        order = torch.cat([rest[drawn[: most - most // 2].sort().values], best])
    return order


def _features(
    members: Sequence[ReplayBuffer],
    row: Int64[Tensor, "m"],
    objects: Any,
    env: GFNEnv | None,
    read: Features | None,
) -> Shaped[Tensor, "m d"]:
    """Return the features of rows: the user's, else a writer's, else of environment or objects."""
    own = getattr(members[0].writer, "features", None)
    if read is None and own is not None and len(members) == 1 and not compact_rows_of(members[0]):
        read = Features(own)
    if read is not None:
        found = [
            (at, read(stored.whole_rows(rb, slot)))
            for rb, at, slot in stored.slots_of(members, row)
        ]
        at, x = (torch.cat(each) for each in zip(*found, strict=True))
        return x[at.argsort()]
    if objects is None:
        raise ArgumentError("features must be given for rows without objects")
    if env is not None and isinstance(objects, Tensor) and objects[:1].numel() > 2:
        return env.encode(objects)
    return columns_of(objects)


def columns_of(objects: Any) -> Shaped[Tensor, "n d"]:
    """Return objects as numbers: states, those of few integers one-hot, or counts of letters."""
    if isinstance(objects, Tensor):
        flat = flat_rows(objects)
        if flat.is_floating_point() or flat.shape[1] <= 2:
            return flat
        value = flat.unique()
        is_narrow = len(value) * flat.shape[1] <= _MAX_COLUMNS
        return (flat[:, :, None] == value).flatten(1) if is_narrow else flat
    codes = [
        torch.tensor([*map(ord, each)]) if isinstance(each, str) else each.flatten().cpu()
        for each in objects
    ]
    value, code = torch.cat(codes).unique(return_inverse=True)
    row = torch.arange(len(codes)).repeat_interleave(torch.tensor([*map(len, codes)]))
    width = min(len(value), _MAX_COLUMNS)  # beyond, several letters share a column
    counts = torch.zeros(len(codes), width)
    return counts.index_put_((row, code % width), torch.ones(()), accumulate=True)


def plane(x: Shaped[Tensor, "n d"]) -> tuple[Float64[Tensor, "n 2"], tuple[str, str]]:
    """Return the first two principal components of features, or one or two features themselves.

    The second value names the axes.

    Raises:
        NothingKeptError: the components keep next to nothing of the distances.
    """
    x = x.double()
    if x.shape[1] <= 2:
        return torch.nn.functional.pad(x, (0, 2 - x.shape[1])), ("feature 1", "feature 2")
    x = x - x.mean(0)
    with torch.random.fork_rng(devices=[]):  # the method is random, and its seed is fixed
        torch.manual_seed(0)
        _, size, vector = torch.pca_lowrank(x, min(*x.shape, 8), center=False)
    position = x @ vector[:, :2]
    if position.shape[1] < 2:  # of a single row
        return torch.nn.functional.pad(position, (0, 1)), ("component 1", "component 2")
    share = size[:2].square() / x.square().sum().clamp(min=1e-300)
    if (kept := float(share.sum())) < _LEAST_KEPT and bool(x.any()):
        raise NothingKeptError(
            f"two components keep {kept:.0%} of the variance of the features, so that distances on "
            "a map would say nothing; features= names others"
        )
    first, second = (f"component {i + 1} ({share[i]:.0%} of the variance)" for i in range(2))
    return position, (first, second)
