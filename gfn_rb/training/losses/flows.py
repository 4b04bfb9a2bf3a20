"""What a network says of the flow through states."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from gfn_rb import keys
from gfn_rb.envs.core import GFNCore
from gfn_rb.errors import KeyMismatchError, ShapeError
from gfn_rb.shapes import Float, Shaped
from gfn_rb.training.losses.base import BalanceLoss, C


def log_flows(
    state_flow: TensorDictModuleBase,
    state: Shaped[Tensor, "n *state"],
    condition: Shaped[Tensor, "n *condition"] | None,
) -> Float[Tensor, "n"]:
    """Return log F(s) of each state, in nats, with gradient.

    Args:
        state_flow: reads "state", and "condition" where there is one; writes "log_flow", [n].
        state: states.
        condition: one condition per state.

    Raises:
        KeyMismatchError: the network wrote no "log_flow".
        ShapeError: it did not write one number per state.
    """
    source = {keys.STATE: state}
    if condition is not None:
        source[keys.CONDITION] = condition
    name = type(state_flow).__name__
    flow = state_flow(TensorDict(source, batch_size=state.shape[:1])).get(keys.LOG_FLOW, None)
    if flow is None:
        raise KeyMismatchError(f"state_flow must write {keys.LOG_FLOW!r}, {name} did not")
    if flow.shape != (len(state),):
        raise ShapeError(
            f"state_flow must write {keys.LOG_FLOW!r} of shape {[len(state)]}, got "
            f"{list(flow.shape)} from {name}"
        )
    return flow


class StateFlowLoss(BalanceLoss[C]):
    """A loss that learns the flow through states.

    Args:
        forward_policy: P_F.
        backward_policy: P_B.
        env: see :class:`~gfn_rb.training.losses.base.Loss`.
        state_flow: log F, such as :class:`gfn_rb.training.StateFlow`.
        **options: ``penalty`` and ``min_log_reward``, as there.
    """

    def __init__(
        self,
        forward_policy: TensorDictModuleBase,
        backward_policy: TensorDictModuleBase,
        env: GFNCore,
        state_flow: TensorDictModuleBase,
        **options: Any,
    ) -> None:
        super().__init__(forward_policy, backward_policy, env, **options)
        self.state_flow = state_flow

    def _source_log_flow(
        self, source: Shaped[Tensor, "n *state"], condition: Shaped[Tensor, "n *condition"] | None
    ) -> Float[Tensor, "n"]:
        return log_flows(self.state_flow, source, condition)
