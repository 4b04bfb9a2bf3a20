"""Training: policies, losses, and the loop that uses them."""

from gfn_rb.training.config import (
    BayesianDAGConfig,
    BitSequenceConfig,
    BoxConfig,
    ConditionalHyperGridConfig,
    DeceptiveGridConfig,
    HyperGridConfig,
    LineConfig,
    RNABindingConfig,
    TFBind8Config,
    TrainConfig,
)
from gfn_rb.training.densities import MixturePolicy, ReferencePolicy
from gfn_rb.training.losses import (
    LOSSES,
    REGRESSION,
    DetailedBalance,
    FlowMatching,
    ModifiedDetailedBalance,
    SubTrajectoryBalance,
    TrajectoryBalance,
    linex,
)
from gfn_rb.training.networks import (
    BackwardPolicy,
    ConditionalLogZ,
    ForwardPolicy,
    LogZ,
    Networks,
    StateFlow,
    UniformBackwardPolicy,
)
from gfn_rb.training.priority_rules import PRIORITY, PriorityRule, TeacherReward
from gfn_rb.training.replay import DRAW, KEEP, REPLAY
from gfn_rb.training.session.launch import resume, train
from gfn_rb.training.session.run import RunResult
from gfn_rb.training.trainer import Hooks, Trainer
from gfn_rb.training.worker_source import WorkerSource

__all__ = [
    "DRAW",
    "KEEP",
    "LOSSES",
    "PRIORITY",
    "REGRESSION",
    "REPLAY",
    "BackwardPolicy",
    "BayesianDAGConfig",
    "BitSequenceConfig",
    "BoxConfig",
    "ConditionalHyperGridConfig",
    "ConditionalLogZ",
    "DeceptiveGridConfig",
    "DetailedBalance",
    "FlowMatching",
    "ForwardPolicy",
    "Hooks",
    "HyperGridConfig",
    "LineConfig",
    "LogZ",
    "MixturePolicy",
    "ModifiedDetailedBalance",
    "Networks",
    "PriorityRule",
    "RNABindingConfig",
    "ReferencePolicy",
    "RunResult",
    "StateFlow",
    "SubTrajectoryBalance",
    "TFBind8Config",
    "TeacherReward",
    "TrainConfig",
    "Trainer",
    "TrajectoryBalance",
    "UniformBackwardPolicy",
    "WorkerSource",
    "linex",
    "resume",
    "train",
]
