"""Training: policies, losses, and the loop that uses them."""

from gfn_rb.training.collect import WorkerSource
from gfn_rb.training.config import HyperGridConfig, TFBind8Config, TrainConfig
from gfn_rb.training.loop import Trainer
from gfn_rb.training.losses import (
    LOSSES,
    DetailedBalance,
    FlowMatching,
    ModifiedDetailedBalance,
    SubTrajectoryBalance,
    TrajectoryBalance,
)
from gfn_rb.training.policies import (
    BackwardPolicy,
    ConditionalLogZ,
    ForwardPolicy,
    LogZ,
    StateFlow,
    UniformBackwardPolicy,
)
from gfn_rb.training.replay import DRAW, KEEP
from gfn_rb.training.run import Outcome, resume, train

__all__ = [
    "DRAW",
    "KEEP",
    "LOSSES",
    "BackwardPolicy",
    "ConditionalLogZ",
    "DetailedBalance",
    "FlowMatching",
    "ForwardPolicy",
    "HyperGridConfig",
    "LogZ",
    "ModifiedDetailedBalance",
    "Outcome",
    "StateFlow",
    "SubTrajectoryBalance",
    "TFBind8Config",
    "TrainConfig",
    "Trainer",
    "TrajectoryBalance",
    "UniformBackwardPolicy",
    "WorkerSource",
    "resume",
    "train",
]
