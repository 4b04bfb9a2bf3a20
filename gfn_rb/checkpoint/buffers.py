"""State of whole replay buffers: read, compared and restored.

Rows are kept apart from the rest, as they move between storage and file without a copy. An
ensemble is a list of its members followed by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase, is_leaf_nontensor, is_tensor_collection
from torch import Tensor
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.storages import Storage, TensorStorage

from gfn_rb import torchrl_compat as compat
from gfn_rb.buffers.state import held, load_part, part_state, replacing, with_members
from gfn_rb.checkpoint.description import description_of
from gfn_rb.codec.primitives import is_out_of_memory, one_line
from gfn_rb.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    KeyMismatchError,
    ShapeError,
)
from gfn_rb.storages.memmaps import lay_out
from gfn_rb.storages.tensors import EncodedStorage, RowEntry, require_same_entries
from gfn_rb.torchrl_compat import members_of


def expect(what: str, came: Any, expected: Any) -> None:
    """Raise :class:`CheckpointMismatchError` unless the checkpoint holds what the buffer has."""
    if came != expected:
        hint = "; rb.extend(open_buffer(path)[:]) takes its rows" * (what == "capacity")
        raise CheckpointMismatchError(
            f"the {what} of the checkpoint is {came}, expected {expected} as in the buffer{hint}"
        )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _rows_in_use(storage: Storage) -> Any:
    """Return the rows in use, as a view on the storage; None before the first was written."""
    if not storage.initialized:
        return None
    if isinstance(storage, EncodedStorage):
        return storage.content()
    held = compat.all_slots(storage)
    if not isinstance(held, (Tensor, TensorDictBase)):
        raise CheckpointError(
            f"cannot save rows: a {type(storage).__name__} holds a {type(held).__name__}, expected "
            "tensors or TensorDicts"
        )
    rows = held[: len(storage)]
    _columns(rows)
    return rows


def _check_rows(storage: Storage, state: dict[str, Any], rows: Any) -> None:
    """Raise unless a state and rows fit a storage."""
    expect("capacity", state["capacity"], storage.max_size)
    if isinstance(storage, EncodedStorage):
        n = storage.check_content(rows or {})
    else:
        n = 0 if rows is None else len(rows)
    length, cursor = state["length"], state["cursor"]
    if not _is_count(length) or length != n or n > storage.max_size:
        raise CheckpointCorruptError(f"the storage has length {length!r:.80}, and {n} rows")
    if cursor is not None and not (_is_count(cursor) and cursor < max(storage.max_size, 1)):
        raise CheckpointCorruptError(f"the storage was written to at slot {cursor!r:.80}")
    if rows is not None and not isinstance(storage, EncodedStorage):
        came = _entries(rows)
        if storage.initialized:
            try:
                require_same_entries(came, _entries(compat.all_slots(storage)))
            except (KeyMismatchError, ShapeError) as error:
                raise CheckpointMismatchError(f"rows of the checkpoint: {error}") from error


def _restore_rows(storage: Storage, state: dict[str, Any], rows: Any) -> None:
    """Replace the content of a storage."""
    if isinstance(storage, EncodedStorage):
        storage.restore(rows or {})
    elif state["length"]:
        try:
            if not storage.initialized:
                lay_out(storage, rows[0])
        except Exception as error:
            raise CheckpointError(f"the storage cannot be allocated: {one_line(error)}") from error
        # Into the columns that are there: other processes and memory maps have them open.
        targets = _columns(compat.all_slots(storage))
        for name, column in _columns(rows).items():
            compat.as_plain(targets[name])[: len(column)].copy_(column)
    # After the rows, so that samplers and writers that see the new revision read the new rows.
    compat.set_length(storage, state["length"])
    compat.set_last_cursor(storage, state["cursor"])
    compat.bump_mutation_revision(storage)


def _columns(rows: Any) -> dict[Any, Tensor]:
    """Return the columns of rows by name. Rows that are a tensor are one column."""
    if not isinstance(rows, TensorDictBase):
        return {"": rows}
    columns = dict(rows.items(True, True, is_leaf_nontensor))
    for name, column in columns.items():
        if not isinstance(column, Tensor):
            raise CheckpointError(
                f"cannot save or load rows: {name!r} of a TensorStorage holds text or other "
                "objects, expected tensors: a RaggedStorage with text can be saved"
            )
    return columns


def _entries(rows: Any) -> dict[Any, RowEntry]:
    return {name: (tuple(each.shape[1:]), each.dtype) for name, each in _columns(rows).items()}


# Whole buffers.

State = dict[str, Any]


@contextmanager
def snapshot_of(rb: ReplayBuffer) -> Iterator[tuple[list[State], list[Any]]]:
    """Yield the state and the rows of a buffer and its members, all of one moment.

    Nothing is copied, so until the context ends no other thread can use the buffer.
    """
    _require_known(rb)
    with held(rbs := with_members(rb)) as queues:
        states = [_state(each, queue) for each, queue in zip(rbs, queues, strict=True)]
        yield states, [None if members_of(each) else _rows_in_use(each.storage) for each in rbs]


def restore(rb: ReplayBuffer, load: Callable[[torch.device], Any], rows: Any) -> None:
    """Restore state and rows of a buffer and its members, all of them or after an error none."""
    _require_known(rb)
    rbs = with_members(rb)
    devices = [getattr(each.storage, "device", None) for each in rbs]
    found = (each for each in devices if isinstance(each, torch.device) and each.type != "cpu")
    states = load(next(found, torch.device("cpu")))
    for what, each in (("state", states), ("rows", rows)):
        if not isinstance(each, list):
            raise CheckpointCorruptError(f"the {what} of the buffers is a {type(each).__name__}")
        expect("number of buffers", len(each), len(rbs))
    # All buffers are checked before the first is changed. Loading may still fail: until the last is
    # restored, ``replacing`` keeps copies of what there was, and puts them back.
    saved = [*zip(rbs, states, rows, strict=True)]
    for step, block in ((_check, held(rbs)), (_restore, replacing(rb))):
        with block:
            for i, each in enumerate(saved):
                try:
                    step(*each)
                except CheckpointError as error:
                    member = f"buffer {i + 1} of {len(rbs)}: " if len(rbs) > 1 else ""
                    raise type(error)(one_line(f"{member}{error}")) from error
                except Exception as error:
                    if is_out_of_memory(error):
                        raise
                    raise CheckpointCorruptError(
                        f"the state of the buffer makes no sense: {one_line(error)}"
                    ) from error


def _require_known(rb: Any) -> None:
    """Raise unless a file can hold all that a buffer and its members consist of."""
    if not isinstance(rb, ReplayBuffer):
        hint = ""
        if isinstance(rb, (list, tuple)):
            hint = ": MergedReplayBuffer(*buffers) can be saved"
        elif hasattr(rb, "state_dict"):
            hint = ": pass its state beside a buffer, model=model.state_dict(), or to save_state"
        raise CheckpointError(
            f"rb must be a TorchRL ReplayBuffer, got {type(rb).__qualname__}{hint}"
        )
    for each in with_members(rb):
        # A class with a state of its own would lose it without a word.
        state_dict, known = map(inspect.unwrap, (type(each).state_dict, ReplayBuffer.state_dict))
        if state_dict is not known:  # unwrapped, as a Ray actor wraps every method of its class
            raise CheckpointError(
                f"cannot save a {type(each).__qualname__}: it overrides state_dict, so it holds "
                "more than storage, sampler, writer and transform"
            )
        storage = each.storage
        is_known = isinstance(storage, TensorStorage) and storage.ndim == 1
        if not (members_of(each) or is_known):
            raise CheckpointError(
                f"cannot save a {type(storage).__qualname__} of ndim={storage.ndim}, expected a "
                "TensorStorage of ndim=1"
            )


def _state(rb: ReplayBuffer, queue: tuple[Any, ...]) -> State:
    g = compat.generator_of(rb)
    return {
        "members": len(members_of(rb)),
        "storage": None
        if members_of(rb)
        else {
            "capacity": rb.storage.max_size,
            "length": len(rb.storage),
            "cursor": compat.last_cursor(rb.storage),
        },
        "sampler": part_state(rb.sampler),
        "writer": part_state(rb.writer),
        "transform": rb.transform.state_dict(),
        "generator": None if g is None else {"device": g.device.type, "state": g.get_state()},
        **compat.options_of(rb),
        "draws": compat.sample_counts(rb),
        "prefetch": compat.prefetch_capacity(rb),
        "queue": queue,
        "description": description_of(rb),
    }


def _check(rb: ReplayBuffer, state: State, rows: Any) -> None:
    """Raise unless a state is one of such a buffer; whether it loads is seen by loading it."""
    expect("number of members", state["members"], len(members_of(rb)))
    for what, part in (("sampler", rb.sampler), ("writer", rb.writer)):
        expect(f"class of the {what}", state[what]["class"], type(part).__qualname__)
    if not state["members"]:
        _check_rows(rb.storage, state["storage"], rows)
    expect("prefetch capacity", state["prefetch"], compat.prefetch_capacity(rb))
    _check_queue(rb, state["queue"])
    for part in ("sampler", "writer"):
        if not _is_count(count := state[part]["remaining"] or 0):
            raise CheckpointCorruptError(f"a number of batches is {count!r:.80}")
    if not all(map(_is_count, state.get("draws", ()))):
        raise CheckpointCorruptError(f"numbers of draws are {state['draws']!r:.80}")
    own, saved = compat.generator_of(rb), state["generator"]
    if saved is None and own is not None:
        expect("generator", "the global one", "its own")
    if saved is not None and own is not None:
        expect("device of the generator", saved["device"], own.device.type)


def _check_queue(rb: ReplayBuffer, queue: tuple[Any, ...]) -> None:
    """Raise unless prefetched batches are such as the buffer draws."""
    kinds = () if isinstance(rb, TensorDictReplayBuffer) else (torch.Tensor, dict, tuple)
    # They are handed to the user as they came, so that a file must not hold anything else.
    for batch in queue:
        is_pair = isinstance(batch, tuple) and len(batch) == 2
        if not (is_pair and (isinstance(batch[1], dict) or is_tensor_collection(batch[1]))):
            raise TypeError("a prefetched batch is no pair of rows and what is known of them")
        rows, known = batch
        if not is_tensor_collection(rows):
            if not isinstance(rows, kinds):
                raise TypeError("a prefetched batch has no rows")
            continue
        for name, value in known.items():
            if not isinstance(name, str):
                raise TypeError(f"a prefetched batch has {name!r}, expected a name")
            of_rows = torch.as_tensor(torch.stack(value, -1) if isinstance(value, tuple) else value)
            if of_rows.ndim and of_rows.shape[:1] != rows.shape[:1]:
                raise ValueError(f"a prefetched batch has {name!r} of other rows")


def _restore(rb: ReplayBuffer, state: State, rows: Any) -> None:
    # Rows first: samplers and writers note what the storage holds as their state is loaded.
    if not state["members"]:
        _restore_rows(rb.storage, state["storage"], rows)
    for what, part in (("sampler", rb.sampler), ("writer", rb.writer)):
        with _loading(what, part):
            load_part(part, state[what])
    with _loading("transform", rb.transform):
        rb.transform.load_state_dict(state["transform"])
    if (saved := state["generator"]) is not None:
        generator = compat.generator_of(rb)
        with _loading("generator", generator):
            generator = generator or torch.Generator(saved["device"])
            generator.set_state(saved["state"])
        if compat.generator_of(rb) is None:
            rb.set_rng(generator)
    compat.set_sample_counts(rb, state.get("draws", ()))
    # Batches of another size than the buffer draws are no use.
    is_alike = state["batch_size"] == rb.batch_size
    compat.restore_prefetch(rb, state["queue"] if is_alike else ())


@contextmanager
def _loading(what: str, part: Any) -> Iterator[None]:
    try:
        yield
    except CheckpointMismatchError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointMismatchError(
            f"the state of the {what} does not load into {type(part).__name__}: {one_line(error)}"
        ) from error
