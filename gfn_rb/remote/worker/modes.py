"""When a worker sends, and whether it waits for the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod

from gfn_rb.errors import ArgumentError
from gfn_rb.remote.worker.client import ManagerClient


class Mode(ABC):
    """When a worker sends, and whether it waits for the answer."""

    @abstractmethod
    def before(self, client: ManagerClient) -> bool:
        """Do what comes before a batch is sent.

        Args:
            client: of the worker.

        Returns:
            Whether a batch may be sent now.
        """

    def after(self, client: ManagerClient) -> None:  # noqa: B027
        """Do what comes after; by default nothing.

        Args:
            client: of the worker.
        """

    def __repr__(self) -> str:
        named = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({named})"


class AwaitReply(Mode):
    """Sends, and waits for the answer: scores are those of the items just added."""

    def before(self, client: ManagerClient) -> bool:
        """Send."""
        return True

    def after(self, client: ManagerClient) -> None:
        """Wait for the answer."""
        client.wait()


class CollectLater(Mode):
    """Sends, and collects the answer at the next add: scores are one add old.

    The manager works while the worker trains; the worker waits only for what is left of that.
    """

    def before(self, client: ManagerClient) -> bool:
        """Wait for the answer to the last batch."""
        client.wait()
        return True


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

    def before(self, client: ManagerClient) -> bool:
        """Take what has arrived, and send if few enough batches are unanswered."""
        client.collect()
        return client.unanswered < self.in_flight
