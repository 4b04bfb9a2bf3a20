"""Private names of TorchRL's buffers, writers, samplers and ensembles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import expand_as_right
from torch import Tensor
from torchrl.data import ReplayBuffer, ReplayBufferEnsemble
from torchrl.data.replay_buffers.samplers import Sampler, SamplerEnsemble
from torchrl.data.replay_buffers.storages import (
    Storage,
    StorageEnsemble,
)
from torchrl.data.replay_buffers.storages.utils import _collate_id
from torchrl.data.replay_buffers.writers import TensorDictRoundRobinWriter, Writer

from gfn_rb.torchrl_compat.storages import attached_buffers

__all__ = [
    "DRAWS_WAIT",
    "after_draw",
    "captured_prefetch",
    "clear_prefetched",
    "count_sample",
    "direct_transforms",
    "drawn_now",
    "drop_prefetched",
    "empty_part",
    "generator_of",
    "has_queue",
    "is_consuming",
    "lock_of",
    "locks_of",
    "member_samplers",
    "member_storages",
    "members_of",
    "options_of",
    "prefetch_capacity",
    "remaining_batches",
    "replay_lock",
    "restore_prefetch",
    "sample_counts",
    "set_ensemble_generator",
    "set_options",
    "set_remaining_batches",
    "set_replay_lock",
    "set_sample_counts",
    "set_write_lock",
    "wake_draws",
    "with_entries",
    "write_cursor",
    "write_lock",
]

# TorchRL after 0.14.1 has draws that wait for rows, and counts draws.
DRAWS_WAIT = hasattr(ReplayBuffer, "_notify_replay_state_change")
# The counters of ``ReplayBuffer.sample`` in TorchRL after 0.14.1.
_SAMPLE_COUNTERS = "_sample_call_count_value", "_sampled_item_count_value"


def empty_part(part: Writer | Sampler) -> None:
    """Have a writer or sampler forget all rows (``Writer._empty``, ``Sampler._empty``)."""
    part._empty()


def write_cursor(writer: TensorDictRoundRobinWriter) -> int:
    """Return the slot that is written next (``RoundRobinWriter._cursor``)."""
    return writer._cursor


def remaining_batches(part: Sampler | Writer) -> int | None:
    """Return how many batches are left of an epoch (``Sampler._remaining_batches``)."""
    return vars(part).get("_remaining_batches")


def set_remaining_batches(part: Sampler | Writer, remaining: int | None) -> None:
    """Restore what :func:`remaining_batches` returned."""
    if remaining is None:
        vars(part).pop("_remaining_batches", None)
    else:
        part._remaining_batches = remaining


def generator_of(rb: ReplayBuffer | Sampler) -> torch.Generator | None:
    """Return what a buffer or sampler draws with, None for the global generator (``_rng``)."""
    return rb._rng


def set_ensemble_generator(part: Any, generator: torch.Generator | None) -> None:
    """Set the generator of an ensemble's part, and not its members' (``_rng_private``)."""
    part._rng_private = generator


def replay_lock(rb: ReplayBuffer) -> AbstractContextManager[Any]:
    """Return what keeps other threads from using a buffer (``ReplayBuffer._replay_lock``)."""
    return rb._replay_lock


def set_replay_lock(rb: ReplayBuffer, lock: AbstractContextManager[Any]) -> None:
    """Set what keeps other threads from using a buffer (``ReplayBuffer._replay_lock``)."""
    rb._replay_lock = lock


def lock_of(storage: Storage) -> AbstractContextManager[Any] | None:
    """Return the replay lock of the first buffer on a storage, None of one without a buffer."""
    for entity in storage._attached_entities_iter():
        if isinstance(entity, ReplayBuffer):
            lock: AbstractContextManager[Any] = entity._replay_lock
            return lock
    return None


def locks_of(rb: ReplayBuffer) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return :func:`replay_lock` and :func:`write_lock`, to be taken in this order."""
    return rb._replay_lock, rb._write_lock


def write_lock(rb: ReplayBuffer) -> AbstractContextManager[Any]:
    """Return what keeps other processes from writing (``ReplayBuffer._write_lock``)."""
    return rb._write_lock


