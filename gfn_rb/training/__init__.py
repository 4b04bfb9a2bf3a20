"""The application behind ``gfn-rb``: configuration, training runs, reports, command line.

The library never imports it.
"""

from typing import TYPE_CHECKING

from gfn_rb.lazy import lazy_exports

if TYPE_CHECKING:
    from gfn_rb.training.config import (
        BayesianDAGConfig,
        BitSequenceConfig,
        BoxConfig,
        ConditionalHyperGridConfig,
        DeceptiveGridConfig,
        HyperGridConfig,
        LineConfig,
        QM9StringsConfig,
        RNABindingConfig,
        TFBind8Config,
        TrainConfig,
    )
    from gfn_rb.training.options import (
        DRAW,
        KEEP,
        AnnealOptions,
        FeedOptions,
        KeepDiverse,
        KeepRecent,
        KeepTop,
        ManagersOptions,
        MetricsOptions,
        PriorityDraw,
        QuantileDraw,
        RankDraw,
        SearchOptions,
        SoftmaxDraw,
        TeacherDraw,
        TeacherOptions,
        UniformDraw,
    )
    from gfn_rb.training.replay import REPLAY, TeacherReward
    from gfn_rb.training.session.launch import resume, train
    from gfn_rb.training.session.run import RunResult
    from gfn_rb.training.trainer import Hooks, Trainer

__all__ = [
    "DRAW",
    "KEEP",
    "REPLAY",
    "AnnealOptions",
    "BayesianDAGConfig",
    "BitSequenceConfig",
    "BoxConfig",
    "ConditionalHyperGridConfig",
    "DeceptiveGridConfig",
    "FeedOptions",
    "Hooks",
    "HyperGridConfig",
    "KeepDiverse",
    "KeepRecent",
    "KeepTop",
    "LineConfig",
    "ManagersOptions",
    "MetricsOptions",
    "PriorityDraw",
    "QM9StringsConfig",
    "QuantileDraw",
    "RNABindingConfig",
    "RankDraw",
    "RunResult",
    "SearchOptions",
    "SoftmaxDraw",
    "TFBind8Config",
    "TeacherDraw",
    "TeacherOptions",
    "TeacherReward",
    "TrainConfig",
    "Trainer",
    "UniformDraw",
    "resume",
    "train",
]

__getattr__ = lazy_exports(
    __name__,
    config="BayesianDAGConfig BitSequenceConfig BoxConfig ConditionalHyperGridConfig"
    " DeceptiveGridConfig HyperGridConfig LineConfig QM9StringsConfig RNABindingConfig"
    " TFBind8Config TrainConfig",
    options="DRAW KEEP AnnealOptions FeedOptions KeepDiverse KeepRecent KeepTop"
    " ManagersOptions MetricsOptions PriorityDraw QuantileDraw RankDraw SearchOptions"
    " SoftmaxDraw TeacherDraw TeacherOptions UniformDraw",
    replay="REPLAY TeacherReward",
    trainer="Hooks Trainer",
    **{"session.launch": "resume train", "session.run": "RunResult"},
)
