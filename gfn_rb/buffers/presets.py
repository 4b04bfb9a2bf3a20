"""Replay buffers ready for use.

Each preset returns a ``GFNReplayBuffer``, a ``TensorDictReplayBuffer`` made of a storage, a writer,
a sampler and transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from inspect import signature
from itertools import chain
from typing import Any, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer
from torchrl.envs.transforms import Compose, Transform
from typing_extensions import Unpack

from gfn_rb.arguments import (
    as_count,
    as_device,
    require_choice,
    require_device_of,
    require_flag,
    require_kind,
)
from gfn_rb.buffers.options import BufferOptions, StateForm, with_options
from gfn_rb.buffers.rate_limiter import RateLimiter
from gfn_rb.buffers.replay_buffer import GFNReplayBuffer
from gfn_rb.buffers.transforms import (
    KeepItems,
    KeepStates,
    KeepTerminatingStates,
    KeepTransitions,
)
from gfn_rb.errors import ArgumentError
from gfn_rb.gone import refuse_gone
from gfn_rb.keys import EPISODE_LOG_REWARD, ESTIMATOR_OUTPUT, INDEX, LOG_PROB, LOG_REWARD
from gfn_rb.samplers import SoftmaxRewardSampler
from gfn_rb.samplers.base import Replacement
from gfn_rb.storages.tensors import RowTensorStorage, storage_device
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter
from gfn_rb.writers.diversity import Near, When
from gfn_rb.writers.features import Unique
from gfn_rb.writers.fifo import UniqueFIFOWriter, WholeGroups
from gfn_rb.writers.reward import OnDuplicate, Tie

_GROUP_OPTIONS = ("group", "per_group")
_STALE = (LOG_PROB, ESTIMATOR_OUTPUT)


@with_options
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
    **options: Unpack[BufferOptions],
) -> GFNReplayBuffer:
    """Return a buffer that keeps the rows of highest reward and draws them by reward.

    It corresponds to torchgfn's ``ReplayBuffer(prioritized_capacity=True,
    prioritized_sampling=True)``.

    Args:
        capacity: number of rows kept, at least 1.
        key: entry that rows are ranked and drawn by, one number per row; log-rewards in nats.
            Default: ``"log_reward"``.
        tie: which rows of equal key are kept, the ``"newest"`` or the ``"oldest"``. Default:
            ``"newest"``.
        unique: what identifies an object, of which one row is kept: ``"state"`` (terminating state
            and condition), another key, a list of keys, or a callable from rows [n] to int64
            fingerprints [n] or [n, d]. None keeps equal rows too. Default: ``"state"`` for
            terminating states, else None.
        on_duplicate: ``"refresh"`` replaces the stored row of an object by the new one, and
            ``"keep"`` rejects the new one. Default: ``"refresh"``.
        temperature: T of the draw, above 0: rows are drawn in proportion to exp(key / T). Default:
            1.
        replacement: True or False; ``"auto"`` draws without replacement unless the batch is larger
            than the buffer. Default: ``"auto"``.
        writer: writer to use instead; the options of that of the preset are then ignored.
        sampler: sampler to use instead; the options of that of the preset are then ignored.
        max_length: number of actions to which trajectories are padded. Default: None stores them as
            they come, which requires batches of one length.
        keep: names among ``"log_prob"`` and ``"estimator_output"`` to store. Others are dropped,
            because the policy that made them changes. Transitions have no ``"estimator_output"``.
        **options: keywords below, and rarer ones of TorchRL
            (:class:`~gfn_rb.buffers.BufferOptions`).
    """
    if sampler is None:
        sampler = SoftmaxRewardSampler(key, temperature, replacement)
    if writer is None:
        limit = _group_options(options)
        writer = RewardPrioritizedWriter(key, tie, unique, on_duplicate, **limit)
    return build(capacity, writer, sampler, [KeepItems(stale_entries(keep), max_length)], **options)


@with_options
def diverse_buffer(
    capacity: int,
    *,
    key: NestedKey = LOG_REWARD,
    features: NestedKey | Callable[[TensorDictBase], Tensor] | None = None,
    cutoff_distance: float | int | None = None,
    p: float | int = 1.0,
    near: Near = "replace",
    when: When = "always",
    tie: Tie = "newest",
    temperature: float = 1.0,
    replacement: Replacement = "auto",
    sampler: Sampler | None = None,
    max_length: int | None = None,
    keep: Sequence[str] = (),
    **options: Unpack[BufferOptions],
) -> GFNReplayBuffer:
    """Return a buffer that keeps the best rows that are far apart and draws them by reward.

    ``near="reject", when="full"`` corresponds to torchgfn's
    ``NormBasedDiversePrioritizedReplayBuffer``.

    Args:
        capacity: number of rows kept, at least 1.
        key: entry that rows are ranked and drawn by, one number per row; log-rewards in nats.
            Default: ``"log_reward"``.
        features: what distances are measured between: a key, or a callable from rows [n] to a
            tensor [n, d]. Default: the terminating state, and the condition where rows have one.
        cutoff_distance: rows at this distance or closer are not kept together; required. 0 removes
            exact duplicates alone, and a negative number turns the comparison off.
        p: exponent of the norm, at least 1 or ``inf``; 0 counts the features that differ (Hamming).
            Default: 1.
        near: ``"replace"`` lets a better row replace the stored rows near it, and ``"reject"``
            rejects a row near a stored one, whatever its key. Default: ``"replace"``.
        when: ``"always"`` compares every batch, ``"full"`` only batches that find the buffer full.
            Default: ``"always"``.
        tie: which rows of equal key are kept, the ``"newest"`` or the ``"oldest"``. Default:
            ``"newest"``.
        temperature: T of the draw, above 0: rows are drawn in proportion to exp(key / T). Default:
            1.
        replacement: True or False; ``"auto"`` draws without replacement unless the batch is larger
            than the buffer. Default: ``"auto"``.
        sampler: sampler to use instead; the options of that of the preset are then ignored.
        max_length: number of actions to which trajectories are padded. Default: None stores them as
            they come, which requires batches of one length.
        keep: names among ``"log_prob"`` and ``"estimator_output"`` to store. Others are dropped,
            because the policy that made them changes. Transitions have no ``"estimator_output"``.
        **options: keywords below, and rarer ones of TorchRL
            (:class:`~gfn_rb.buffers.BufferOptions`).
    """
    if sampler is None:
        sampler = SoftmaxRewardSampler(key, temperature, replacement)
    limit = _group_options(options)
    if cutoff_distance is None:
        _check_options(options)  # a misspelt one is named first
        raise ArgumentError(
            "cutoff_distance must be given, a distance at which rows are too close to be kept "
            "together: 0 removes exact duplicates alone"
        )
    writer = DiversityWriter(key, features, cutoff_distance, p, near, when, tie, **limit)
    return build(capacity, writer, sampler, [KeepItems(stale_entries(keep), max_length)], **options)


@with_options
def fifo_buffer(
    capacity: int,
    *,
    unique: Unique = None,
    on_duplicate: OnDuplicate = "refresh",
    whole_groups: WholeGroups | None = None,
    sampler: Sampler | None = None,
    max_length: int | None = None,
    keep: Sequence[str] = (),
    **options: Unpack[BufferOptions],
) -> GFNReplayBuffer:
    """Return a buffer that keeps the newest rows and draws them uniformly.

    Args:
        capacity: number of rows kept, at least 1.
        unique: what identifies an object, of which one row is kept: ``"state"`` (terminating state
            and condition), another key, a list of keys, or a callable from rows [n] to int64
            fingerprints [n] or [n, d]. None keeps equal rows too. Default: ``"state"`` for
            terminating states, else None.
        on_duplicate: ``"refresh"`` replaces the stored row of an object by the new one, and
            ``"keep"`` rejects the new one. Default: ``"refresh"``.
        whole_groups: ``"oldest"`` or ``"stalest"`` removes whole groups when the buffer is full,
            those first whose newest row came first or has the lowest ``policy_version``. It needs
            ``group``, and no ``per_group``. Default: None, single rows leave.
        sampler: sampler to use instead; the options of that of the preset are then ignored.
        max_length: number of actions to which trajectories are padded. Default: None stores them as
            they come, which requires batches of one length.
        keep: names among ``"log_prob"`` and ``"estimator_output"`` to store. Others are dropped,
            because the policy that made them changes. Transitions have no ``"estimator_output"``.
        **options: keywords below, and rarer ones of TorchRL
            (:class:`~gfn_rb.buffers.BufferOptions`).
    """
    sampler = RandomSampler() if sampler is None else sampler
    limit = _group_options(options)
    removes = options.get("max_age") is not None or options.get("max_uses") is not None
    kind = UniqueFIFOWriter if removes else FIFOWriter  # which moves all rows to remove some
    writer = kind(unique, on_duplicate, whole_groups=whole_groups, **limit)
    return build(capacity, writer, sampler, [KeepItems(stale_entries(keep), max_length)], **options)


@with_options
def terminating_state_buffer(
    capacity: int,
    *,
    regenerate: Callable[[TensorDictBase], TensorDictBase] | None = None,
    unique: Unique = "state",
    on_duplicate: OnDuplicate = "refresh",
    writer: Writer | None = None,
    sampler: Sampler | None = None,
    **options: Unpack[BufferOptions],
) -> GFNReplayBuffer:
    """Return a buffer of terminating states and their log-rewards, without trajectories.

    Trajectories are reduced when they are added, and other entries are stored as they are. The
    backward policy makes new trajectories to drawn states, so the buffer needs less memory and its
    trajectories are never outdated.

    Args:
        capacity: number of rows kept, at least 1.
        regenerate: callable that turns drawn rows (``state`` [n, *S], ``log_reward`` [n] in nats)
            into what ``sample`` returns, such as trajectories of a backward rollout. Default:
            return the rows.
        unique: what identifies an object, of which one row is kept: ``"state"`` (terminating state
            and condition), another key, a list of keys, or a callable from rows [n] to int64
            fingerprints [n] or [n, d]. None keeps equal rows too. Default: ``"state"`` for
            terminating states, else None.
        on_duplicate: ``"refresh"`` replaces the stored row of an object by the new one, and
            ``"keep"`` rejects the new one. Default: ``"refresh"``.
        writer: writer to use instead; the options of that of the preset are then ignored.
        sampler: sampler to use instead; the options of that of the preset are then ignored.
        **options: keywords below, and rarer ones of TorchRL
            (:class:`~gfn_rb.buffers.BufferOptions`).
    """
    if writer is None:
        limit = _group_options(options)
        writer = RewardPrioritizedWriter(unique=unique, on_duplicate=on_duplicate, **limit)
    sampler = SoftmaxRewardSampler() if sampler is None else sampler
    rows = KeepTerminatingStates(regenerate)
    return build(capacity, writer, sampler, [rows], **options)


@with_options
def transition_buffer(
    capacity: int,
    *,
    writer: Writer | None = None,
    sampler: Sampler | None = None,
    keep: Sequence[str] = (),
    **options: Unpack[BufferOptions],
) -> GFNReplayBuffer:
    """Return a buffer that accepts trajectories and returns single transitions.

    Each row has ``episode``, the number of its trajectory, and ``episode_log_reward``, the
    log-reward log R(x) of that trajectory in nats. Rows are kept and drawn by
    ``episode_log_reward``. Their ``log_reward`` is -inf except in the terminating transition.

    The rows of an episode enter and leave together. Only the episode that fills the last slots, the
    lowest of those kept, is stored in part: its last rows.

    A ``writer`` that ranks and a ``sampler`` by reward need ``key="episode_log_reward"``. Samplers
    by rank give the rows of an episode neighbouring ranks.

    Args:
        capacity: number of rows kept, at least 1.
        writer: writer to use instead; the options of that of the preset are then ignored.
        sampler: sampler to use instead; the options of that of the preset are then ignored.
        keep: names among ``"log_prob"`` and ``"estimator_output"`` to store. Others are dropped,
            because the policy that made them changes. Transitions have no ``"estimator_output"``.
        **options: keywords below, and rarer ones of TorchRL
            (:class:`~gfn_rb.buffers.BufferOptions`).
    """
    rows = KeepTransitions(stale_entries(keep, (LOG_PROB,)))
    return _row_buffer(capacity, writer, sampler, rows, options)


@with_options
def state_buffer(
    capacity: int,
    *,
    writer: Writer | None = None,
    sampler: Sampler | None = None,
    **options: Unpack[BufferOptions],
) -> GFNReplayBuffer:
    """Return a buffer that accepts trajectories and returns single visited states.

    Each row has ``episode``, the number of its trajectory, and ``episode_log_reward``, the
    log-reward log R(x) of that trajectory in nats. Rows are kept and drawn by
    ``episode_log_reward``. Their ``log_reward`` is -inf except in terminating states.

    A ``writer`` that ranks and a ``sampler`` by reward need ``key="episode_log_reward"``.

    Args:
        capacity: number of rows kept, at least 1.
        writer: writer to use instead; the options of that of the preset are then ignored.
        sampler: sampler to use instead; the options of that of the preset are then ignored.
        **options: keywords below, and rarer ones of TorchRL
            (:class:`~gfn_rb.buffers.BufferOptions`).
    """
    return _row_buffer(capacity, writer, sampler, KeepStates(), options)


def build(
    capacity: int,
    writer: Writer,
    sampler: Sampler,
    transforms: Sequence[Transform] = (),
    **options: Unpack[BufferOptions],
) -> GFNReplayBuffer:
    """Return a buffer made of these parts; added rows pass the transforms in their order."""
    _check_options(options)
    capacity = as_count("capacity", capacity)
    require_kind("writer", writer, Writer, callable)
    require_kind("sampler", sampler, Sampler, callable)
    parts: dict[str, Any] = {**options, "writer": writer, "sampler": sampler}
    device = as_device("device", parts.pop("device", "cpu"))
    compact, env = parts.pop("compact", None), parts.pop("env", None)
    if (storage := parts.get("storage")) is None:
        storage = parts["storage"] = RowTensorStorage(capacity, device=device)
    if storage.max_size != capacity:
        raise ArgumentError(
            f"storage must hold capacity={capacity} rows, got one of {storage.max_size}"
        )
    rows_on = storage_device(storage)
    if rows_on is not None:
        as_device("storage's device", rows_on)
    if (generator := options.get("generator")) is not None and storage.device != "auto":
        require_device_of(generator, rows_on or torch.device("cpu"))
    # Inverse transforms run from the last to the first: the user's come first on the way in.
    transform = parts.pop("transform", None)
    on_insertion = [*([] if transform is None else [transform]), *transforms]
    if compact is not None:
        if env is None:
            raise ArgumentError(f"env must be given for compact={compact!r}, got None")
        require_choice("compact", compact, get_args(StateForm))
        if compact == "rebuild" and not all(isinstance(each, KeepItems) for each in transforms):
            raise ArgumentError(
                "compact must be 'narrow' for rows that are no trajectories, got 'rebuild': a "
                "single step or state does not tell how it was come to"
            )
        from gfn_rb.buffers.compact import CompactRows  # which few programs need

        rows = CompactRows(env, compact)
        on_insertion.append(rows)
        rows.measure(writer)
    if on_insertion:
        parts["transform"] = Compose(*on_insertion[::-1])
    return GFNReplayBuffer(**parts)


def _check_options(options: Any) -> None:
    refuse_gone(options, BufferOptions.__annotations__)
    for name in options:
        if name not in BufferOptions.__annotations__:
            presets = (reward_prioritized_buffer, diverse_buffer, terminating_state_buffer)
            named = chain.from_iterable(signature(each).parameters for each in presets)
            near = get_close_matches(name, {*BufferOptions.__annotations__, *named} - {name}, 1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ArgumentError(f"{name!r} is not an option of this buffer{hint}")
    for name in _GROUP_OPTIONS:
        if name in options:
            raise ArgumentError(f"{name} must be given to the writer of this buffer")
    batch_size, prefetch = options.get("batch_size"), options.get("prefetch")
    if batch_size is not None:
        as_count("batch_size", batch_size)
    if prefetch is not None and as_count("prefetch", prefetch, 0) and batch_size is None:
        raise ArgumentError(f"prefetch must be 0 without a batch_size, got {prefetch}")
    kinds = {"generator": torch.Generator, "storage": Storage, "rate_limiter": RateLimiter}
    for name, kind in kinds.items():
        require_kind(name, options.get(name), kind, lambda value: value is None)
    require_kind(
        "transform", options.get("transform"), Transform, lambda v: v is None or callable(v)
    )
    for name in ("shared", "statistics"):
        require_flag(name, options.get(name, False))


def _group_options(options: Any) -> dict[str, Any]:
    """Take the options of the writer out of those of a buffer."""
    return {name: options.pop(name) for name in _GROUP_OPTIONS if name in options}


def _row_buffer(
    capacity: int,
    writer: Writer | None,
    sampler: Sampler | None,
    rows: Transform,
    options: BufferOptions,
) -> GFNReplayBuffer:
    writer = RewardPrioritizedWriter(EPISODE_LOG_REWARD) if writer is None else writer
    sampler = SoftmaxRewardSampler(EPISODE_LOG_REWARD) if sampler is None else sampler
    return build(capacity, writer, sampler, [rows], **options)


def stale_entries(keep: Sequence[str], stale: tuple[str, ...] = _STALE) -> tuple[str, ...]:
    """Return the names of entries that are dropped when a row is stored or sent."""
    require_kind("keep", keep, list, lambda value: isinstance(value, Sequence))
    if isinstance(keep, str) or not set(keep) <= set(stale):
        raise ArgumentError(f"keep must be a list of names out of {stale}, got {keep!r}")
    return (INDEX, *(name for name in stale if name not in keep))
