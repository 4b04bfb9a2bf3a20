"""Training: policies, losses, and the loop that uses them."""

from gfn_rb.training.collect import WorkerSource
from gfn_rb.training.config import HyperGridConfig, TFBind8Config, TrainConfig
from gfn_rb.training.loop import Trainer
from gfn_rb.training.losses import TrajectoryBalance
from gfn_rb.training.policies import (
    BackwardPolicy,
    ForwardPolicy,
    LogZ,
    UniformBackwardPolicy,
)
from gfn_rb.training.replay import DRAW, KEEP
from gfn_rb.training.run import Outcome, resume, train

__all__ = [
    "DRAW",
    "KEEP",
    "BackwardPolicy",
    "ForwardPolicy",
    "HyperGridConfig",
    "LogZ",
    "Outcome",
    "TFBind8Config",
    "TrainConfig",
    "Trainer",
    "TrajectoryBalance",
    "UniformBackwardPolicy",
    "WorkerSource",
    "resume",
    "train",
]
