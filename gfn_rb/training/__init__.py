"""Training: policies, losses, and the loop that uses them."""

from gfn_rb.training.config import (
    BitSequenceConfig,
    ConditionalHyperGridConfig,
    HyperGridConfig,
    RNABindingConfig,
    TFBind8Config,
    TrainConfig,
)
from gfn_rb.training.losses import (
    LOSSES,
    DetailedBalance,
    FlowMatching,
    ModifiedDetailedBalance,
    SubTrajectoryBalance,
    TrajectoryBalance,
)
from gfn_rb.training.networks import (
    BackwardPolicy,
    ConditionalLogZ,
    ForwardPolicy,
    LogZ,
    StateFlow,
    UniformBackwardPolicy,
)
from gfn_rb.training.replay import DRAW, KEEP, REPLAY
from gfn_rb.training.session.launch import resume, train
from gfn_rb.training.session.run import RunResult
from gfn_rb.training.trainer import Hooks, Trainer
from gfn_rb.training.worker_source import WorkerSource

__all__ = [
    "DRAW",
    "KEEP",
    "LOSSES",
    "REPLAY",
    "BackwardPolicy",
    "BitSequenceConfig",
    "ConditionalHyperGridConfig",
    "ConditionalLogZ",
    "DetailedBalance",
    "FlowMatching",
    "ForwardPolicy",
    "Hooks",
    "HyperGridConfig",
    "LogZ",
    "ModifiedDetailedBalance",
    "RNABindingConfig",
    "RunResult",
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
