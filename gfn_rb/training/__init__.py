"""The application behind ``gfn-rb``: configuration, training runs, reports, command line.

The library never imports it.
"""

from typing import TYPE_CHECKING

from gfn_rb.lazy import lazy_exports

if TYPE_CHECKING:
    from gfn_rb.training.config import (
        BayesianDAGConfig as BayesianDAGConfig,
        BitSequenceConfig as BitSequenceConfig,
        BoxConfig as BoxConfig,
        ConditionalHyperGridConfig as ConditionalHyperGridConfig,
        DeceptiveGridConfig as DeceptiveGridConfig,
        FunnelConfig as FunnelConfig,
        Gaussians25Config as Gaussians25Config,
        HyperGridConfig as HyperGridConfig,
        LineConfig as LineConfig,
        ManywellConfig as ManywellConfig,
        QM9StringsConfig as QM9StringsConfig,
        RNABindingConfig as RNABindingConfig,
        TFBind8Config as TFBind8Config,
        TrainConfig as TrainConfig,
    )
    from gfn_rb.training.options import (
        DRAW as DRAW,
        KEEP as KEEP,
        FeedOptions as FeedOptions,
        KeepDiverse as KeepDiverse,
        KeepRecent as KeepRecent,
        KeepTop as KeepTop,
        ManagersOptions as ManagersOptions,
        MetricsOptions as MetricsOptions,
        PriorityDraw as PriorityDraw,
        QuantileDraw as QuantileDraw,
        RankDraw as RankDraw,
        SearchOptions as SearchOptions,
        SoftmaxDraw as SoftmaxDraw,
        TeacherDraw as TeacherDraw,
        TeacherOptions as TeacherOptions,
        UniformDraw as UniformDraw,
    )
    from gfn_rb.training.replay import REPLAY as REPLAY, TeacherReward as TeacherReward
    from gfn_rb.training.session.launch import resume as resume, train as train
    from gfn_rb.training.session.run import RunResult as RunResult
    from gfn_rb.training.trainer import Hooks as Hooks, Trainer as Trainer

__getattr__, __all__ = lazy_exports(__name__)
