"""Replay buffers ready for use.

Each preset is a ``TensorDictReplayBuffer`` built from a storage, a writer, a sampler and
transforms; whatever it cannot be asked for is built from the same parts by hand.
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
from torchrl.envs.transforms import ExcludeTransform, Transform

from gfn_rb.buffers.compact import CompactRows, StateForm
from gfn_rb.buffers.episodes import KeepStates, KeepTransitions
from gfn_rb.buffers.transforms import KeepTerminatingStates, PadTrajectories
from gfn_rb.envs.core import GFNCore
from gfn_rb.errors import ArgumentError
from gfn_rb.keys import EPISODE_LOG_REWARD, ESTIMATOR_OUTPUT, INDEX, LOG_PROB, LOG_REWARD
from gfn_rb.samplers import SoftmaxRewardSampler
from gfn_rb.samplers.base import Replacement
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter
from gfn_rb.writers.diversity import Near, When
from gfn_rb.writers.reward import Tie

_STALE = (LOG_PROB, ESTIMATOR_OUTPUT)


def reward_prioritized_buffer(
    capacity: int,
    *,
    key: NestedKey = LOG_REWARD,
    tie: Tie = "newest",
    temperature: float = 1.0,
    replacement: Replacement = "auto",
    sampler: Sampler | None = None,
    max_length: int | None = None,
    keep: Sequence[str] = (),
    storage: Storage | None = None,
    compact: StateForm | None = None,
    env: GFNCore | None = None,
    device: torch.device | str = "cpu",
    **buffer_kwargs: Any,
) -> TensorDictReplayBuffer:
    """Return a buffer that keeps the best items and draws them by reward.

    Torchgfn's ``ReplayBuffer(prioritized_capacity=True, prioritized_sampling=True)``.

    Args:
        capacity: the number of items kept.
        key: what items are ranked and drawn by, one float per item.
        tie: which of equal items are kept, see :class:`~gfn_rb.RewardPrioritizedWriter`.
        temperature: see :class:`~gfn_rb.SoftmaxRewardSampler`.
        replacement: likewise.
        sampler: another sampler instead; ``temperature`` and ``replacement`` then mean nothing.
        max_length: pad trajectories to this many actions; needed where their lengths differ
            from batch to batch.
        keep: which of ``log_prob`` and ``estimator_output`` to store. The policy that made them
            moves on, so by default they are dropped on insertion.
        storage: another storage of ``capacity`` rows, such as a ``LazyMemmapStorage``.
        compact: store rows "narrow", or without the states ("rebuild"), see
            :class:`~gfn_rb.CompactRows`; needs ``env``.
        env: the environment that rows are of.
        device: where the storage lives, unless given.
        **buffer_kwargs: for ``TensorDictReplayBuffer``: ``batch_size``, ``prefetch``,
            ``transform``, ``generator``, ``shared``, ...

    Raises:
        ArgumentError: an option breaks its rule, or the storage is of another capacity.
    """
    if sampler is None:
        sampler = SoftmaxRewardSampler(key, temperature, replacement)
    writer = RewardPrioritizedWriter(key, tie)
    transforms = _on_insertion(max_length, keep, compact, env)
    return _buffer(capacity, storage, device, writer, sampler, transforms, buffer_kwargs)


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
    storage: Storage | None = None,
    compact: StateForm | None = None,
    env: GFNCore | None = None,
    device: torch.device | str = "cpu",
    **buffer_kwargs: Any,
) -> TensorDictReplayBuffer:
    """Return a buffer that keeps the best items that are far apart and draws them by reward.

    Torchgfn's ``NormBasedDiversePrioritizedReplayBuffer`` is ``near="reject", when="full"``.

    Args:
        capacity: the number of items kept.
        key: what items are ranked and drawn by, one float per item.
        features: what distances are measured between, see :class:`~gfn_rb.DiversityWriter`; by
            default the terminating state of trajectories, or the state.
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
        storage: likewise.
        compact: likewise.
        env: likewise.
        device: likewise.
        **buffer_kwargs: likewise.

    Raises:
        ArgumentError: an option breaks its rule, or the storage is of another capacity.
    """
    if sampler is None:
        sampler = SoftmaxRewardSampler(key, temperature, replacement)
    transforms = _on_insertion(max_length, keep, compact, env)
    if isinstance(transforms[-1], CompactRows):
        features = transforms[-1].features(features)
    writer = DiversityWriter(key, features, cutoff_distance, p, near, when, tie)
    return _buffer(capacity, storage, device, writer, sampler, transforms, buffer_kwargs)


def fifo_buffer(
    capacity: int,
    *,
    sampler: Sampler | None = None,
    max_length: int | None = None,
    keep: Sequence[str] = (),
    storage: Storage | None = None,
    compact: StateForm | None = None,
    env: GFNCore | None = None,
    device: torch.device | str = "cpu",
    **buffer_kwargs: Any,
) -> TensorDictReplayBuffer:
    """Return a buffer that keeps the newest items and draws them uniformly.

    Args:
        capacity: the number of items kept.
        sampler: another sampler, e.g. :class:`~gfn_rb.SoftmaxRewardSampler`.
        max_length: see :func:`reward_prioritized_buffer`, as all that follow.
        keep: likewise.
        storage: likewise.
        compact: likewise.
        env: likewise.
        device: likewise.
        **buffer_kwargs: likewise.

    Raises:
        ArgumentError: an option breaks its rule, or the storage is of another capacity.
    """
    sampler = RandomSampler() if sampler is None else sampler
    writer = FIFOWriter()
    transforms = _on_insertion(max_length, keep, compact, env)
    return _buffer(capacity, storage, device, writer, sampler, transforms, buffer_kwargs)


def terminating_state_buffer(
    capacity: int,
    *,
    regenerate: Callable[[TensorDictBase], TensorDictBase] | None = None,
    writer: Writer | None = None,
    sampler: Sampler | None = None,
    storage: Storage | None = None,
    compact: StateForm | None = None,
    env: GFNCore | None = None,
    device: torch.device | str = "cpu",
    **buffer_kwargs: Any,
) -> TensorDictReplayBuffer:
    """Return a buffer of terminating states: x and its log-reward, no path to it.

    Trajectories are taken apart on insertion; the backward policy makes new ones when they are
    drawn. That costs less memory, and what is replayed never goes stale.

    Args:
        capacity: the number of items kept.
        regenerate: turns drawn rows (``state`` [n, *S], ``log_reward`` [n]) into what ``sample``
            returns, such as trajectories from a backward rollout. Without it, rows are returned
            as they are.
        writer: which items are kept; by default those of highest reward.
        sampler: which items are drawn; by default in proportion to the reward.
        storage: see :func:`reward_prioritized_buffer`, as all that follow.
        compact: likewise, but "narrow" alone: there are no paths to rebuild states from.
        env: likewise.
        device: likewise.
        **buffer_kwargs: likewise.

    Raises:
        ArgumentError: an option breaks its rule, or the storage is of another capacity.
    """
    writer = RewardPrioritizedWriter() if writer is None else writer
    sampler = SoftmaxRewardSampler() if sampler is None else sampler
    transforms = [KeepTerminatingStates(regenerate), *_narrowing(compact, env)]
    return _buffer(capacity, storage, device, writer, sampler, transforms, buffer_kwargs)


def transition_buffer(
    capacity: int,
    *,
    writer: Writer | None = None,
    sampler: Sampler | None = None,
    keep: Sequence[str] = (),
    storage: Storage | None = None,
    compact: StateForm | None = None,
    env: GFNCore | None = None,
    device: torch.device | str = "cpu",
    **buffer_kwargs: Any,
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
        storage: see :func:`reward_prioritized_buffer`, as all that follow.
        compact: likewise, but "narrow" alone: there are no paths to rebuild states from.
        env: likewise.
        device: likewise.
        **buffer_kwargs: likewise.

    Raises:
        ArgumentError: an option breaks its rule, or the storage is of another capacity.
    """
    if isinstance(keep, str) or not set(keep) <= {LOG_PROB}:
        raise ArgumentError(f"keep must be a list of names out of {(LOG_PROB,)}, got {keep!r}")
    rows = KeepTransitions(() if LOG_PROB in keep else (LOG_PROB,))
    transforms = [rows, *_narrowing(compact, env)]
    return _row_buffer(capacity, storage, device, writer, sampler, transforms, buffer_kwargs)


