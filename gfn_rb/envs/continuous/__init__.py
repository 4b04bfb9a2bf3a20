"""Environments whose states and actions are real numbers."""

from gfn_rb.envs.continuous.base import ContinuousEnv
from gfn_rb.envs.continuous.tasks import Box, Line

__all__ = ["Box", "ContinuousEnv", "Line"]
