"""States: one visited state per row, what flow-matching losses and state buffers work on."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from gfn_rb import keys
from gfn_rb.containers.base import Container
from gfn_rb.containers.fields import ANY, BOOL, FLOATING, Field
from gfn_rb.shapes import Bool, Shaped


class States(Container):
    """Visited states without the sink, one per row.

    Args:
        state: The states.
        is_terminating: Whether an object ends here: the row stands for the visit of x that the
            exit action follows.
        log_reward: log R(x) in nats where terminating, -inf elsewhere.
        condition: What each row was conditioned on.

    Raises:
        ShapeError: If a shape or dtype does not fit.
    """

    __slots__ = ()
    _fields: ClassVar[tuple[Field, ...]] = (
        Field(keys.STATE, "n *S", ANY),
        Field(keys.IS_TERMINATING, "n", BOOL),
        Field(keys.LOG_REWARD, "n", FLOATING),
        Field(keys.CONDITION, "n *C", ANY, optional=True),
    )

    def __init__(
        self,
        *,
        state: Tensor,
        is_terminating: Tensor,
        log_reward: Tensor,
        condition: Tensor | None = None,
    ) -> None:
        super().__init__(state, is_terminating, log_reward, condition)

    @property
    def is_terminating(self) -> Bool[Tensor, "n"]:
        """Whether the exit action follows the row's state."""
        return self._td.get(keys.IS_TERMINATING)

    @property
    def terminating_states(self) -> Shaped[Tensor, "m *S"]:
        """The states of the terminating rows, in order."""
        return self.state[self.is_terminating]
