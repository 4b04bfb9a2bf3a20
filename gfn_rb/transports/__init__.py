"""Transports: bytes between threads, processes and machines."""

from typing import TYPE_CHECKING

from gfn_rb.lazy import lazy_exports

if TYPE_CHECKING:
    from gfn_rb.codec.primitives import LazyBuffer
    from gfn_rb.transports.base import Envelope, Message, SendHandle, Transport
    from gfn_rb.transports.gloo import GlooTransport
    from gfn_rb.transports.local import LocalTransport
    from gfn_rb.transports.mpi import MPITransport

__all__ = [
    "Envelope",
    "GlooTransport",
    "LazyBuffer",
    "LocalTransport",
    "MPITransport",
    "Message",
    "SendHandle",
    "Transport",
]

__getattr__ = lazy_exports(
    __name__,
    base="Envelope LazyBuffer Message SendHandle Transport",
    gloo="GlooTransport",
    local="LocalTransport",
    mpi="MPITransport",
)
