"""Training: policies, losses and the loop that uses them."""

from gfn_rb.training.losses import TrajectoryBalance
from gfn_rb.training.policies import (
    BackwardPolicy,
    ForwardPolicy,
    LogZ,
    UniformBackwardPolicy,
)

__all__ = [
    "BackwardPolicy",
    "ForwardPolicy",
    "LogZ",
    "TrajectoryBalance",
    "UniformBackwardPolicy",
]
