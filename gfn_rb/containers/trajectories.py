"""Trajectories: one complete path between source and sink per row."""

from __future__ import annotations

from typing import TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gfn_rb import keys
from gfn_rb.containers import convert
from gfn_rb.containers.base import Container
from gfn_rb.containers.fields import ANY, BOOL, FLOATING, INT64, SIGNED, FieldValues, field
from gfn_rb.containers.steps import States, Transitions
from gfn_rb.errors import ArgumentError
from gfn_rb.shapes import Bool, Shaped

T = TypeVar("T", bound="Trajectories")


class Trajectories(Container):
    """Complete trajectories, one per row, padded to T steps.

    A forward row runs source, ..., x, sink: ``state[:, length - 1]`` is the terminating state x and
    ``action[:, length - 1]`` the exit action. A backward row is the exact reverse, and its action i
    is the forward action undone between states i and i + 1. After ``length`` stand the sink, action
    -1 and zeros.

    Args:
        state: states on the way, [n, T + 1, *S].
        action: actions between them, [n, T, *A].
        length: number of real actions of each row, the exit action included, int64 [n], 1 to T.
        log_reward: log R(x) in nats, floating point [n].
        log_prob: log-probability in nats of each action when it was drawn, [n, T]. Default: None.
        estimator_output: outputs of that policy at each step, [n, T, *E]. Default: None.
        condition: condition of each row, [n, *C]. Default: None, for environments without.
        is_backward: whether each row runs from the sink to the source, bool [n]. Default: None, all
            run forward.

    Raises:
        ShapeError: a shape or dtype does not fit.
        ArgumentError: a length is below 1 or above T.
    """

    __slots__ = ()
    state: Tensor = field(keys.STATE, "n T+1 *S", ANY)
    action: Tensor = field(keys.ACTION, "n T *A", SIGNED)
    length: Tensor = field(keys.LENGTH, "n", INT64)
    log_reward: Tensor = field(keys.LOG_REWARD, "n", FLOATING)
    log_prob: Tensor | None = field(keys.LOG_PROB, "n T", FLOATING, default=None)
    estimator_output: Tensor | None = field(keys.ESTIMATOR_OUTPUT, "n T *E", FLOATING, default=None)
    condition: Tensor | None = field(keys.CONDITION, "n *C", ANY, default=None)
    is_backward: Tensor | None = field(keys.IS_BACKWARD, "n", BOOL, default=None)

    @classmethod
    def from_rollout(
        cls, rollout: TensorDictBase, source_state: Tensor | None = None
    ) -> Trajectories:
        """Take the finished episodes out of a TorchRL rollout or collector batch.

        It reads "state", "action", ("next", "state"), ("next", "done"), ("next", "terminated")
        (without it, done means terminated) and ("next", "log_reward"), and "log_prob",
        "estimator_output" and "condition" if present. An episode ends with its done step, and
        where ("collector", "traj_ids") changes. It leaves out:

        * steps under a false ("collector", "mask") or "mask";
        * without mask and ids, the copies of the last step that
          ``env.rollout(break_when_all_done=True)`` fills a finished row with;
        * episodes that are cut by the end of the batch, or truncated;
        * with ``source_state``, episodes that do not start there: they began in an earlier batch.

        An episode that two collector batches share is therefore in neither, which loses long
        episodes more often than short ones. ``torch.cat`` of the batches along time keeps it.

        Args:
            rollout: TensorDict of batch size [*B, T], time last.
            source_state: source s0, [*S]. Default: the state that all finished episodes start in.

        Returns:
            Forward trajectories, padded to the longest one.

        Raises:
            ArgumentError: ``source_state`` is None and the finished episodes start in several
                states: some began in an earlier batch.
            KeyMismatchError: a key is missing.
            ShapeError: the batch size has no time, or a flag is not one per step.
        """
        from gfn_rb.containers.rollouts import trajectories_of  # few programs need it

        return cls._checked(trajectories_of(rollout, source_state)[0], rollout.device)

    @classmethod
    def _checked(cls: type[T], values: FieldValues, device: torch.device | None = None) -> T:
        checked = super()._checked(values, device)
        convert.require_lengths(checked.length, checked.n_steps)
        return checked

    def to_rollout(self) -> TensorDict:
        """Lay the rows out as a masked TorchRL rollout of batch size [n, T].

        See :func:`gfn_rb.containers.rollouts.rollout_of`. Backward rows are turned forward first.
        """
        from gfn_rb.containers.rollouts import rollout_of

        return rollout_of(self.forward().to_tensordict())

    def to_transitions(self) -> Transitions:
        """Give one row per real action; the rows of an episode stay together and in order."""
        return Transitions.wrap(convert.transitions_of(self._td))

    def to_states(self) -> States:
        """Give one row per visited state, source included and sink left out, in order."""
        return self.to_transitions().to_states()

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
        """Pad, or cut padding, to ``n_steps``; raise ArgumentError if a row has more real steps."""
        if n_steps == self.n_steps:
            return self
        longest = int(self.length.max()) if len(self) and n_steps < self.n_steps else 0
        if n_steps < longest:
            raise ArgumentError(f"n_steps={n_steps} would cut a row of {longest} real steps")
        return self.wrap(convert.padded_to(self._td, n_steps))

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
