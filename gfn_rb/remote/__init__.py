"""Buffers across ranks: frames of rows."""

from gfn_rb.remote.schema import Schema
from gfn_rb.remote.wire import Frame, FrameReader, FrameWriter

__all__ = ["Frame", "FrameReader", "FrameWriter", "Schema"]
