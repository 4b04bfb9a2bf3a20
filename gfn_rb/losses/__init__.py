"""Losses on trajectories, transitions, states, and completions of language models.

Each class reads one container and is zero, in every row, once the policy samples in proportion to
the reward. ``LOSSES`` names them for configurations: each module of this package is imported, and
each loss that has a ``name`` is in it from then on. What they share is in
:class:`~gfn_rb.losses.base.Loss`.
"""

from importlib import import_module
from pkgutil import iter_modules

from gfn_rb.losses.base import LOSSES, BalanceLoss, Loss, linex
from gfn_rb.losses.completions import (
    clipped_ratio,
    clipped_surrogate,
    completion_log_prob,
    group_residual,
    token_log_prob,
)
from gfn_rb.losses.detailed_balance import DetailedBalance, ModifiedDetailedBalance
from gfn_rb.losses.flow_matching import FlowMatching
from gfn_rb.losses.trajectory_balance import (
    SubTrajectoryBalance,
    TrajectoryBalance,
    VarGrad,
)

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "LOSSES",
    "BalanceLoss",
    "DetailedBalance",
    "FlowMatching",
    "Loss",
    "ModifiedDetailedBalance",
    "SubTrajectoryBalance",
    "TrajectoryBalance",
    "VarGrad",
    "clipped_ratio",
    "clipped_surrogate",
    "completion_log_prob",
    "group_residual",
    "linex",
    "token_log_prob",
]
