"""The options that all presets take."""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase
from torchrl.data.replay_buffers.sample_units import SampleUnit
from torchrl.data.replay_buffers.storages import Storage
from torchrl.envs.transforms import Transform
from typing_extensions import TypedDict

from gfn_rb.buffers.rate_limiter import RateLimiter
from gfn_rb.writers.features import Unique

P = TypeVar("P", bound=Callable[..., Any])
StateForm = Literal["narrow", "rebuild"]


@runtime_checkable
class Environment(Protocol):
    """The part of an environment that buffers read; ``GFNEnv``, which has it, documents it.

    Attributes are properties here: a checker then also takes narrower types.
    """

    @property
    def source_state(self) -> Tensor:
        """State in which every trajectory begins, of shape S."""

    @property
    def state_shape(self) -> torch.Size:
        """Shape S of a state."""

    @property
    def state_dtype(self) -> torch.dtype:
        """Dtype of states."""

    @property
    def state_range(self) -> tuple[int, int] | None:
        """Lowest and highest number in a state, padding included; None if unbounded."""

    @property
    def is_deterministic(self) -> bool:
        """Whether an action leads from a state to one state."""

    @property
    def n_actions(self) -> int:
        """Number of actions, the exit action included."""

    @property
    def exit_action(self) -> int:
        """Number of the action that ends a trajectory."""

    @property
    def action_shape(self) -> torch.Size:
        """Shape of an action."""

    @property
    def dummy_action(self) -> int:
        """Action that pads trajectories."""

    @property
    def max_length(self) -> int:
        """Highest number of actions in a trajectory."""

    def states_of(self, action: Any, length: Any) -> Tensor:
        """Return the states [n, T + 1, *S] that actions [n, T, *A] lead through."""

    def check_state(self, state: Any) -> None:
        """Raise unless states [n, *S] are states of this environment."""


class BufferOptions(TypedDict, total=False):
    """Keywords of every preset. All may be left out.

    ``sample_unit``, ``dim_extend``, ``checkpointer``, ``compilable``, ``delayed_init``,
    ``service_backend_options``, ``transport`` and ``transport_options`` are as TorchRL's
    ``ReplayBuffer`` takes them.

    Attributes:
        storage: storage of ``capacity`` rows, such as a :class:`~gfn_rb.RowMemmapStorage`. Default:
            a :class:`~gfn_rb.RowTensorStorage`.
        device: device of the default storage. Default: ``"cpu"``.
        compact: ``"narrow"`` stores rows in the smallest integers that ``env`` needs.
            ``"rebuild"``, for trajectories alone, also leaves out their states. Drawn rows equal
            added ones. Default: None, rows are stored as they are.
        env: environment of the rows; required with ``compact``. Default: None.
        group: what rows are grouped by: a key, a list of keys, or a callable from rows [n] to int64
            fingerprints [n] or [n, d]. At most ``per_group`` rows of each group are kept. Default:
            None, no groups.
        per_group: number of rows to keep of each group, at least 1; required with ``group``.
        transform: ``Transform`` or callable, applied first when rows are added and last when they
            are drawn. Default: None.
        statistics: whether ``rb.stats()`` counts the rows that were added and drawn. Default:
            False.
        rate_limiter: limiter that keeps draws in proportion to added rows. Default: None.
        max_age: highest age of a row in policy versions, at least 0; older rows are removed. Rows
            need a ``policy_version``. Default: None, any age.
        max_uses: highest number of draws of a row, at least 1; the draw that reaches it removes the
            row. Default: None, any number.
        batch_size: number of rows that ``sample()`` draws, at least 1. Default: None, which
            requires ``sample(n)``.
        prefetch: number of batches to draw ahead, at least 0; above 0 needs ``batch_size``.
            Default: 0.
        generator: generator of the draws, on the device of the rows. Default: PyTorch's global
            generator.
        shared: whether several processes use the buffer, which needs a lock. Default: False.
        service_backend: ``"direct"``, or ``"ray"``, which creates the buffer in a Ray actor.
            Default: ``"direct"``.
        priority_key: entry of a batch that holds new priorities, for
            :class:`~gfn_rb.PrioritySampler`. Default: ``"td_error"``.
        collate_fn: callable applied to drawn rows. Default: none is needed.
        pin_memory: whether drawn rows are placed in pinned memory. Default: False.
        consume_after_n_samples: TorchRL's ``max_uses``, for its own samplers and writers. Default:
            None, never.
        transform_factory: callable that makes the transform in the process of the buffer; replaces
            the transforms of the preset. Default: None.
    """

    storage: Storage | None
    device: torch.device | str
    compact: StateForm | None
    env: Environment | None
    group: Unique
    per_group: int | None
    transform: Transform | Callable[[Any], Any] | None
    statistics: bool
    rate_limiter: RateLimiter | None
    max_age: int | None
    max_uses: int | None
    batch_size: int | None
    prefetch: int | None
    generator: torch.Generator | None
    shared: bool
    service_backend: Literal["direct", "ray"]
    priority_key: str
    collate_fn: Callable[[Any], Any] | None
    pin_memory: bool
    sample_unit: SampleUnit | None
    transform_factory: Callable[[], Any] | None
    dim_extend: int | None
    checkpointer: StorageCheckpointerBase | Callable[[], StorageCheckpointerBase] | None
    consume_after_n_samples: int | None
    compilable: bool | None
    delayed_init: bool | None
    service_backend_options: dict[str, Any] | None
    transport: Literal["auto", "direct", "ray", "distributed"]
    transport_options: dict[str, Any] | None


def with_options(preset: P) -> P:
    """Append the keywords that all presets take to the docstring of one, as ``help`` shows it."""
    options = cleandoc(BufferOptions.__doc__ or "").partition("Attributes:\n")[2]
    preset.__doc__ = f"{cleandoc(preset.__doc__ or '')}\n\nKeyword Args:\n{options}"
    return preset
