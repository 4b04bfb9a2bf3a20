"""When and where a manager saves."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any

from torchrl.data import ReplayBuffer

from gfn_rb.checkpoint import load_checkpoint, load_state, save_checkpoint, save_state
from gfn_rb.errors import ArgumentError, CheckpointError

_MANAGER = "manager"


class ManagerFile:
    """The checkpoint of a manager: its buffer, if it has one, and all else it knows.

    Args:
        path: the file; None for none.
        every: save after so many batches; None for never by itself.
        rb: the manager's buffer.

    Raises:
        ArgumentError: ``every`` is below 1, or there is no file.
    """

    def __init__(
        self, path: str | PathLike[str] | None, every: int | None, rb: ReplayBuffer | None
    ) -> None:
        if every is not None and (path is None or every < 1):
            raise ArgumentError(
                "checkpoint_every must be at least 1 and needs checkpoint, got "
                f"{every} with checkpoint={path!r}"
            )
        self.path = None if path is None else fspath(path)
        self._every = every
        self._rb = rb
        self._last = 0  # batches, when it was last tried to save

    def due(self, batches: int) -> bool:
        """Return whether it is time to save.

        Args:
            batches: how many were answered.
        """
        return self._every is not None and batches - self._last >= self._every

    def save(self, state: dict[str, Any]) -> str:
        """Save the buffer, and what else there is.

        Args:
            state: of the manager, with the number of ``batches``.

        Returns:
            The file.

        Raises:
            CheckpointError: there is no file to save to, or it cannot be written.
        """
        if self.path is None:
            raise CheckpointError("the manager has no file to save to: pass checkpoint=")
        self._last = state["batches"]  # what fails now is not tried at each step
        if self._rb is None:
            save_state(self.path, {_MANAGER: state})
        else:
            save_checkpoint(self.path, self._rb, **{_MANAGER: state})
        return self.path

    def load(self, path: str | PathLike[str] | None) -> dict[str, Any]:
        """Restore the buffer, and return what else was saved.

        Args:
            path: the file; None for the one to save to.

        Raises:
            CheckpointError: it cannot be read, or is of another kind of manager.
        """
        path = self.path if path is None else path
        if path is None:
            raise CheckpointError("the manager has no file to load from: pass path or checkpoint=")
        saved = load_state(path)
        if _MANAGER not in saved:
            raise CheckpointError(f"{fspath(path)} holds no manager, but {sorted(saved)}")
        if self._rb is not None:
            load_checkpoint(path, self._rb)
        state: dict[str, Any] = saved[_MANAGER]
        self._last = state["batches"]
        return state
