"""Policies and the other networks that losses train."""

from gfn_rb.policies.densities import MixturePolicy, ReferencePolicy
from gfn_rb.policies.networks import (
    BackwardPolicy,
    ConditionalLogZ,
    ForwardPolicy,
    LogZ,
    Networks,
    StateFlow,
    UniformBackwardPolicy,
)

__all__ = [
    "BackwardPolicy",
    "ConditionalLogZ",
    "ForwardPolicy",
    "LogZ",
    "MixturePolicy",
    "Networks",
    "ReferencePolicy",
    "StateFlow",
    "UniformBackwardPolicy",
]
