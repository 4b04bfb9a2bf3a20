"""Transitions and states: one step of a trajectory per row, or one visited state."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gfn_rb import keys
from gfn_rb.containers import convert
from gfn_rb.containers.base import Container
from gfn_rb.containers.fields import ANY, BOOL, FLOATING, SIGNED, field
from gfn_rb.containers.objects import terminating_states
from gfn_rb.shapes import Bool, Shaped


class States(Container):
    """Visited states without the sink, one per row.

    Args:
        state: states, [n, *S].
        is_terminating: whether the exit action follows, bool [n].
        log_reward: log R(x) in nats where terminating, -inf elsewhere, floating point [n].
        condition: condition of each row, [n, *C]. Default: None, for environments without.

    Raises:
        ShapeError: a shape or dtype does not fit.
    """

    __slots__ = ()
    state: Tensor = field(keys.STATE, "n *S", ANY)
    is_terminating: Tensor = field(keys.IS_TERMINATING, "n", BOOL)
    log_reward: Tensor = field(keys.LOG_REWARD, "n", FLOATING)
    condition: Tensor | None = field(keys.CONDITION, "n *C", ANY, default=None)

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
        state: states that the steps start from, [n, *S].
        action: actions taken, or undone by a backward row, [n, *A].
        next_state: states that the steps lead to, [n, *S].
        next_done: whether the step is the terminating one, bool [n, 1].
        log_reward: log R(x) in nats at the terminating step, -inf elsewhere, floating point [n].
        log_prob: log-probability in nats of each action when it was drawn, [n]. Default: None.
        condition: condition of each row, [n, *C]. Default: None, for environments without.
        is_backward: whether each row is a backward step, bool [n]. Default: None, all are forward.

    Raises:
        ShapeError: a shape or dtype does not fit.
    """

    __slots__ = ()
    state: Tensor = field(keys.STATE, "n *S", ANY)
    action: Tensor = field(keys.ACTION, "n *A", SIGNED)
    next_state: Tensor = field(keys.NEXT_STATE, "n *S", ANY)
    next_done: Tensor = field(keys.NEXT_DONE, "n 1", BOOL)
    log_reward: Tensor = field(keys.LOG_REWARD, "n", FLOATING)
    log_prob: Tensor | None = field(keys.LOG_PROB, "n", FLOATING, default=None)
    condition: Tensor | None = field(keys.CONDITION, "n *C", ANY, default=None)
    is_backward: Tensor | None = field(keys.IS_BACKWARD, "n", BOOL, default=None)

    @property
    def is_terminating(self) -> Bool[Tensor, "n"]:
        """Whether each step is the terminating one."""
        return self.next_done.squeeze(1)

    @property
    def terminating_states(self) -> Shaped[Tensor, "m *S"]:
        """The terminating states x of the terminating rows, in order."""
        return self.to_states().terminating_states

    def to_states(self) -> States:
        """Give each step's end that is nearer the source: every visited state once, no sink."""
        return States.wrap(convert.states_of_transitions(self._td))


def reduce_to_states(rows: TensorDictBase) -> TensorDictBase:
    """Reduce items of any kind to the terminating states among them: fields of :class:`States`."""
    states = terminating_states(rows)
    if states is None:
        reduced = Transitions.from_tensordict(rows).to_states().to_tensordict()
        return reduced[reduced.get(keys.IS_TERMINATING)]
    state, whole = states
    if whole is None:
        whole = torch.ones(len(state), dtype=torch.bool, device=state.device)
    reduced = rows.select(keys.LOG_REWARD, keys.CONDITION, strict=False)
    reduced.set(keys.STATE, state).set(keys.IS_TERMINATING, whole)
    return reduced if bool(whole.all()) else reduced[whole]
