"""State of all parts of a buffer, and calls that replace it in whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from typing import Any

from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler, SamplerEnsemble
from torchrl.data.replay_buffers.storages import ListStorage, Storage
from torchrl.data.replay_buffers.writers import Writer, WriterEnsemble

from gfn_rb import torchrl_compat as compat
from gfn_rb.errors import CheckpointError
from gfn_rb.storages.memmaps import files_of, remove_but
from gfn_rb.storages.sharing import SlotState, journal_of, require_access
from gfn_rb.storages.tensors import EncodedStorage
from gfn_rb.torchrl_compat import members_of

# Their state holds that of their members by number, which are saved on their own.
_ENSEMBLES = (SamplerEnsemble, WriterEnsemble)


def with_members(rb: ReplayBuffer) -> list[ReplayBuffer]:
    """Return the members of an ensemble followed by itself; another buffer alone."""
    return [*(each for member in members_of(rb) for each in with_members(member)), rb]


@contextmanager
def held(rbs: list[ReplayBuffer], captures: bool = True) -> Iterator[list[Any]]:
    """Keep other threads and processes from changing buffers; yield their prefetched batches.

    Args:
        rbs: what :func:`with_members` returned.
        captures: whether to wait for prefetched batches; without it there are none to yield.
    """
    queues = {}
    with ExitStack() as stack:
        # An ensemble, then its members in one order, or two ensembles could wait for each other.
        for rb in dict.fromkeys((rbs[-1], *sorted(rbs, key=id))):
            lock = compat.captured_prefetch(rb) if captures else compat.replay_lock(rb)
            queues[rb] = stack.enter_context(lock)
            stack.enter_context(compat.write_lock(rb))
        yield [queues[rb] if captures else None for rb in rbs]


def part_state(part: Sampler | Writer) -> dict[str, Any]:
    """Return the class and state of a sampler or writer."""
    name = type(part).__qualname__
    try:
        state = part.state_dict()
    except NotImplementedError:
        raise CheckpointError(f"cannot save a buffer with {name}: it has no state_dict") from None
    if isinstance(part, _ENSEMBLES):
        state = {key: value for key, value in state.items() if not key.isdigit()} or None
    return {"class": name, "state": state, "remaining": compat.remaining_batches(part)}


def load_part(part: Sampler | Writer, state: dict[str, Any]) -> None:
    """Restore the state of a sampler or writer."""
    if state["state"] is not None:
        members = part.state_dict() if isinstance(part, _ENSEMBLES) else {}
        part.load_state_dict({**members, **state["state"]})
    compat.set_remaining_batches(part, state["remaining"])


@contextmanager
def replacing(rb: ReplayBuffer, overwrites: bool = True) -> Iterator[list[ReplayBuffer]]:
    """Have a block replace all that a buffer holds, or after any exception nothing of it.

    Rows in use are copied before, rows in a list excepted. The block yields the members of an
    ensemble, followed by itself.

    Args:
        rb: the buffer, which no other thread can use until the block ends.
        overwrites: whether the block writes to tensors of the storage and to prefetched batches.

    Raises:
        ArgumentError: this process was forked, and does not share the storage with its parent.
    """
    rbs = with_members(rb)
    with held(rbs, overwrites) as queues:
        for each in rbs:
            if not members_of(each):
                writer = each.writer if isinstance(each.writer, SlotState) else None
                require_access(each.storage, writer)
        _record_all(rbs)
        kept = [_kept(*each, overwrites) for each in zip(rbs, queues, strict=True)]
        try:
            yield rbs
            if overwrites:
                _record_all(rbs)
        except BaseException:
            for put_back in kept:
                put_back()
            _record_all(rbs)  # again: an inner block may have written that they were replaced
            raise


def _record_all(rbs: list[ReplayBuffer]) -> None:
    """Have the journals of buffers write all rows when the block of their locks ends."""
    for rb in rbs:
        if journal := journal_of(rb.storage):
            journal.record_all()


def _kept(rb: ReplayBuffer, queue: Any, overwrites: bool) -> Callable[[], None]:
    """Return a function that puts back what a buffer holds now."""
    put_rows_back = None if members_of(rb) else _kept_rows(rb.storage, overwrites)
    parts = []
    for part in (rb.sampler, rb.writer):
        with suppress(CheckpointError):  # of samplers without a state
            parts.append((part, deepcopy(part_state(part))))
    stamps = compat.slot_generations(rb.storage)
    known = None if stamps is None else stamps.clone()
    transform, options = deepcopy(rb.transform.state_dict()), compat.options_of(rb)
    generator, counts = compat.generator_of(rb), compat.sample_counts(rb)
    drawn = None if generator is None else generator.get_state()

    def put_back() -> None:
        if put_rows_back is not None:
            put_rows_back()
        for part, state in parts:
            load_part(part, state)
        if known is not None:
            stamps.copy_(known)
        rb.transform.load_state_dict(transform)
        compat.set_options(rb, options)
        compat.set_sample_counts(rb, counts)
        if compat.generator_of(rb) is not generator:
            rb.set_rng(generator)
        if generator is not None and drawn is not None:
            generator.set_state(drawn)
        if queue is not None:
            compat.restore_prefetch(rb, queue)

    return put_back


def _kept_rows(storage: Storage, overwrites: bool) -> Callable[[], None]:
    """Return a function that puts back the rows that a storage has now.

    Args:
        storage: the storage. Rows in a list and an :class:`EncodedStorage` are not overwritten, but
            replaced.
        overwrites: whether tensors may be overwritten meanwhile, so that rows in use are copied.
    """
    before = {name: [*v] if type(v) is list else v for name, v in vars(storage).items()}
    length, cursor = compat.length_of(storage), compat.last_cursor(storage)
    is_laid_out, found = getattr(storage, "initialized", True), set()
    targets: list[Any] = []
    if not is_laid_out:
        found = files_of(storage)
    elif overwrites and not isinstance(storage, (EncodedStorage, ListStorage)):
        n, stored = compat.outer_length(storage), compat.all_slots(storage)
        leaves = compat.leaves_of(stored)
        plain = all(isinstance(each, Tensor) for each in leaves)  # no words or other objects
        targets = [compat.as_plain(each)[:n] for each in leaves] if plain else [stored[:n]]
    rows = [each.clone() for each in targets]

    def put_back() -> None:
        vars(storage).update(before)
        if not is_laid_out:
            remove_but(found, storage)
        for target, row in zip(targets, rows, strict=True):
            target.copy_(row)
        compat.set_length(storage, length)
        compat.set_last_cursor(storage, cursor)
        compat.bump_mutation_revision(storage)

    return put_back
