"""Every error this library raises on purpose.

GfnRbError
├── ArgumentError (ValueError)          an argument breaks its rule
├── KeyMismatchError (KeyError)         a TensorDict lacks a key, or has one too many
├── ShapeError (ValueError)             wrong batch size, feature shape or dtype
├── NaNError (ValueError)               a NaN where a number must be
├── EmptyBufferError (RuntimeError)     nothing to draw from
├── WorkerError (RuntimeError)          a process that samples failed or died
└── CheckpointError (RuntimeError)      a checkpoint cannot be written or read
    ├── CheckpointCorruptError          truncated, or its checksum does not match
    └── CheckpointMismatchError         sound, but made by another configuration

Every message names the argument, what came and what was expected, in one line. Each class also
inherits the builtin a caller would expect, so ``except ValueError`` works.
"""

from __future__ import annotations


class GfnRbError(Exception):
    """Base of every error raised by gfn_rb."""


class ArgumentError(GfnRbError, ValueError):
    """An argument breaks its rule."""


class KeyMismatchError(GfnRbError, KeyError):
    """A TensorDict lacks a key, or has one that does not belong."""

    def __str__(self) -> str:  # KeyError would print the repr of its message
        return str(self.args[0]) if self.args else ""


class ShapeError(GfnRbError, ValueError):
    """A tensor has the wrong batch size, feature shape or dtype."""


class NaNError(GfnRbError, ValueError):
    """A NaN stands where a number must be."""


class EmptyBufferError(GfnRbError, RuntimeError):
    """There is nothing to draw from."""


class WorkerError(GfnRbError, RuntimeError):
    """A process that samples failed or died. The cause shows its traceback."""


class CheckpointError(GfnRbError, RuntimeError):
    """A checkpoint cannot be written or read."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is truncated, or its checksum does not match its content."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is sound, but was made by another configuration."""
