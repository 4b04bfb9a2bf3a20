"""How each rank of a run stands, in small files that anybody may read while it goes on."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from gfn_rb.training.session.folder import RunFolder

EVERY = 5.0  # seconds between two writings of a rank


class StatusWriter:
    """Writes how a rank stands, every five seconds at most.

    The file says who the rank is and when it wrote, in seconds since the epoch, and what it was
    told; and for each count how much was added per second since the writing before. It is replaced
    in one step, and not synced: a crash of the machine may take it away.
    """

    def __init__(
        self,
        folder: RunFolder,
        role: Literal["worker", "manager"],
        standing: Callable[[], dict[str, Any]],
    ) -> None:
        self._path, self._standing = folder.status, standing
        self._who = {"role": role, "host": socket.gethostname(), "process": os.getpid()}
        self._counts: dict[str, int] = {}
        self._since = self._next = time.monotonic()

    def __call__(self, state: Literal["running", "stopped", "done"] = "running") -> None:
        """Write, unless the rank runs on and has written a moment ago."""
        now = time.monotonic()
        if state == "running" and now < self._next:
            return
        standing = self._standing()
        counts, seconds = standing["counts"], now - self._since
        rates = {
            name: (counts[name] - before) / seconds
            for name, before in self._counts.items()
            if seconds > 0
        }
        self._counts, self._since, self._next = counts, now, now + EVERY
        status = {**self._who, "state": state, "time": time.time(), "rates": rates, **standing}
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        with suppress(OSError):  # of a full disk, a checkpoint will tell
            temporary.unlink(missing_ok=True)  # which may be a pipe, or lead elsewhere
            with temporary.open("x") as stream:
                stream.write(json.dumps(status))
            temporary.replace(self._path)
