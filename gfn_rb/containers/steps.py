"""Transitions and states: one step of a trajectory per row, or one visited state."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from gfn_rb import keys
from gfn_rb.containers import convert
from gfn_rb.containers.base import Container
from gfn_rb.containers.fields import ANY, BOOL, FLOATING, SIGNED, Field
from gfn_rb.shapes import Bool, Float, Shaped


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


class Transitions(Container):
    """Steps of trajectories, one per row.

    A forward row goes from ``state`` by ``action`` to ``next_state``; a backward row undoes
    ``action`` on the way from ``state`` to ``next_state``. In both directions the terminating step
    is the one between x and the sink: it alone is ``done`` and has a finite log-reward.

    Args:
        state: States the steps start from.
        action: Actions taken, or undone by a backward row.
        next_state: States the steps lead to.
        next_done: Whether the step is the terminating one, [n, 1].
        log_reward: log R(x) in nats at the terminating step, -inf elsewhere.
        log_prob: Log-probability of each action under the policy that drew it, in nats.
        condition: What each row was conditioned on.
        is_backward: Whether each row is a backward step; without it all are forward.

    Raises:
        ShapeError: If a shape or dtype does not fit.
    """

    __slots__ = ()
    _fields: ClassVar[tuple[Field, ...]] = (
        Field(keys.STATE, "n *S", ANY),
        Field(keys.ACTION, "n *A", SIGNED),
        Field(keys.NEXT_STATE, "n *S", ANY),
        Field(keys.NEXT_DONE, "n 1", BOOL),
        Field(keys.LOG_REWARD, "n", FLOATING),
        Field(keys.LOG_PROB, "n", FLOATING, optional=True),
        Field(keys.CONDITION, "n *C", ANY, optional=True),
        Field(keys.IS_BACKWARD, "n", BOOL, optional=True),
    )

    def __init__(
        self,
        *,
        state: Tensor,
        action: Tensor,
        next_state: Tensor,
        next_done: Tensor,
        log_reward: Tensor,
        log_prob: Tensor | None = None,
        condition: Tensor | None = None,
        is_backward: Tensor | None = None,
    ) -> None:
        super().__init__(
            state, action, next_state, next_done, log_reward, log_prob, condition, is_backward
        )

    @property
    def action(self) -> Shaped[Tensor, "n *A"]:
        """The action of each step."""
        return self._td.get(keys.ACTION)

    @property
    def next_state(self) -> Shaped[Tensor, "n *S"]:
        """The state each step leads to."""
        return self._td.get(keys.NEXT_STATE)

    @property
    def next_done(self) -> Bool[Tensor, "n 1"]:
        """Whether each step is the terminating one, as TorchRL stores it."""
        return self._td.get(keys.NEXT_DONE)

    @property
    def is_terminating(self) -> Bool[Tensor, "n"]:
        """Whether each step is the terminating one."""
        return self.next_done.squeeze(1)

    @property
    def log_prob(self) -> Float[Tensor, "n"] | None:
        """Log-probability of each action, in nats."""
        return self._td.get(keys.LOG_PROB, None)

    @property
    def is_backward(self) -> Bool[Tensor, "n"] | None:
        """Whether each row is a backward step."""
        return self._td.get(keys.IS_BACKWARD, None)

    @property
    def terminating_states(self) -> Shaped[Tensor, "m *S"]:
        """The terminating states x of the terminating rows, in order."""
        return self.to_states().terminating_states

    def to_states(self) -> States:
        """Give each step's end that is nearer the source: every visited state once, no sink."""
        return States.wrap(convert.states_of_transitions(self._td))
