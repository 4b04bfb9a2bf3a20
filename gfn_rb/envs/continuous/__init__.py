"""Environments whose states and actions are real numbers."""

from gfn_rb.envs.continuous.base import ContinuousEnv
from gfn_rb.envs.continuous.box import Box
from gfn_rb.envs.continuous.line import Line

__all__ = ["Box", "ContinuousEnv", "Line"]
