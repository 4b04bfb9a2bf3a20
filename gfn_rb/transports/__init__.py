"""Transports: bytes between threads, processes and machines."""

from typing import TYPE_CHECKING

from gfn_rb.lazy import lazy_exports

if TYPE_CHECKING:
    from gfn_rb.codec.primitives import LazyBuffer as LazyBuffer
    from gfn_rb.transports.base import (
        Envelope as Envelope,
        Message as Message,
        SendHandle as SendHandle,
        Transport as Transport,
    )
    from gfn_rb.transports.local import LocalTransport as LocalTransport
    from gfn_rb.transports.mpi import MPITransport as MPITransport
    from gfn_rb.transports.ray import ManagerActor as ManagerActor, RayTransport as RayTransport
    from gfn_rb.transports.tcp import (
        GlooTransport as GlooTransport,
        TCPTransport as TCPTransport,
    )

__getattr__, __all__ = lazy_exports(__name__)