def set_write_lock(rb: ReplayBuffer, lock: AbstractContextManager[Any]) -> None:
    """Set what keeps other processes from writing (``ReplayBuffer._write_lock``)."""
    rb._write_lock = lock


@contextmanager
def captured_prefetch(rb: ReplayBuffer) -> Iterator[tuple[Any, ...]]:
    """Hold a buffer still and yield its prefetched batches (``_capture_prefetch_state``)."""
    with rb._capture_prefetch_state(clone_queue=False) as state:
        yield tuple(
            (rows, dict(known) if isinstance(known, dict) else known)
            for rows, known in state["queue"]
        )


def restore_prefetch(rb: ReplayBuffer, queue: tuple[Any, ...]) -> None:
    """Replace what :func:`captured_prefetch` yielded (``_restore_prefetch_queue_locked``)."""
    rb._clear_prefetch_queue_locked()
    state = {"version": 1, "capacity": prefetch_capacity(rb), "queue": queue}
    rb._restore_prefetch_queue_locked(state, clone_queue=False)


def drop_prefetched(storage: Storage) -> None:
    """Drop the batches that buffers on a storage have drawn ahead (``_prefetch_queue``).

    Of removed rows they are, or failed for want of rows, which who saves the buffer would hear of.
    A thread that takes a batch at this moment keeps the others.
    """
    for rb in attached_buffers(storage):
        if rb._prefetch and rb._futures_lock.acquire(blocking=False):
            rb._prefetch_queue.clear()
            rb._futures_lock.release()


def clear_prefetched(rb: ReplayBuffer) -> None:
    """Drop all batches that a buffer has drawn ahead (``_clear_prefetch_queue_locked``)."""
    with rb._futures_lock:
        rb._clear_prefetch_queue_locked()


def prefetch_capacity(rb: ReplayBuffer) -> int:
    """Return how many batches are drawn ahead (``ReplayBuffer._prefetch_cap``)."""
    return int(rb._prefetch_cap)


def drawn_now(
    rb: ReplayBuffer,
    batch_size: int,
    wait: bool = False,
    timeout: float | None = None,
    cancel_event: Any = None,
) -> tuple[Any, Any]:
    """Draw beside the prefetched batches, after the wait of TorchRL's nightly (``_sample``).

    As ``ReplayBuffer.sample`` does where nothing is prefetched, counters included.
    """
    stop = {"timeout": timeout, "cancel_event": cancel_event}
    if wait and not rb.wait_until_sampleable(batch_size, **stop):
        if cancel_event is not None and cancel_event.is_set():
            raise RuntimeError("Replay-buffer sampling was cancelled.")
        raise TimeoutError(f"no batch of {batch_size} rows within {timeout} seconds")
    rows, info = rb._sample(batch_size)
    count_sample(rb, len(rows))
    return rows, info


def wake_draws(rb: ReplayBuffer) -> None:
    """Have draws that wait for rows look again (``ReplayBuffer._notify_replay_state_change``)."""
    rb._notify_replay_state_change()


def count_sample(rb: ReplayBuffer, n_rows: int) -> None:
    """Count a draw in ``stats()`` of TorchRL after 0.14.1 (``_increment_counter``)."""
    if hasattr(rb, _SAMPLE_COUNTERS[0]):
        for name, n in zip(_SAMPLE_COUNTERS, (1, n_rows), strict=True):
            rb._increment_counter(name, n)


def sample_counts(rb: ReplayBuffer) -> tuple[int, ...]:
    """Return the draws and drawn rows that TorchRL counts, () before 0.15 (``_counter_value``)."""
    return tuple(
        int(rb._counter_value(vars(rb)[name])) for name in _SAMPLE_COUNTERS if name in vars(rb)
    )


def set_sample_counts(rb: ReplayBuffer, counts: Sequence[int]) -> None:
    """Restore what :func:`sample_counts` returned (``_set_counter``)."""
    for name, count in zip(_SAMPLE_COUNTERS, counts, strict=False):
        if name in vars(rb):
            rb._set_counter(name, count)


