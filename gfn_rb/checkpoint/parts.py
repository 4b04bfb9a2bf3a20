"""The parts of a buffer that hold state apart from the rows: sampler, writer, transform, generator.

Each has three functions: one that takes its state, one that raises unless a state fits and
changes nothing, and one that puts a state back.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler, SamplerEnsemble
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer, WriterEnsemble
from torchrl.envs.transforms import Transform

from gfn_rb import torchrl_compat as compat
from gfn_rb.codec.primitives import one_line
from gfn_rb.errors import CheckpointError, CheckpointMismatchError

# Their state holds that of their members by number, which are saved on their own.
_ENSEMBLES = (SamplerEnsemble, WriterEnsemble)


def expect(what: str, came: Any, expected: Any) -> None:
    """Raise :class:`CheckpointMismatchError` unless the checkpoint holds what the buffer has."""
    if came != expected:
        raise CheckpointMismatchError(
            f"the {what} of the checkpoint is {came}, expected {expected} as in the buffer"
        )


# Samplers and writers.


def part_state(part: Sampler | Writer) -> dict[str, Any]:
    """Return the class and state of a sampler or writer.

    Raises:
        CheckpointError: it has no ``state_dict``.
    """
    name = type(part).__qualname__
    try:
        state = part.state_dict()
    except NotImplementedError:
        raise CheckpointError(f"cannot save a buffer with {name}: it has no state_dict") from None
    if isinstance(part, _ENSEMBLES):
        state = {key: value for key, value in state.items() if not key.isdigit()} or None
    return {"class": name, "state": state, "remaining": compat.remaining_batches(part)}


def try_part(part: Sampler | Writer, state: dict[str, Any], storage: Storage, what: str) -> None:
    """Raise unless a state fits. It is loaded for a trial, and the present one loaded again.

    Args:
        part: the sampler or writer.
        state: from :func:`part_state`.
        storage: what the part works on, as stamps of its slots may be part of the state.
        what: how errors call it.

    Raises:
        CheckpointMismatchError: it does not load.
    """
    present, generations = deepcopy(part_state(part)), compat.slot_generations(storage)
    try:
        load_part(part, deepcopy(state))
    except CheckpointMismatchError:
        raise
    except Exception as error:
        raise CheckpointMismatchError(
            f"the state of the {what} does not load into {state['class']}: {one_line(error)}"
        ) from error
    finally:
        load_part(part, present)
        compat.set_slot_generations(storage, generations)


def load_part(part: Sampler | Writer, state: dict[str, Any]) -> None:
    """Put a state back."""
    if state["state"] is not None:
        members = part.state_dict() if isinstance(part, _ENSEMBLES) else {}
        part.load_state_dict({**members, **state["state"]})
    compat.set_remaining_batches(part, state["remaining"])


# Transforms.


def try_transform(transform: Transform, state: dict[str, Any]) -> None:
    """Raise unless a state has the entries that a transform has.

    Raises:
        CheckpointMismatchError: entries are missing, unknown or of another shape, or say in words
            that the rows are of another form.
    """
    present = transform.state_dict()
    expect("set of transform entries", sorted(state), sorted(present))
    for name, value in present.items():
        if isinstance(value, Tensor) and isinstance(state[name], Tensor):
            expect(f"shape of transform entry {name}", state[name].shape, value.shape)
        elif isinstance(value, str):
            expect(f"transform entry {name}", state[name], value)


# Generators.


def generator_state(generator: torch.Generator | None) -> dict[str, Any] | None:
    """Return the kind and state of a random generator."""
    if generator is None:
        return None
    return {"device": generator.device.type, "state": generator.get_state()}


def try_generator(generator: torch.Generator | None, state: dict[str, Any] | None) -> None:
    """Raise unless a state fits.

    Raises:
        CheckpointMismatchError: the saved buffer used the global generator and this one does
            not, or they are of different devices.
    """
    if state is None:
        expect("generator", "the global one", "the global one" if generator is None else "its own")
        return
    if generator is not None:
        expect("device of the generator", state["device"], generator.device.type)
    try:
        torch.Generator(state["device"]).set_state(state["state"])
    except RuntimeError as error:
        raise CheckpointMismatchError(
            f"the generator of the checkpoint cannot be restored: {one_line(error)}"
        ) from error


def restore_generator(rb: ReplayBuffer, state: dict[str, Any] | None) -> None:
    """Put the state back into the buffer's generator, which is made if it has none."""
    if state is None:
        return
    generator = compat.generator_of(rb)
    if generator is None:
        generator = torch.Generator(state["device"])
        rb.set_rng(generator)
    generator.set_state(state["state"])
