"""Rollouts: from policies to trajectories, and back to log-probabilities."""

from gfn_rb.gone import without_gone
from gfn_rb.rollout.categorical import Exploration, masked_log_softmax
from gfn_rb.rollout.local_search import LocalSearchSampler
from gfn_rb.rollout.log_probs import action_log_probs, taken_log_probs
from gfn_rb.rollout.sampler import ActionSampler, Sampler

__all__ = [
    "ActionSampler",
    "Exploration",
    "LocalSearchSampler",
    "Sampler",
    "action_log_probs",
    "masked_log_softmax",
    "taken_log_probs",
]

__getattr__ = without_gone(__name__)