def direct_transforms(rb: ReplayBuffer, kinds: tuple[type, ...]) -> list[Any] | None:
    """Return the transforms of a buffer, None where it does more than write, draw and transform.

    ``ReplayBuffer._extend`` and ``_sample`` then call nothing but the writer, the sampler, the
    storage and transforms of these kinds. It reads ``_transform``, ``_delayed_init``,
    ``dim_extend``, ``_is_consuming``, ``_sample_unit``, ``_pin_memory`` and ``_collate_fn``.
    """
    if rb._delayed_init or rb.dim_extend or rb._sample_unit is not None or rb._pin_memory:
        return None
    if rb._collate_fn is not _collate_id or rb._storage.ndim != 1 or rb._is_consuming():
        return None
    transforms = [] if rb._transform is None else list(rb._transform.transforms)
    for each in transforms:
        if not isinstance(each, kinds):
            return None
    return transforms


def after_draw(rb: ReplayBuffer, rows: Any) -> Any:
    """Return what ``ReplayBuffer._sample`` makes of the rows that it took from the storage.

    It reads ``_collate_fn``, ``_transform`` and ``_pin_memory``.
    """
    rows = rb._collate_fn(rows)
    if rb._transform is not None and len(rb._transform):
        if isinstance(rows, TensorDictBase) and rows.is_locked:
            rows = rows.copy()
        rows = rb._transform(rows)
    return rows.pin_memory() if rb._pin_memory else rows


def is_consuming(rb: ReplayBuffer) -> bool:
    """Return whether a buffer gives up slots by itself (``ReplayBuffer._is_consuming``)."""
    return bool(rb._is_consuming())


def has_queue(rb: ReplayBuffer) -> bool:
    """Return whether ``ReplayBuffer.sample`` does more than call ``_sample``.

    It reads ``_prefetch``, ``_service_shutdown`` and ``_sample_dependency``.
    """
    waits = getattr(rb, "_sample_dependency", None) is not None
    return waits or bool(rb._prefetch) or getattr(rb, "_service_shutdown", False)


def with_entries(rows: Any, info: dict[Any, Any]) -> Any:
    """Add what is known of a draw to its rows, as ``TensorDictReplayBuffer.sample`` does.

    Of rows in a flat TensorDict, entries are added past its checks (``TensorDict._tensordict``).
    """
    if type(rows) is TensorDict and rows.ndim == 1 and not rows.is_locked:
        for name, value in info.items():
            if type(name) is not str or type(value) is not Tensor or value.ndim == 0:
                break
        else:
            rows._tensordict.update(info)
            return rows
    if is_locked := rows.is_locked:
        rows.unlock_()
    for name, value in info.items():
        entry = torch.stack(value, -1) if isinstance(value, tuple) else torch.as_tensor(value)
        rows.set(name, expand_as_right(entry, rows) if entry.ndim < rows.ndim else entry)
    return rows.lock_() if is_locked else rows


def options_of(rb: ReplayBuffer) -> dict[str, Any]:
    """Return what a load sets beside the parts (``_batch_size``, ``_consume_after_n_samples``)."""
    options = "batch_size", "consume_after_n_samples"
    return {name: getattr(rb, f"_{name}") for name in options}


def set_options(rb: ReplayBuffer, options: dict[str, Any]) -> None:
    """Set what :func:`options_of` returned."""
    for name, value in options.items():
        setattr(rb, f"_{name}", value)


def members_of(rb: ReplayBuffer) -> Sequence[ReplayBuffer]:
    """Return the buffers of an ensemble, none of other buffers (``ReplayBufferEnsemble._rbs``)."""
    return rb._rbs if isinstance(rb, ReplayBufferEnsemble) else ()


def member_storages(storage: StorageEnsemble) -> Sequence[Storage]:
    """Return the storages of an ensemble (``StorageEnsemble._storages``)."""
    return storage._storages


def member_samplers(sampler: SamplerEnsemble) -> Sequence[Sampler]:
    """Return the samplers of an ensemble (``SamplerEnsemble._samplers``)."""
    return sampler._samplers
