"""State of whole replay buffers: read, compared and restored.

Rows are kept apart from the rest, as they move between storage and file without a copy. An
ensemble is a list of its members followed by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torchrl.data import ReplayBuffer, ReplayBufferEnsemble
from torchrl.data.replay_buffers.storages import ListStorage, TensorStorage

from gfn_rb import torchrl_compat as compat
from gfn_rb.checkpoint import parts
from gfn_rb.checkpoint.description import description_of
from gfn_rb.checkpoint.parts import COUNT, MAPPING, NONE, TEXT, Rules, expect
from gfn_rb.codec.primitives import one_line
from gfn_rb.errors import CheckpointCorruptError, CheckpointError
from gfn_rb.sharing import journal_of

State = dict[str, Any]

_LINE = 600  # characters of an error

_STATE: Rules = {
    "class": TEXT,
    "members": COUNT,
    "storage": MAPPING + NONE,
    "sampler": MAPPING,
    "writer": MAPPING,
    "transform": MAPPING,
    "generator": MAPPING + NONE,
    "batch_size": COUNT + NONE,
    "consume_after_n_samples": COUNT + NONE,
    "prefetch": COUNT,
    "queue": (tuple,),
    "draws": MAPPING + NONE,
    "description": MAPPING + NONE,
}
_DRAWS: Rules = {"sample_calls": COUNT, "samples_returned": COUNT}


@contextmanager
def snapshot_of(rb: ReplayBuffer) -> Iterator[tuple[list[State], list[Any]]]:
    """Yield the state and the rows of a buffer and its members, all of one moment.

    Nothing is copied, so until the context ends no other thread can use the buffer.
    """
    rbs = _with_members(rb)
    with _held(rbs) as queues:
        states = [_state(each, queue) for each, queue in zip(rbs, queues, strict=True)]
        yield states, [None if _members(each) else parts.stored_rows(each.storage) for each in rbs]


def restore(rb: ReplayBuffer, load: Callable[[torch.device], Any], rows: Any) -> None:
    """Restore state and rows after all of them were compared with the buffer."""
    rbs = _with_members(rb)
    devices = [getattr(each.storage, "device", None) for each in rbs]
    found = (each for each in devices if isinstance(each, torch.device) and each.type != "cpu")
    states = load(next(found, torch.device("cpu")))
    for what, each in (("state", states), ("rows", rows)):
        if not isinstance(each, list):
            raise CheckpointCorruptError(f"the {what} of the buffers is a {type(each).__name__}")
        expect("number of buffers", len(each), len(rbs))
    with _held(rbs):
        saved = [*zip(rbs, states, rows, strict=True)]
        for i, each in enumerate(saved):
            try:
                _check(*each)
            except CheckpointError as error:
                member = f"buffer {i + 1} of {len(rbs)}: " if len(rbs) > 1 else ""
                raise type(error)(_shortened(f"{member}{error}")) from error
            except Exception as error:
                raise CheckpointCorruptError(
                    _shortened(f"the state of the buffer makes no sense: {one_line(error)}")
                ) from error
        for own, state, content in saved:
            if not state["members"]:
                parts.prepare(own.storage, state["storage"], content)
        for own, state, content in saved:
            _restore(own, state, content)
            if journal := journal_of(own.storage):
                journal.record_all()


def _shortened(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _LINE else f"{line[: _LINE // 2]} ... {line[-_LINE // 2 :]}"


def _members(rb: ReplayBuffer) -> tuple[ReplayBuffer, ...]:
    return tuple(compat.member_buffers(rb)) if isinstance(rb, ReplayBufferEnsemble) else ()


def _with_members(rb: Any) -> list[ReplayBuffer]:
    if not isinstance(rb, ReplayBuffer):
        raise CheckpointError(f"rb must be a TorchRL ReplayBuffer, got {type(rb).__qualname__}")
    state_dict, known = map(inspect.unwrap, (type(rb).state_dict, ReplayBuffer.state_dict))
    if state_dict is not known:  # unwrapped, as a Ray actor wraps every method of its class
        raise CheckpointError(
            f"cannot save a {type(rb).__qualname__}: it overrides state_dict, so it holds more "
            "than storage, sampler, writer and transform"
        )
    members = _members(rb)
    if not members and not isinstance(rb.storage, (TensorStorage, ListStorage)):
        raise CheckpointError(
            f"cannot save a {type(rb.storage).__qualname__}: expected a TensorStorage or a "
            "ListStorage"
        )
    return [*(each for member in members for each in _with_members(member)), rb]


@contextmanager
def _held(rbs: list[ReplayBuffer]) -> Iterator[list[Any]]:
    """Keep other threads and processes from changing buffers; yield their prefetched batches."""
    queues = {}
    with ExitStack() as stack:
        # An ensemble, then its members in one order, or two ensembles could wait for each other.
        for rb in dict.fromkeys((rbs[-1], *sorted(rbs, key=id))):
            queues[rb] = stack.enter_context(compat.captured_prefetch(rb))
            stack.enter_context(compat.write_lock(rb))
        yield [queues[rb] for rb in rbs]


def _state(rb: ReplayBuffer, queue: tuple[Any, ...]) -> State:
    g = compat.generator_of(rb)
    return {
        "class": type(rb).__qualname__,
        "members": len(_members(rb)),
        "storage": None if _members(rb) else parts.storage_state(rb.storage),
        "sampler": parts.part_state(rb.sampler),
        "writer": parts.part_state(rb.writer),
        "transform": rb.transform.state_dict(),
        "generator": None if g is None else {"device": g.device.type, "state": g.get_state()},
        "batch_size": rb.batch_size,
        "consume_after_n_samples": compat.consume_after_n_samples(rb),
        "prefetch": compat.prefetch_capacity(rb),
        "queue": queue,
        "draws": compat.draw_counters(rb),
        "description": description_of(rb),
    }


def _check(rb: ReplayBuffer, state: State, rows: Any) -> None:
    for added in ("draws", "description"):  # which older files lack
        state.setdefault(added, None)
    parts.require("state of the buffer", state, _STATE)
    expect("number of members", state["members"], len(_members(rb)))
    for what, part in (("sampler", rb.sampler), ("writer", rb.writer)):
        expect(f"class of the {what}", state[what]["class"], type(part).__qualname__)
    if not state["members"]:
        parts.try_rows(rb.storage, state["storage"], rows)
    expect("prefetch capacity", state["prefetch"], compat.prefetch_capacity(rb))
    compat.check_prefetch(rb, state["queue"])
    if state["draws"] is not None:
        parts.require("draws of the buffer", state["draws"], _DRAWS)
    if not (state["batch_size"] or state["batch_size"] is None):
        raise CheckpointCorruptError("the batch size of the buffer is 0")
    parts.try_generator(compat.generator_of(rb), state["generator"])
    parts.try_transform(rb.transform, state["transform"])
    parts.try_part(rb.sampler, state["sampler"], rb.storage, "sampler")
    parts.try_part(rb.writer, state["writer"], rb.storage, "writer")


def _restore(rb: ReplayBuffer, state: State, rows: Any) -> None:
    # Rows first: samplers and writers note what the storage holds as their state is loaded.
    if not state["members"]:
        parts.restore_rows(rb.storage, state["storage"], rows)
    parts.load_part(rb.sampler, state["sampler"])
    parts.load_part(rb.writer, state["writer"])
    rb.transform.load_state_dict(state["transform"])
    if (saved := state["generator"]) is not None:
        if (generator := compat.generator_of(rb)) is None:
            rb.set_rng(generator := torch.Generator(saved["device"]))
        generator.set_state(saved["state"])
    # Batches of another size than the buffer draws are no use.
    is_alike = state["batch_size"] == rb.batch_size
    compat.restore_prefetch(rb, state["queue"] if is_alike else ())
    if state["draws"] is not None:
        compat.set_draw_counters(rb, state["draws"])
