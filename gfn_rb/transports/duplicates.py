"""Duplicates of an MPI communicator, made without waiting for the other ranks."""

from __future__ import annotations

import atexit
import os
import threading
from types import ModuleType
from typing import Any

import numpy as np

_HOST_NBYTES = 256
_MOST_CORES = 4096  # of a machine
_LONGEST = 0.02  # seconds between two looks
# MPI may write to their memory as long as the process calls it, which is after Python's end.
_unfinished: set[Duplicates] = set()


class Duplicates:
    """Two duplicates of a communicator, and the machines of its ranks.

    Every function that makes a communicator is collective over its members (MPI 4.1, section
    7.4.2). ``MPI_Comm_idup`` starts in the constructor and ends once all ranks have started it. A
    thread tests for the end, because MPI moves messages only while it is called: a rank that
    waits for another one outside MPI would otherwise hold up the others. Without
    ``MPI_THREAD_MULTIPLE``, only calls of :meth:`ready` do so.

    The names of machines follow by an operation that no message waits for.

    Args:
        mpi: the module ``mpi4py.MPI``.
        whole: the communicator.

    Attributes:
        heads, bodies: the duplicates; not to be used before :meth:`ready` is True.
        hosts: name of every rank's machine; None until they are known.
        share_cores: whether a machine is known to have fewer cores than ranks.
        error: ``MPI.Exception`` of the duplication; None without one.
    """

    def __init__(self, mpi: ModuleType, whole: Any) -> None:
        self._mpi = mpi
        self.heads, first = whole.Idup()
        self.bodies, second = whole.Idup()
        self._requests = [first, second]
        self._told = np.empty((whole.Get_size(), _HOST_NBYTES + _MOST_CORES // 8), np.uint8)
        self.hosts: list[str] | None = None
        self.share_cores = False
        self.error: Exception | None = None
        self._is_ready = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        _unfinished.add(self)
        if mpi.Query_thread() == mpi.THREAD_MULTIPLE:
            self._thread = threading.Thread(target=self._run, name="gfn_rb MPI", daemon=True)
            self._thread.start()
            atexit.register(self._end)

    def ready(self) -> bool:
        """Return whether the duplicates can be used, or their duplication failed."""
        if self._thread is None:
            self._advance()
        return self._is_ready or self.error is not None

    def _run(self) -> None:
        pause = 1e-4
        while not self._advance() and not self._stop.wait(pause):
            pause = min(2 * pause, _LONGEST)

    def _end(self) -> None:
        """End the thread before the process ends MPI, which must not be called after that."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _advance(self) -> bool:
        """Take the next step if it can be taken; return whether there are no more."""
        if self.hosts is not None or self.error is not None:
            return True
        try:
            if not self._mpi.Request.Testall(self._requests):
                return False
            if self._is_ready:
                self._read()
                _unfinished.discard(self)
                return True
            for each in (self.heads, self.bodies):
                each.Set_errhandler(self._mpi.ERRORS_RETURN)
            own = [self._own(), self._mpi.BYTE]
            self._requests = [self.heads.Iallgather(own, [self._told, self._mpi.BYTE])]
            self._is_ready = True
        except self._mpi.Exception as error:
            if not self._is_ready:
                self.error = error
            self.hosts = [""] * len(self._told)  # a rank died before it told its own
            return True
        return False

    def _own(self) -> np.ndarray:
        """Return the name of this machine, and which of its cores this rank may use."""
        name = self._mpi.Get_processor_name().encode()[:_HOST_NBYTES].ljust(_HOST_NBYTES, b"\0")
        usable = np.zeros(_MOST_CORES, np.uint8)
        # Launchers may bind each rank to a core of its own.
        cores = (
            os.sched_getaffinity(0)
            if hasattr(os, "sched_getaffinity")
            else range(os.cpu_count() or 1)
        )
        usable[[core % _MOST_CORES for core in cores]] = 1
        return np.concatenate([np.frombuffer(name, np.uint8), np.packbits(usable)])

    def _read(self) -> None:
        hosts = [bytes(each).rstrip(b"\0") for each in self._told[:, :_HOST_NBYTES]]
        here = np.array([each == hosts[self.heads.Get_rank()] for each in hosts])
        cores = np.bitwise_or.reduce(self._told[here, _HOST_NBYTES:])
        self.share_cores = int(np.unpackbits(cores).sum()) < int(here.sum())
        self.hosts = [each.decode(errors="replace") for each in hosts]
