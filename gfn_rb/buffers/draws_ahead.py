"""Batches that a buffer draws ahead of their use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, overload

from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler

from gfn_rb import torchrl_compat as compat
from gfn_rb.errors import CheckpointMismatchError, GfnRbError


class DrawsAhead(ReplayBuffer):
    """A replay buffer whose prefetched batches are always draws from its present content.

    Classes that draw rows inherit from it after the TorchRL class that it amends.
    """

    @overload
    def sample(
        self, batch_size: int | None = None, return_info: Literal[False] = False, **waiting: Any
    ) -> TensorDictBase: ...

    @overload
    def sample(
        self, batch_size: int | None = None, *, return_info: Literal[True], **waiting: Any
    ) -> tuple[TensorDictBase, dict[str, Any]]: ...

    def sample(
        self, batch_size: int | None = None, return_info: bool = False, **waiting: Any
    ) -> Any:
        """Draw a batch. A batch of another size than the buffer's is never drawn ahead.

        Args:
            batch_size: number of rows. Default: the batch size of the buffer.
            return_info: whether to return what the sampler says of the draw, too.
            **waiting: ``wait``, ``timeout`` in seconds and ``cancel_event`` of TorchRL after
                0.14.1, which wait until enough rows are stored.
        """
        if not self._prefetch or batch_size in (None, self._batch_size):
            return super().sample(batch_size, return_info, **waiting)
        rows, info = compat.drawn_now(self, batch_size, **waiting)
        return (rows, info) if return_info else rows

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replace the sampler, and return the former one."""
        former = super().set_sampler(sampler)
        compat.clear_prefetched(self)
        return former

    def empty(self, empty_write_count: bool = True) -> None:
        """Remove all rows.

        Args:
            empty_write_count: whether to reset the counts of rows too.
        """
        from gfn_rb.buffers.state import replacing  # which few programs need

        with replacing(self, overwrites=False):
            super().empty(empty_write_count)
            if empty_write_count:
                self._forget_counts()
        compat.clear_prefetched(self)  # after the locks, for which a batch being drawn waits

    def _forget_counts(self) -> None:
        """Forget how many rows were offered and drawn, in buffers that count them."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned. After an error the buffer is unchanged.

        Raises:
            CheckpointMismatchError: it was of a buffer of other rows, parts or capacity.
        """
        with _restoring(self):
            super().load_state_dict(state_dict)

    def loads(self, path: Any) -> None:
        """Load what ``dumps`` saved in a folder; see :meth:`load_state_dict`."""
        with _restoring(self):
            super().loads(path)


@contextmanager
def _restoring(rb: ReplayBuffer) -> Iterator[None]:
    """Restore a buffer in whole or not at all, and say of PyTorch's errors that it is another."""
    from gfn_rb.buffers.state import replacing  # which few programs need

    try:
        with replacing(rb):
            yield
    except GfnRbError:
        raise
    except RuntimeError as error:
        capacity = getattr(rb.storage, "max_size", None)
        raise CheckpointMismatchError(
            f"the buffer of capacity {capacity} cannot hold what was saved: {error}"
        ) from error
