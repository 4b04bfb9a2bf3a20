"""Trajectories: one complete path between source and sink per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gfn_rb import keys
from gfn_rb.containers import convert, rollouts
from gfn_rb.containers.base import Container
from gfn_rb.containers.fields import ANY, BOOL, FLOATING, INT64, SIGNED, Field
from gfn_rb.containers.steps import States, Transitions
from gfn_rb.errors import ArgumentError
from gfn_rb.shapes import Bool, Float, Int64, Shaped


class Trajectories(Container):
    """Complete trajectories, one per row, padded to T steps.

    A forward row runs source, ..., x, sink: ``state[:, length - 1]`` is the terminating state x and
    ``action[:, length - 1]`` the exit action. A backward row is the exact reverse, and its action i
    is the forward action undone between states i and i + 1. After ``length`` stand the sink, action
    -1 and zeros.

    Args:
        state: States on the way.
        action: Actions between them.
        length: Number of real actions of each row, the exit action included; at least 1.
        log_reward: log R(x) in nats.
        log_prob: Log-probability of each action under the policy that drew it, in nats.
        estimator_output: What that policy's estimator gave at each step.
        condition: What each row was conditioned on.
        is_backward: Whether each row runs from the sink to the source; without it all are forward.

    Raises:
        ShapeError: If a shape or dtype does not fit.
    """

    __slots__ = ()
    _fields: ClassVar[tuple[Field, ...]] = (
        Field(keys.STATE, "n T+1 *S", ANY),
        Field(keys.ACTION, "n T *A", SIGNED),
        Field(keys.LENGTH, "n", INT64),
        Field(keys.LOG_REWARD, "n", FLOATING),
        Field(keys.LOG_PROB, "n T", FLOATING, optional=True),
        Field(keys.ESTIMATOR_OUTPUT, "n T *E", FLOATING, optional=True),
        Field(keys.CONDITION, "n *C", ANY, optional=True),
        Field(keys.IS_BACKWARD, "n", BOOL, optional=True),
    )

    def __init__(
        self,
        *,
        state: Tensor,
        action: Tensor,
        length: Tensor,
        log_reward: Tensor,
        log_prob: Tensor | None = None,
        estimator_output: Tensor | None = None,
        condition: Tensor | None = None,
        is_backward: Tensor | None = None,
    ) -> None:
        super().__init__(
            state, action, length, log_reward, log_prob, estimator_output, condition, is_backward
        )

    @classmethod
    def from_rollout(
        cls, rollout: TensorDictBase, source_state: Tensor | None = None
    ) -> Trajectories:
        """Take the finished episodes out of a TorchRL rollout or collector batch.

        See :func:`gfn_rb.containers.rollouts.trajectories_of`, which says what is read and dropped.
        """
        return cls._checked(rollouts.trajectories_of(rollout, source_state), rollout.device)

    def to_rollout(self) -> TensorDict:
        """Lay the rows out as a masked TorchRL rollout of batch size [n, T].

        See :func:`gfn_rb.containers.rollouts.rollout_of`. Backward rows are turned forward first.
        """
        return rollouts.rollout_of(self.forward().to_tensordict())

    def to_transitions(self) -> Transitions:
        """Give one row per real action; the rows of an episode stay together and in order."""
        return Transitions.wrap(convert.transitions_of(self._td))

    def to_states(self) -> States:
        """Give one row per visited state, source included and sink left out, in order."""
        return States.wrap(convert.states_of_trajectories(self._td))

    def reverse(self) -> Trajectories:
        """Turn every row around: forward rows become backward ones and the other way about.

        ``log_prob`` and ``estimator_output`` turn with their actions and still belong to the policy
        that drew them.
        """
        return self.wrap(convert.turned(self._td, torch.ones_like(self.length, dtype=torch.bool)))

    def forward(self) -> Trajectories:
        """Turn the backward rows around, so that every row runs from source to sink."""
        if self.is_backward is None:
            return self
        return self.wrap(convert.turned(self._td, self.is_backward))

    def pad_to(self, n_steps: int) -> Trajectories:
        """Pad, or cut padding, to ``n_steps`` steps.

        Raises:
            ArgumentError: If a row has more real steps.
        """
        if n_steps == self.n_steps:
            return self
        if n_steps > self.n_steps:
            return self.wrap(convert.padded(self._td, n_steps))
        longest = self._longest()
        if n_steps < longest:
            raise ArgumentError(f"n_steps={n_steps} would cut a row of {longest} real steps")
        return self.wrap(convert.cut(self._td, n_steps))

    def trim(self) -> Trajectories:
        """Cut the padding that no row needs; the result shares memory."""
        return self.pad_to(self._longest())

    @property
    def n_steps(self) -> int:
        """The padded number of steps T."""
        return self.action.shape[1]

    @property
    def real_steps(self) -> Bool[Tensor, "n T"]:
        """Which actions are real."""
        return convert.real_steps(self._td)

    @property
    def terminating_states(self) -> Shaped[Tensor, "n *S"]:
        """The terminating state x of each row."""
        rows = torch.arange(len(self), device=self.device)
        return self.state[rows, convert.exit_step(self._td) + convert.direction(self._td)]

    @property
    def state(self) -> Shaped[Tensor, "n T1 *S"]:
        """The states on the way, with T1 = T + 1."""
        return self._td.get(keys.STATE)

    @property
    def action(self) -> Shaped[Tensor, "n T *A"]:
        """The actions; -1 after ``length``."""
        return self._td.get(keys.ACTION)

    @property
    def length(self) -> Int64[Tensor, "n"]:
        """Number of real actions of each row, the exit action included."""
        return self._td.get(keys.LENGTH)

    @property
    def log_prob(self) -> Float[Tensor, "n T"] | None:
        """Log-probability of each action, in nats; 0 after ``length``."""
        return self._td.get(keys.LOG_PROB, None)

    @property
    def estimator_output(self) -> Float[Tensor, "n T *E"] | None:
        """What the policy's estimator gave at each step; 0 after ``length``."""
        return self._td.get(keys.ESTIMATOR_OUTPUT, None)

    @property
    def is_backward(self) -> Bool[Tensor, "n"] | None:
        """Whether each row runs from the sink to the source."""
        return self._td.get(keys.IS_BACKWARD, None)

    @classmethod
    def _aligned(cls, containers: Sequence[Trajectories]) -> Sequence[Trajectories]:
        n_steps = max(container.n_steps for container in containers)
        return [container.pad_to(n_steps) for container in containers]

    def _longest(self) -> int:
        return int(self.length.max()) if len(self) else 0