def state_buffer(
    capacity: int,
    *,
    writer: Writer | None = None,
    sampler: Sampler | None = None,
    storage: Storage | None = None,
    compact: StateForm | None = None,
    env: GFNCore | None = None,
    device: torch.device | str = "cpu",
    **buffer_kwargs: Any,
) -> TensorDictReplayBuffer:
    """Return a buffer of visited states: trajectories go in, single states come out.

    As in :func:`transition_buffer`, each row is stamped with ``episode_log_reward`` and
    ``episode``, and kept and drawn by the first.

    Args:
        capacity: the number of states kept.
        writer: see :func:`transition_buffer`, as all that follow.
        sampler: likewise.
        storage: likewise.
        compact: likewise.
        env: likewise.
        device: likewise.
        **buffer_kwargs: likewise.

    Raises:
        ArgumentError: an option breaks its rule, or the storage is of another capacity.
    """
    transforms = [KeepStates(), *_narrowing(compact, env)]
    return _row_buffer(capacity, storage, device, writer, sampler, transforms, buffer_kwargs)


def _row_buffer(
    capacity: int,
    storage: Storage | None,
    device: torch.device | str,
    writer: Writer | None,
    sampler: Sampler | None,
    transforms: list[Transform],
    kwargs: dict[str, Any],
) -> TensorDictReplayBuffer:
    writer = RewardPrioritizedWriter(EPISODE_LOG_REWARD) if writer is None else writer
    sampler = SoftmaxRewardSampler(EPISODE_LOG_REWARD) if sampler is None else sampler
    return _buffer(capacity, storage, device, writer, sampler, transforms, kwargs)


