"""Replay buffers ready for use.

Each preset is a ``TensorDictReplayBuffer`` that :func:`build` makes from a storage, a writer, a
sampler and transforms; whatever it cannot be asked for is built from the same parts by hand.

All presets take the options of :func:`build`: ``storage``, ``device``, ``compact`` and ``env``,
``transform``, ``batch_size``, ``prefetch``, ``generator``, ``shared``, ... They raise an
``ArgumentError`` where an option breaks its rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer
from torchrl.envs.transforms import Compose, Transform

from gfn_rb.arguments import as_count, as_device, require_flag, require_kind
from gfn_rb.buffers.compact import CompactRows, StateForm
from gfn_rb.buffers.environment import Environment
from gfn_rb.buffers.rate_limiter import RateLimiter
from gfn_rb.buffers.tracked import TrackedReplayBuffer
from gfn_rb.buffers.transforms import (
    KeepItems,
    KeepStates,
    KeepTerminatingStates,
    KeepTransitions,
)
from gfn_rb.errors import ArgumentError
from gfn_rb.keys import EPISODE_LOG_REWARD, ESTIMATOR_OUTPUT, INDEX, LOG_PROB, LOG_REWARD
from gfn_rb.samplers import SoftmaxRewardSampler
from gfn_rb.samplers.base import Replacement
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter
from gfn_rb.writers.diversity import Near, When
from gfn_rb.writers.features import Unique
from gfn_rb.writers.fifo import UniqueFIFOWriter
from gfn_rb.writers.reward import OnDuplicate, Tie

_STALE = (LOG_PROB, ESTIMATOR_OUTPUT)


def reward_prioritized_buffer(
    capacity: int,
    *,
    key: NestedKey = LOG_REWARD,
    tie: Tie = "newest",
    unique: Unique = None,
    on_duplicate: OnDuplicate = "refresh",
    temperature: float = 1.0,
    replacement: Replacement = "auto",
    writer: Writer | None = None,
    sampler: Sampler | None = None,
    max_length: int | None = None,
    keep: Sequence[str] = (),
    **options: Any,
) -> TensorDictReplayBuffer:
    """Return a buffer that keeps the best items and draws them by reward.

    Torchgfn's ``ReplayBuffer(prioritized_capacity=True, prioritized_sampling=True)``.

    Args:
        capacity: the number of items kept.
        key: what items are ranked and drawn by, one float per item.
        tie: which of equal items are kept, see :class:`~gfn_rb.RewardPrioritizedWriter`.
        unique: "state" to keep one row per object, likewise; None for any rows.
        on_duplicate: likewise.
        temperature: see :class:`~gfn_rb.SoftmaxRewardSampler`.
        replacement: likewise.
        writer: another writer instead; ``tie``, ``unique`` and ``on_duplicate`` then mean nothing.
        sampler: another sampler instead; ``temperature`` and ``replacement`` then mean nothing.
        max_length: pad trajectories to this many actions; needed where their lengths differ
            from batch to batch.
        keep: which of ``log_prob`` and ``estimator_output`` to store. The policy that made them
            moves on, so by default they are dropped on insertion.
        **options: see :func:`build`.
    """
    if sampler is None:
        sampler = SoftmaxRewardSampler(key, temperature, replacement)
    if writer is None:
        writer = RewardPrioritizedWriter(key, tie, unique, on_duplicate)
    return build(capacity, writer, sampler, [KeepItems(stale_entries(keep), max_length)], **options)


def diverse_buffer(
    capacity: int,
    *,
    key: NestedKey = LOG_REWARD,
    features: NestedKey | Callable[[TensorDictBase], Tensor] | None = None,
    cutoff_distance: float | int = 0.0,
    p: float | int = 1.0,
    near: Near = "replace",
    when: When = "always",
    tie: Tie = "newest",
    temperature: float = 1.0,
    replacement: Replacement = "auto",
    sampler: Sampler | None = None,
    max_length: int | None = None,
    keep: Sequence[str] = (),
    **options: Any,
) -> TensorDictReplayBuffer:
    """Return a buffer that keeps the best items that are far apart and draws them by reward.

    Torchgfn's ``NormBasedDiversePrioritizedReplayBuffer`` is ``near="reject", when="full"``.

    Args:
        capacity: the number of items kept.
        key: what items are ranked and drawn by, one float per item.
        features: see :class:`~gfn_rb.DiversityWriter`, as for the next five.
        cutoff_distance: items this close or closer do not stand beside each other.
        p: of the norm; 0 counts the features that differ.
        near: whether a better item shall "replace" those near it, or "reject" it like any other.
        when: whether to compare "always", or only batches that find the storage "full".
        tie: which of equal items are kept.
        temperature: see :func:`reward_prioritized_buffer`, as all that follow.
        replacement: likewise.
        sampler: likewise.
        max_length: likewise.
        keep: likewise.
        **options: likewise. Distances between compact rows are those between whole ones.
    """
    if sampler is None:
        sampler = SoftmaxRewardSampler(key, temperature, replacement)
    writer = DiversityWriter(key, features, cutoff_distance, p, near, when, tie)
    return build(capacity, writer, sampler, [KeepItems(stale_entries(keep), max_length)], **options)


def fifo_buffer(
    capacity: int,
    *,
    unique: Unique = None,
    on_duplicate: OnDuplicate = "refresh",
    sampler: Sampler | None = None,
    max_length: int | None = None,
    keep: Sequence[str] = (),
    **options: Any,
) -> TensorDictReplayBuffer:
    """Return a buffer that keeps the newest items and draws them uniformly.

    Args:
        capacity: the number of items kept.
        unique: see :func:`reward_prioritized_buffer`.
        on_duplicate: likewise.
        sampler: another sampler, e.g. :class:`~gfn_rb.SoftmaxRewardSampler`.
        max_length: see :func:`reward_prioritized_buffer`.
        keep: likewise.
        **options: see :func:`build`.
    """
    sampler = RandomSampler() if sampler is None else sampler
    writer = recent_writer(unique, on_duplicate, options.get("max_age"))
    return build(capacity, writer, sampler, [KeepItems(stale_entries(keep), max_length)], **options)


def recent_writer(
    unique: Unique = None, on_duplicate: OnDuplicate = "refresh", max_age: int | None = None
) -> Writer:
    """Return a writer that keeps the newest items.

    Args:
        unique: see :class:`~gfn_rb.FIFOWriter`.
        on_duplicate: likewise.
        max_age: of the buffer. Rows of any age are then dropped, for which no slot may stand for
            another's age.
    """
    kind = FIFOWriter if max_age is None else UniqueFIFOWriter
    writer: Writer = kind(unique, on_duplicate)
    return writer


def terminating_state_buffer(
    capacity: int,
    *,
    regenerate: Callable[[TensorDictBase], TensorDictBase] | None = None,
    unique: Unique = "state",
    on_duplicate: OnDuplicate = "refresh",
    writer: Writer | None = None,
    sampler: Sampler | None = None,
    **options: Any,
) -> TensorDictReplayBuffer:
    """Return a buffer of terminating states: x and its log-reward, no path to it.

    Trajectories are reduced on insertion; the backward policy makes new ones when they are drawn.
    That costs less memory, and what is replayed never goes stale.

    Args:
        capacity: the number of items kept.
        regenerate: turns drawn rows (``state`` [n, *S], ``log_reward`` [n]) into what ``sample``
            returns, such as trajectories from a backward rollout. Without it, rows are returned
            as they are.
        unique: what tells objects apart, of which one row each is kept, see
            :class:`~gfn_rb.RewardPrioritizedWriter`; None for any rows.
        on_duplicate: likewise.
        writer: which items are kept; by default those of highest reward. ``unique`` and
            ``on_duplicate`` then mean nothing.
        sampler: which items are drawn; by default in proportion to the reward.
        **options: see :func:`build`; ``compact="narrow"`` alone, as there are no paths.
    """
    if writer is None:
        writer = RewardPrioritizedWriter(unique=unique, on_duplicate=on_duplicate)
    sampler = SoftmaxRewardSampler() if sampler is None else sampler
    rows = KeepTerminatingStates(regenerate)
    return build(capacity, writer, sampler, [rows], **_without_paths(options))


def transition_buffer(
    capacity: int,
    *,
    writer: Writer | None = None,
    sampler: Sampler | None = None,
    keep: Sequence[str] = (),
    **options: Any,
) -> TensorDictReplayBuffer:
    """Return a buffer of transitions: trajectories go in, single steps come out.

    Each row is stamped with ``episode_log_reward``, log R(x) of the trajectory it is of, and
    ``episode``, that trajectory's number. By the first the rows of an episode are kept and drawn
    alike, whichever of them the reward stands in; ``log_reward`` itself is -inf in the others.

    What is kept is whole: the rows of an episode enter and leave together, but for the one episode
    that fills the capacity up, the least of those kept. Of it the last rows are stored.

    Args:
        capacity: the number of transitions kept.
        writer: which are kept; by default those of the episodes of highest reward. One that ranks
            needs ``key="episode_log_reward"``.
        sampler: which are drawn; by default in proportion to their episode's reward. The same
            holds for its key. With it, or uniformly, the rows of an episode are drawn equally
            often; samplers by rank give them neighbouring ranks.
        keep: ``["log_prob"]`` to store it, see :func:`reward_prioritized_buffer`.
        **options: see :func:`build`; ``compact="narrow"`` alone, as there are no paths.
    """
    require_kind("keep", keep, list, lambda value: isinstance(value, Sequence))
    rows = KeepTransitions(_dropped(keep, (LOG_PROB,)))
    return _row_buffer(capacity, writer, sampler, rows, **options)


def state_buffer(
    capacity: int,
    *,
    writer: Writer | None = None,
    sampler: Sampler | None = None,
    **options: Any,
) -> TensorDictReplayBuffer:
    """Return a buffer of visited states: trajectories go in, single states come out.

    As in :func:`transition_buffer`, each row is stamped with ``episode_log_reward`` and
    ``episode``, and kept and drawn by the first.

    Args:
        capacity: the number of states kept.
        writer: see :func:`transition_buffer`.
        sampler: likewise.
        **options: likewise.
    """
    return _row_buffer(capacity, writer, sampler, KeepStates(), **options)


def build(
    capacity: int,
    writer: Writer,
    sampler: Sampler,
    transforms: Sequence[Transform] = (),
    *,
    storage: Storage | None = None,
    device: torch.device | str = "cpu",
    compact: StateForm | None = None,
    env: Environment | None = None,
    transform: Transform | Callable[[Any], Any] | None = None,
    statistics: bool = False,
    rate_limiter: RateLimiter | None = None,
    max_age: int | None = None,
    **buffer_kwargs: Any,
) -> TensorDictReplayBuffer:
    """Return a buffer of these parts.

    Args:
        capacity: the number of rows kept.
        writer: which rows are kept.
        sampler: which rows are drawn.
        transforms: of the preset, in the order in which rows pass them on the way in.
        storage: another storage of ``capacity`` rows, such as a ``LazyMemmapStorage``.
        device: where the storage lives, unless given.
        compact: store rows "narrow", or trajectories without their states ("rebuild"), see
            :class:`~gfn_rb.CompactRows`; needs ``env``.
        env: the environment that rows are of.
        transform: of the user: the first on the way in, the last on the way out.
        statistics: count the rows that go in and out, see
            :class:`~gfn_rb.buffers.TrackedReplayBuffer`; implied by the next two options.
        rate_limiter: keep draws in proportion to offers, see :class:`~gfn_rb.buffers.RateLimiter`.
        max_age: drop rows whose policy is more versions than this behind the newest one, see
            :class:`~gfn_rb.buffers.TrackedReplayBuffer`.
        **buffer_kwargs: for ``TensorDictReplayBuffer``: ``batch_size``, ``prefetch``,
            ``generator``, ``shared``, ...

    Raises:
        ArgumentError: the capacity is below 1, or the storage is of another.
    """
    capacity = as_count("capacity", capacity)
    require_kind("writer", writer, Writer, callable)
    require_kind("sampler", sampler, Sampler, callable)
    require_kind("storage", storage, Storage, lambda value: value is None)
    require_kind("transform", transform, Transform, lambda v: v is None or callable(v))
    _check_options(buffer_kwargs)
    device = as_device("device", device)
    if storage is None:
        storage = LazyTensorStorage(capacity, device=device)
    if storage.max_size != capacity:
        raise ArgumentError(
            f"storage must hold capacity={capacity} rows, got one of {storage.max_size}"
        )
    # Inverse transforms run from the last to the first: the user's come first on the way in.
    on_insertion = [*([] if transform is None else [transform]), *transforms]
    if compact is not None:
        if env is None:
            raise ArgumentError(f"env must be given for compact={compact!r}, got None")
        rows = CompactRows(env, compact)
        on_insertion.append(rows)
        if isinstance(writer, DiversityWriter):
            writer.measure(rows.features(writer.features))
        elif isinstance(writer, RewardPrioritizedWriter) and writer.unique is not None:
            writer.identify(rows.identity(writer.unique))
    parts = {"storage": storage, "writer": writer, "sampler": sampler, **buffer_kwargs}
    if on_insertion:
        parts["transform"] = Compose(*on_insertion[::-1])
    if statistics or rate_limiter is not None or max_age is not None:
        return TrackedReplayBuffer(rate_limiter=rate_limiter, max_age=max_age, **parts)
    return TensorDictReplayBuffer(**parts)


def _check_options(options: dict[str, Any]) -> None:
    batch_size, prefetch = options.get("batch_size"), options.get("prefetch")
    if batch_size is not None:
        as_count("batch_size", batch_size)
    if prefetch is not None and as_count("prefetch", prefetch, 0) and batch_size is None:
        raise ArgumentError(f"prefetch must be 0 without a batch_size, got {prefetch}")
    generator = options.get("generator")
    require_kind("generator", generator, torch.Generator, lambda value: value is None)
    require_flag("shared", options.get("shared", False))


def _row_buffer(
    capacity: int, writer: Writer | None, sampler: Sampler | None, rows: Transform, **options: Any
) -> TensorDictReplayBuffer:
    writer = RewardPrioritizedWriter(EPISODE_LOG_REWARD) if writer is None else writer
    sampler = SoftmaxRewardSampler(EPISODE_LOG_REWARD) if sampler is None else sampler
    return build(capacity, writer, sampler, [rows], **_without_paths(options))


def _without_paths(options: dict[str, Any]) -> dict[str, Any]:
    if options.get("compact") == "rebuild":
        raise ArgumentError(
            "compact must be 'narrow' for rows that are no trajectories, got 'rebuild': a single "
            "step or state does not tell how it was come to"
        )
    return options


def stale_entries(keep: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the entries that are worth nothing once an item is stored or sent.

    Args:
        keep: which of ``log_prob`` and ``estimator_output`` are kept all the same.

    Raises:
        ArgumentError: they are others.
    """
    require_kind("keep", keep, list, lambda value: isinstance(value, Sequence))
    return (INDEX, *_dropped(keep, _STALE))


def _dropped(keep: Sequence[str], stale: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(keep, str) or not set(keep) <= set(stale):
        raise ArgumentError(f"keep must be a list of names out of {stale}, got {keep!r}")
    return tuple(name for name in stale if name not in keep)
