"""What is known of a run and of its policy: discoveries, agreement with the target, bounds."""

from gfn_rb.numerics.near.neighbours import tanimoto_distance
from gfn_rb.training.metrics.discovery import (
    DiscoveryMetrics,
    mean_distance,
    norm_distance,
)
from gfn_rb.training.metrics.evaluation import (
    METRICS,
    Evaluation,
    check_metrics,
    draw_from_target,
    estimate_log_probs,
    log_mean_exp,
    log_weights,
)
from gfn_rb.training.metrics.fit import (
    ExactFit,
    Fit,
    accuracy,
    jensen_shannon_distance,
    make_fit,
    pearson,
    spearman,
    total_variation,
)

__all__ = [
    "METRICS",
    "DiscoveryMetrics",
    "Evaluation",
    "ExactFit",
    "Fit",
    "accuracy",
    "check_metrics",
    "draw_from_target",
    "estimate_log_probs",
    "jensen_shannon_distance",
    "log_mean_exp",
    "log_weights",
    "make_fit",
    "mean_distance",
    "norm_distance",
    "pearson",
    "spearman",
    "tanimoto_distance",
    "total_variation",
]
