"""Transports: bytes between threads, processes and machines."""

from gfn_rb.transports.base import Envelope, Message, SendHandle, Transport
from gfn_rb.transports.local import LocalTransport

__all__ = ["Envelope", "LocalTransport", "Message", "SendHandle", "Transport"]
