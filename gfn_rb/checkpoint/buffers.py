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
from tensordict import is_tensor_collection
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.storages import ListStorage, TensorStorage

from gfn_rb import torchrl_compat as compat
from gfn_rb.buffer_state import held, load_part, members_of, part_state, replacing, with_members
from gfn_rb.checkpoint import parts
from gfn_rb.checkpoint.description import description_of
from gfn_rb.checkpoint.parts import COUNT, MAPPING, NONE, TEXT, Rules, expect
from gfn_rb.codec.primitives import one_line
from gfn_rb.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError

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
_PART: Rules = {"class": TEXT, "state": (object,), "remaining": COUNT + NONE}
_GENERATOR: Rules = {"device": TEXT, "state": (torch.Tensor,)}
_DRAWS: Rules = {"sample_calls": COUNT, "samples_returned": COUNT}


@contextmanager
def snapshot_of(rb: ReplayBuffer) -> Iterator[tuple[list[State], list[Any]]]:
    """Yield the state and the rows of a buffer and its members, all of one moment.

    Nothing is copied, so until the context ends no other thread can use the buffer.
    """
    _require_known(rb)
    with held(rbs := with_members(rb)) as queues:
        states = [_state(each, queue) for each, queue in zip(rbs, queues, strict=True)]
        yield (
            states,
            [None if members_of(each) else parts.stored_rows(each.storage) for each in rbs],
        )


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
    saved = [*zip(rbs, states, rows, strict=True)]
    for step in (_check, _restore):
        with replacing(rb) if step is _restore else held(rbs):
            for i, each in enumerate(saved):
                try:
                    step(*each)
                except MemoryError:
                    raise
                except CheckpointError as error:
                    member = f"buffer {i + 1} of {len(rbs)}: " if len(rbs) > 1 else ""
                    raise type(error)(_shortened(f"{member}{error}")) from error
                except Exception as error:
                    raise CheckpointCorruptError(
                        _shortened(f"the state of the buffer makes no sense: {one_line(error)}")
                    ) from error


def _shortened(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _LINE else f"{line[: _LINE // 2]} ... {line[-_LINE // 2 :]}"


def _require_known(rb: Any) -> None:
    """Raise unless a file can hold all that a buffer and its members consist of."""
    if not isinstance(rb, ReplayBuffer):
        raise CheckpointError(f"rb must be a TorchRL ReplayBuffer, got {type(rb).__qualname__}")
    for each in with_members(rb):
        state_dict, known = map(inspect.unwrap, (type(each).state_dict, ReplayBuffer.state_dict))
        if state_dict is not known:  # unwrapped, as a Ray actor wraps every method of its class
            raise CheckpointError(
                f"cannot save a {type(each).__qualname__}: it overrides state_dict, so it holds "
                "more than storage, sampler, writer and transform"
            )
        if not (members_of(each) or isinstance(each.storage, (TensorStorage, ListStorage))):
            raise CheckpointError(
                f"cannot save a {type(each.storage).__qualname__}: expected a TensorStorage or a "
                "ListStorage"
            )


def _state(rb: ReplayBuffer, queue: tuple[Any, ...]) -> State:
    g = compat.generator_of(rb)
    return {
        "class": type(rb).__qualname__,
        "members": len(members_of(rb)),
        "storage": None if members_of(rb) else parts.storage_state(rb.storage),
        "sampler": part_state(rb.sampler),
        "writer": part_state(rb.writer),
        "transform": rb.transform.state_dict(),
        "generator": None if g is None else {"device": g.device.type, "state": g.get_state()},
        **compat.options_of(rb),
        "prefetch": compat.prefetch_capacity(rb),
        "queue": queue,
        "draws": compat.draw_counters(rb),
        "description": description_of(rb),
    }


def _check(rb: ReplayBuffer, state: State, rows: Any) -> None:
    """Raise unless a state is one of such a buffer; whether it loads is seen by loading it."""
    for added in ("draws", "description"):  # which older files lack
        state.setdefault(added, None)
    parts.require("state of the buffer", state, _STATE)
    expect("number of members", state["members"], len(members_of(rb)))
    for what, part in (("sampler", rb.sampler), ("writer", rb.writer)):
        parts.require(f"state of the {what}", state[what], _PART)
        expect(f"class of the {what}", state[what]["class"], type(part).__qualname__)
    if not state["members"]:
        parts.try_rows(rb.storage, state["storage"], rows)
    expect("prefetch capacity", state["prefetch"], compat.prefetch_capacity(rb))
    _check_queue(rb, state["queue"])
    if state["draws"] is not None:
        parts.require("draws of the buffer", state["draws"], _DRAWS)
    if not (state["batch_size"] or state["batch_size"] is None):
        raise CheckpointCorruptError("the batch size of the buffer is 0")
    own, saved = compat.generator_of(rb), state["generator"]
    if saved is not None:
        parts.require("state of the generator", saved, _GENERATOR)
        if own is not None:
            expect("device of the generator", saved["device"], own.device.type)
    elif own is not None:
        expect("generator", "the global one", "its own")
    came, present = map(_outline, (state["transform"], rb.transform.state_dict()))
    expect("set of transform entries", sorted(came), sorted(present))
    for name, each in came.items():
        expect(f"transform entry {name}", each, present[name])


def _check_queue(rb: ReplayBuffer, queue: tuple[Any, ...]) -> None:
    """Raise unless prefetched batches are such as the buffer draws."""
    compat.check_prefetch(rb, queue)
    kinds = () if isinstance(rb, TensorDictReplayBuffer) else (torch.Tensor, dict, tuple)
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


def _outline(state: dict[str, Any]) -> dict[str, Any]:
    """Return what the entries of a state have to have in common with those of another."""
    return {
        name: [*each.shape] if isinstance(each, torch.Tensor) else each
        for name, each in state.items()
        if isinstance(each, (torch.Tensor, str))
    }


def _restore(rb: ReplayBuffer, state: State, rows: Any) -> None:
    # Rows first: samplers and writers note what the storage holds as their state is loaded.
    if not state["members"]:
        parts.restore_rows(rb.storage, state["storage"], rows)
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
    # Batches of another size than the buffer draws are no use.
    is_alike = state["batch_size"] == rb.batch_size
    compat.restore_prefetch(rb, state["queue"] if is_alike else ())
    if state["draws"] is not None:
        compat.set_draw_counters(rb, state["draws"])


@contextmanager
def _loading(what: str, part: Any) -> Iterator[None]:
    try:
        yield
    except (CheckpointMismatchError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointMismatchError(
            f"the state of the {what} does not load into {type(part).__name__}: {one_line(error)}"
        ) from error
