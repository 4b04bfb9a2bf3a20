"""Trajectories, transitions and states: thin wrappers around one batch-first TensorDict."""

from __future__ import annotations

from gfn_rb.containers.states import States
from gfn_rb.containers.trajectories import Trajectories
from gfn_rb.containers.transitions import Transitions

__all__ = ["States", "Trajectories", "Transitions"]
