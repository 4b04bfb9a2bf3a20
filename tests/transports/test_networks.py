"""Ranks on machines of their own network, as far as network namespaces of one machine show it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from transports.ranks import environment

RANK = """
import socket, sys
import transports.little
from gfn_rb.transports.tcp import TCPTransport
where, rank = sys.argv[1], int(sys.argv[2])
assert socket.gethostbyname(socket.gethostname()) == "127.0.1.1"
with TCPTransport(where, rank, 3, timeout=30.0) as transport:
    for other in {0, 1, 2} - {rank}:  # all of them call each other
        transport.isend([b"hello"], other)
    for other in {0, 1, 2} - {rank}:
        assert bytes(transport.recv(other).data) == b"hello"
print("met")
"""
NAMES = [f"gfnrb{os.getpid()}{side}" for side in "ab"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20.0)


@pytest.fixture
def networks() -> Iterator[list[str]]:
    """Two network namespaces of one host name, which /etc/hosts gives a loopback address."""
    if os.name != "posix" or os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and ip")
    folders = [Path("/etc/netns") / name for name in NAMES]
    try:
        for i, (name, folder) in enumerate(zip(NAMES, folders, strict=True)):
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError:
                pytest.skip("network namespaces are not allowed")
            folder.mkdir(parents=True)
            folder.joinpath("hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {os.uname()[1]}\n")
            if i:
                ends = ["type", "veth", "peer", "name", "wire", "netns", name]
                ip("-n", NAMES[0], "link", "add", "wire", *ends)
        for i, name in enumerate(NAMES):
            ip("-n", name, "addr", "add", f"10.99.0.{i + 1}/24", "dev", "wire")
            for device in ("lo", "wire"):
                ip("-n", name, "link", "set", device, "up")
        yield NAMES
    finally:
        for name, folder in zip(NAMES, folders, strict=True):
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("own", ["127.0.0.1", "10.99.0.1"])
def test_machines_of_one_name_meet_though_it_leads_back_to_each(
    networks: list[str], own: str
) -> None:
    """Ranks 0 and 1 share a machine, and may know it as localhost; rank 2 is on the other one."""
    ranks = [(networks[0], own), (networks[0], own), (networks[1], "10.99.0.1")]
    command = [sys.executable, "-c", RANK]
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *command, f"tcp://{host}:29411", str(rank)],
            **{"env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE},
        )
        for rank, (name, host) in enumerate(ranks)
    ]
    try:
        said = [each.communicate(timeout=90.0) for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()
    assert [out.decode().strip() for out, _ in said] == ["met"] * 3, said
