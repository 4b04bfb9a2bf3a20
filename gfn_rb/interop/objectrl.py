"""ObjectRL's replay buffer under its own name."""

from gfn_rb.interop.experience import ExperienceMemory as ReplayBuffer

__all__ = ["ReplayBuffer"]
