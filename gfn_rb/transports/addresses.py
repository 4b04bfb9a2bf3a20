"""Addresses of processes: where one listens, and by which of its addresses others reach it."""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import socket
import struct
from contextlib import suppress
from typing import Any, NamedTuple

from gfn_rb.errors import ArgumentError, TransportError

Place = tuple[str, int]
"""Address and port."""

_LOOPBACK = "127.0.0.1"
_OUTSIDE = "192.0.2.1"  # reserved for documentation: nothing is sent to it
_BACKLOG = 4096
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


class Card(NamedTuple):
    """What other ranks know of the process of a rank.

    Attributes:
        rank: its rank.
        process: random identity of the process; a restarted one has another.
        host: name of its machine, for messages only: two machines may have one name.
        machine: identity of the network that its loopback address belongs to.
        addresses: addresses that it may be reached by from other machines.
        port: port on which it listens.
        is_bound: whether it listens on these addresses alone, so not on the loopback address.
    """

    rank: int
    process: str
    host: str
    machine: str
    addresses: tuple[str, ...]
    port: int
    is_bound: bool

    @classmethod
    def of(cls, values: dict[str, Any]) -> Card:
        """Return the card that was sent as plain values."""
        values["addresses"] = tuple(values["addresses"])
        return cls(**values)

    def places(self, caller: Card, *more: str) -> list[Place]:
        """Return where another process may reach this one, the likeliest place first.

        Args:
            caller: card of the process that calls.
            more: further addresses to try.
        """
        hosts = [*self.addresses, *(() if self.is_bound else more)]
        if self.machine == caller.machine and not self.is_bound:
            hosts = [_LOOPBACK, *hosts]
        return [(host, self.port) for host in dict.fromkeys(hosts)]

    def __str__(self) -> str:
        """Return where it listens, in words."""
        at = ", ".join(self.addresses) or _LOOPBACK
        return f"host {self.host} ({at}), port {self.port}"


def card_of(rank: int, server: socket.socket, store_host: str, is_bound: bool) -> Card:
    """Return the card of this process.

    Args:
        rank: its rank.
        server: socket on which it listens.
        store_host: host of the store, reached by an address that other machines may know.
        is_bound: whether it listens on one address alone.
    """
    host, port = socket.gethostname(), server.getsockname()[1]
    if is_bound:
        addresses = [server.getsockname()[0]]
    else:
        addresses = [_address_towards(each) for each in (store_host, _OUTSIDE) if each]
        with suppress(OSError):  # a machine need not know its own name
            addresses += [str(each[4][0]) for each in socket.getaddrinfo(host, None)]
        addresses = [each for each in addresses if not is_loopback(each)]
    distinct = tuple(dict.fromkeys(addresses))
    return Card(rank, secrets.token_hex(16), host, _machine(), distinct, port, is_bound)


def listen(interface: str, ports: tuple[int, int], turn: int) -> socket.socket:
    """Return a socket that listens on the first free port.

    Args:
        interface: name of a network interface, an address or a host name; "" for all interfaces.
        ports: first and last port; (0, 0) for any.
        turn: which of the ports to try first.
    """
    address, (first, last) = address_of(interface), ports
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
    for i in range(n := last - first + 1):
        place = (address, first + (turn + i) % n)
        try:
            return socket.create_server(place, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise ArgumentError(
                    f"interface is {interface!r}; expected one of this machine: {error}"
                ) from error
    where = f" of {interface}" if interface else ""
    which = f"port {first}{where} is" if n == 1 else f"ports {first} to {last}{where} are all"
    raise TransportError(
        f"{which} taken: give ports=(FIRST, LAST) with one port for each process of this machine"
    )


def ports_of(ports: int | tuple[int, int] | str) -> tuple[int, int]:
    """Return first and last port of a number, a pair, or text such as 15000-15100."""
    parts: Any = ports.split("-") if isinstance(ports, str) else ports
    with suppress(TypeError, ValueError):
        pair = (parts, parts) if isinstance(parts, int) else tuple(map(int, parts))
        first, last = pair * 2 if len(pair) == 1 else pair
        if first == last == 0 or 0 < first <= last < 1 << 16:
            return first, last
    raise ArgumentError(f"ports is {ports!r}; expected a port, or (first, last) in 1 to 65535")


def address_of(interface: str) -> str:
    """Return the address of a network interface, or of an address or host name."""
    if not interface:
        return ""
    with suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    try:
        if interface in (name for _, name in socket.if_nameindex()):
            import fcntl  # absent outside POSIX

            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                request = struct.pack("256s", interface.encode()[:15])
                return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        return str(socket.getaddrinfo(interface, None)[0][4][0])
    except OSError as error:
        raise ArgumentError(
            f"interface is {interface!r}; expected a network interface, an address or a host "
            f"name of this machine: {error}"
        ) from error


def plain(address: str) -> str:
    """Return an IPv4 address that a socket for both kinds tells as an IPv6 one."""
    return address.removeprefix("::ffff:")


def is_loopback(address: str) -> bool:
    """Return whether an address leads to the machine that uses it."""
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def _address_towards(host: str) -> str:
    """Return the address by which this machine reaches a host; its own one if it does not."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # which sends nothing
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return _LOOPBACK


def _machine() -> str:
    """Return the identity of the running system and its network namespace."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    return socket.gethostname()
