"""ObjectRL's replay buffer, by its name and with the attribute that its users read."""

from __future__ import annotations

from gfn_rb.interop.experience import ExperienceMemory


class ReplayBuffer(ExperienceMemory):
    """An ``ExperienceMemory`` with ObjectRL's name and ``data_size``.

    Args:
        *args: arguments of :class:`~gfn_rb.ExperienceMemory`.
        **options: keyword arguments of :class:`~gfn_rb.ExperienceMemory`.
    """

    @property
    def data_size(self) -> int:
        """How many experiences are stored."""
        return len(self)
