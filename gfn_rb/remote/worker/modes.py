"""When a worker sends, and whether it waits for the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol, runtime_checkable

from gfn_rb.errors import ArgumentError


@runtime_checkable
class Outbox(Protocol):
    """What a mode can ask of a worker about the batches it has sent."""

    @property
    def unanswered(self) -> int:
        """How many batches are still to be answered."""
        ...

    def collect(self) -> None:
        """Take what has arrived, without waiting."""
        ...

    def wait(self) -> bool:
        """Wait until all batches are answered, or their manager is found to be lost."""
        ...


class Mode(ABC):
    """When a worker sends, and whether it waits for the answer."""

    @abstractmethod
    def before(self, outbox: Outbox) -> bool:
        """Do what comes before a batch is sent.

        Args:
            outbox: of the worker.

        Returns:
            Whether a batch may be sent now.
        """

    @abstractmethod
    def after(self, outbox: Outbox) -> None:
        """Do what comes after.

        Args:
            outbox: of the worker.
        """

    def __repr__(self) -> str:
        named = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({named})"


class AwaitReply(Mode):
    """Sends, and waits for the answer: scores are those of the items just added."""

    def before(self, outbox: Outbox) -> bool:
        """Send."""
        return True

    def after(self, outbox: Outbox) -> None:
        """Wait for the answer."""
        outbox.wait()


class CollectLater(Mode):
    """Sends, and collects the answer at the next add: scores are one add old.

    The manager works while the worker trains; the worker waits only for what is left of that.
    """

    def before(self, outbox: Outbox) -> bool:
        """Wait for the answer to the last batch."""
        outbox.wait()
        return True

    def after(self, outbox: Outbox) -> None:
        """Go on at once."""


class NonBlocking(Mode):
    """Sends, and never waits: answers are taken when they have arrived.

    While ``in_flight`` batches are unanswered, no further one is sent: its rows are counted as
    ``skipped``, and stay in the worker's own buffer alone. That bounds the memory held by what is
    on its way, and how far the manager can fall behind.

    Args:
        in_flight: how many batches may be unanswered.

    Raises:
        ArgumentError: ``in_flight`` below 1.
    """

    def __init__(self, in_flight: int = 8) -> None:
        if in_flight < 1:
            raise ArgumentError(f"in_flight must be at least 1, got {in_flight}")
        self.in_flight = in_flight

    def before(self, outbox: Outbox) -> bool:
        """Take what has arrived, and send if few enough batches are unanswered."""
        outbox.collect()
        return outbox.unanswered < self.in_flight

    def after(self, outbox: Outbox) -> None:
        """Go on at once."""
