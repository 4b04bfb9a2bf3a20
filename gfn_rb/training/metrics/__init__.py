"""Metrics of a run and of its policy: discoveries, agreement with the target, bounds."""

from typing import TYPE_CHECKING

from gfn_rb.lazy import lazy_exports

if TYPE_CHECKING:
    from gfn_rb.numerics.near.neighbours import tanimoto_distance as tanimoto_distance
    from gfn_rb.training.metrics.discovery import (
        DiscoveryMetrics as DiscoveryMetrics,
        mean_distance as mean_distance,
        norm_distance as norm_distance,
    )
    from gfn_rb.training.metrics.evaluation import (
        METRICS as METRICS,
        Evaluation as Evaluation,
        check_metrics as check_metrics,
        draw_from_target as draw_from_target,
        estimate_log_probs as estimate_log_probs,
        log_mean_exp as log_mean_exp,
        log_weights as log_weights,
    )
    from gfn_rb.training.metrics.fit import (
        ExactFit as ExactFit,
        Fit as Fit,
        accuracy as accuracy,
        jensen_shannon_distance as jensen_shannon_distance,
        pearson as pearson,
        spearman as spearman,
        total_variation as total_variation,
    )

__getattr__, __all__ = lazy_exports(__name__)
