"""Trajectories, transitions and states: thin wrappers around one batch-first TensorDict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gfn_rb.lazy import lazy_exports

if TYPE_CHECKING:
    from gfn_rb.containers.steps import States as States, Transitions as Transitions
    from gfn_rb.containers.trajectories import Trajectories as Trajectories

__getattr__, __all__ = lazy_exports(__name__)