def stale_entries(keep: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the entries that are worth nothing once an item is stored or sent.

    Args:
        keep: which of ``log_prob`` and ``estimator_output`` are kept all the same.

    Raises:
        ArgumentError: they are others.
    """
    if isinstance(keep, str) or not set(keep) <= set(_STALE):
        raise ArgumentError(f"keep must be a list of names out of {_STALE}, got {keep!r}")
    return (INDEX, *(name for name in _STALE if name not in keep))


def _on_insertion(
    max_length: int | None, keep: Sequence[str], compact: StateForm | None, env: GFNCore | None
) -> list[Transform]:
    transforms: list[Transform] = [ExcludeTransform(*stale_entries(keep), inverse=True)]
    if max_length is not None:
        transforms.append(PadTrajectories(max_length))
    return [*transforms, *_compacting(compact, env)]


def _compacting(compact: StateForm | None, env: GFNCore | None) -> list[Transform]:
    if compact is None:
        return []
    if env is None:
        raise ArgumentError(f"env must be given for compact={compact!r}, got None")
    return [CompactRows(env, compact)]


def _narrowing(compact: StateForm | None, env: GFNCore | None) -> list[Transform]:
    if compact == "rebuild":
        raise ArgumentError(
            "compact must be 'narrow' for rows that are no trajectories, got 'rebuild': a single "
            "step or state does not tell how it was come to"
        )
    return _compacting(compact, env)


def _buffer(
    capacity: int,
    storage: Storage | None,
    device: torch.device | str,
    writer: Writer,
    sampler: Sampler,
    transforms: list[Transform],
    kwargs: dict[str, Any],
) -> TensorDictReplayBuffer:
    if capacity < 1:
        raise ArgumentError(f"capacity must be at least 1, got {capacity}")
    if storage is None:
        storage = LazyTensorStorage(capacity, device=device)
    if storage.max_size != capacity:
        raise ArgumentError(
            f"storage must hold capacity={capacity} rows, got one of {storage.max_size}"
        )
    users = kwargs.pop("transform", None)
    buffer = TensorDictReplayBuffer(storage=storage, writer=writer, sampler=sampler, **kwargs)
    # Inverse transforms run from the last to the first: the user's come first on the way in.
    for transform in [*reversed(transforms), *([] if users is None else [users])]:
        buffer.append_transform(transform)
    return buffer
