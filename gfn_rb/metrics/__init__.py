"""What is known of a run and of its policy: discoveries, and distances to the target."""

from gfn_rb.metrics.discovery import DiscoveryMetrics
from gfn_rb.metrics.fit import (
    ConditionalFit,
    ExactFit,
    Fit,
    jensen_shannon_distance,
    make_fit,
    total_variation,
)

__all__ = [
    "ConditionalFit",
    "DiscoveryMetrics",
    "ExactFit",
    "Fit",
    "jensen_shannon_distance",
    "make_fit",
    "total_variation",
]
