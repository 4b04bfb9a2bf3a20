"""Losses on trajectories, transitions and states.

Each reads one container and is zero, in every row, once the policy samples in proportion to the
reward. ``LOSSES`` names them for configurations; what they share is in
:class:`~gfn_rb.losses.base.Loss`.
"""

import torch

from gfn_rb.losses.base import Loss, Penalty, linex
from gfn_rb.losses.detailed_balance import DetailedBalance, ModifiedDetailedBalance
from gfn_rb.losses.flow_matching import FlowMatching
from gfn_rb.losses.sub_trajectory_balance import SubTrajectoryBalance
from gfn_rb.losses.trajectory_balance import TrajectoryBalance

LOSSES: dict[str, type[Loss]] = {
    loss.name: loss
    for loss in (
        TrajectoryBalance,
        SubTrajectoryBalance,
        DetailedBalance,
        ModifiedDetailedBalance,
        FlowMatching,
    )
}
"""The losses, by name."""

REGRESSION: dict[str, Penalty] = {"squared": torch.square, "linex": linex}
"""The costs of residuals, by name."""

__all__ = [
    "LOSSES",
    "REGRESSION",
    "DetailedBalance",
    "FlowMatching",
    "Loss",
    "ModifiedDetailedBalance",
    "SubTrajectoryBalance",
    "TrajectoryBalance",
    "linex",
]
