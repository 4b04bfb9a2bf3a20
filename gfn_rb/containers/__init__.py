"""Trajectories, transitions and states: thin wrappers around one batch-first TensorDict."""

from __future__ import annotations

from gfn_rb.containers.steps import States, Transitions
from gfn_rb.containers.trajectories import Trajectories

__all__ = ["States", "Trajectories", "Transitions"]
