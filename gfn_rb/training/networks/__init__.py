"""The networks that losses train: policies, state flows and log Z."""

from gfn_rb.training.networks.base import StateNetwork, Trunk
from gfn_rb.training.networks.flows import ConditionalLogZ, LogZ, StateFlow
from gfn_rb.training.networks.policies import (
    BackwardPolicy,
    ForwardPolicy,
    Policy,
    UniformBackwardPolicy,
)

__all__ = [
    "BackwardPolicy",
    "ConditionalLogZ",
    "ForwardPolicy",
    "LogZ",
    "Policy",
    "StateFlow",
    "StateNetwork",
    "Trunk",
    "UniformBackwardPolicy",
]
