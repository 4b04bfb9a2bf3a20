"""Every error this library raises on purpose.

    GfnRbError
    ├── ArgumentError (ValueError)          an argument breaks its rule
    ├── KeyMismatchError (KeyError)         a TensorDict lacks a key, or has one too many
    ├── ShapeError (ValueError, RuntimeError)  wrong batch size, feature shape or dtype
    ├── NaNError (ValueError)               a NaN where a number must be
    ├── EmptyBufferError (RuntimeError)     nothing to draw from
    ├── RateLimitError (TimeoutError)       too far ahead of those who draw, or who insert
    ├── WorkerError (RuntimeError)          a process that samples failed or died
    ├── CheckpointError (RuntimeError)      a checkpoint cannot be written or read
    │   ├── CheckpointCorruptError          truncated, or its checksum does not match
    │   └── CheckpointMismatchError         sound, but made by another configuration
    ├── TransportError (RuntimeError)       a message cannot be sent or received
    │   ├── TransportTimeoutError (TimeoutError)  nothing happened within the time given
    │   ├── TransportClosedError            this endpoint has been closed
    │   ├── PeerLostError                   the process at the other end is gone
    │   └── RemoteError                     another rank could not do what it was asked to
    ├── WireError (ValueError)              bytes that arrived are no frame to believe
    │   ├── WireCorruptError                foreign, truncated, or a checksum does not match
    │   ├── WireVersionError                a frame of another version of the format
    │   └── WireSchemaError                 sound, but of a schema that makes no sense
    └── SecretError (CheckpointError, WireError)  not made with the secret that is known here

Every message names the argument, what came and what was expected, in one line. Each class also
inherits the builtin a caller would expect, so ``except ValueError`` works. ``ArgumentError`` is
raised for any argument that is not as documented, and is documented itself where it means more.
"""

from __future__ import annotations

CLOSED = "it closed its endpoint"  # reason of the loss of a rank that left in good order


class GfnRbError(Exception):
    """Base of every error raised by gfn_rb."""


class ArgumentError(GfnRbError, ValueError):
    """An argument breaks its rule."""


class KeyMismatchError(GfnRbError, KeyError):
    """A TensorDict lacks a key, or has one that does not belong."""

    def __str__(self) -> str:  # KeyError would print the repr of its message
        return str(self.args[0]) if self.args else ""


class ShapeError(GfnRbError, ValueError, RuntimeError):
    """A tensor has the wrong batch size, feature shape or dtype.

    A RuntimeError too, as torch raises and code catches that was written for TorchRL's writers.
    """


class NaNError(GfnRbError, ValueError):
    """A NaN stands where a number must be."""


class EmptyBufferError(GfnRbError, RuntimeError):
    """There is nothing to draw from."""


class RateLimitError(GfnRbError, TimeoutError):
    """Who draws was too far ahead of who inserts, or the other way round, for too long."""


class WorkerError(GfnRbError, RuntimeError):
    """A process that samples failed or died. The cause shows its traceback."""


class CheckpointError(GfnRbError, RuntimeError):
    """A checkpoint cannot be written or read."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is truncated, or its checksum does not match its content."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is sound, but was made by another configuration."""


class TransportError(GfnRbError, RuntimeError):
    """A message cannot be sent or received."""


class TransportTimeoutError(TransportError, TimeoutError):
    """A message was neither sent nor received within the time given."""


class TransportClosedError(TransportError):
    """The endpoint has been closed, and carries no more messages."""


class PeerLostError(TransportError):
    """The process at the other end is gone: it died, or closed its endpoint.

    Args:
        rank: which one.
        reason: how that is known.
        host: the machine it ran on, where that is known.
    """

    def __init__(self, rank: int, reason: str, host: str | None = None) -> None:
        super().__init__(rank, reason, host)
        self.rank = rank
        self.reason = reason
        self.host = host

    @property
    def is_closed(self) -> bool:
        """Whether the process closed its endpoint, and did not die."""
        return self.reason == CLOSED

    def __str__(self) -> str:
        place = f" on {self.host}" if self.host else ""
        return f"rank {self.rank}{place} is lost: {self.reason}"


class RemoteError(TransportError):
    """Another rank could not do what it was asked to, or refused.

    Args:
        rank: which one.
        reason: what it said, in one line.
        traceback: the last steps on the way to its error, where there was one.
    """

    def __init__(self, rank: int, reason: str, traceback: str = "") -> None:
        super().__init__(rank, reason, traceback)
        self.rank = rank
        self.reason = reason
        self.traceback = traceback

    def __str__(self) -> str:
        steps = f"\n{self.traceback.rstrip()}" if self.traceback else ""
        return f"rank {self.rank}: {self.reason}{steps}"


class WireError(GfnRbError, ValueError):
    """Bytes that arrived are no frame to believe."""


class WireCorruptError(WireError):
    """A frame is foreign, truncated, or does not match its checksum."""


class WireVersionError(WireError):
    """A frame is of another version of the format."""


class WireSchemaError(WireError):
    """A frame is sound, but of a schema that makes no sense, or is beyond bounds."""


class SecretError(CheckpointError, WireError):
    """A file or a frame was not made with the secret that is known here, or changed since."""
