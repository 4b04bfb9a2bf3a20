"""The application behind ``gfn-rb``: configuration, training runs, reports, command line.

The library never imports it.
"""

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
from gfn_rb.training.priority_rules import PRIORITY, PriorityRule, TeacherReward
from gfn_rb.training.replay import DRAW, KEEP, REPLAY
from gfn_rb.training.session.launch import resume, train
from gfn_rb.training.session.run import RunResult
from gfn_rb.training.sources.worker import WorkerSource
from gfn_rb.training.trainer import Hooks, Trainer

__all__ = [
    "DRAW",
    "KEEP",
    "PRIORITY",
    "REPLAY",
    "BayesianDAGConfig",
    "BitSequenceConfig",
    "BoxConfig",
    "ConditionalHyperGridConfig",
    "DeceptiveGridConfig",
    "Hooks",
    "HyperGridConfig",
    "LineConfig",
    "PriorityRule",
    "RNABindingConfig",
    "RunResult",
    "TFBind8Config",
    "TeacherReward",
    "TrainConfig",
    "Trainer",
    "WorkerSource",
    "resume",
    "train",
]
