"""What a network says of the flow through states."""

from __future__ import annotations

from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from gfn_rb import keys
from gfn_rb.envs.core import GFNCore
from gfn_rb.errors import KeyMismatchError, ShapeError
from gfn_rb.shapes import Float, Shaped


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


def source_log_flow(
    state_flow: TensorDictModuleBase,
    env: GFNCore,
    condition: Shaped[Tensor, "n *condition"] | None,
) -> Float[Tensor, "..."]:
    """Return log F(s_0): for each condition [n], or a single number [] without one."""
    flow = log_flows(state_flow, env.source(count(condition)), condition)
    return flow[0] if condition is None else flow


def count(condition: Shaped[Tensor, "n *condition"] | None) -> int:
    """Return how many rows of the source stand for conditions: one where there is none."""
    return 1 if condition is None else len(condition)
