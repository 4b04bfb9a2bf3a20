"""How the ranks of a run stand, from the files that they write."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

from gfn_rb.training.cli.tables import aligned_lines, number
from gfn_rb.training.session.folder import RunFolder
from gfn_rb.training.session.reading import MAX_RANKS, Status, printable

# Two tables of at most 80 columns.
_STANDING = ("rank", "role", "host", "state", "steps", "per s", "seen")
_COUNTS = ("rank", "calls", "per s", "modes", "loss", "age", "sent", "fed", "stored")
_LONGEST = 12  # letters of a host's name


class RunWatch:
    """Reads how the ranks of a run stand, again and again.

    A file that cannot be read for a moment, as on a network file system, counts as what it was.
    """

    def __init__(self, path: Path) -> None:
        self._folder = RunFolder.open(path)
        self._known: dict[int, Status | None] = {}

    def read(self) -> None:
        """Read what all ranks wrote last."""
        names = [path.name for path in self._folder.path.glob("status*.json")]
        found = [re.fullmatch(r"status(?:-rank(\d+))?\.json", name) for name in names]
        ranks = {int(match[1] or 0) for match in found if match}
        for rank in sorted(ranks | {*range(self._folder.n_ranks())}):
            if rank < MAX_RANKS:
                status = RunFolder(self._folder.path, rank).read_status()
                self._known[rank] = status or self._known.get(rank)

    @property
    def has_ended(self) -> bool:
        """Whether no rank goes on."""
        known = self._known.values()
        return all(status and status["state"] in ("done", "stopped") for status in known)

    def lines(self, now: float | None = None) -> Iterator[str]:
        """Yield two lines for each rank, and one for each loss of a peer."""
        time_now = time.time() if now is None else now
        known = self._known.items()
        standing = [_standing(rank, status, time_now) for rank, status in known]
        yield from aligned_lines([_STANDING, *standing])
        yield ""
        yield from aligned_lines([_COUNTS, *(_counts(rank, status) for rank, status in known)])
        for rank, status in known:
            for lost, why in (status["lost"] if status and "lost" in status else {}).items():
                yield printable(f"rank {rank} has lost rank {lost}{f': {why}' if why else ''}")


def _standing(rank: int, status: Status | None, now: float) -> list[str]:
    if status is None:
        return [str(rank), "", "", "silent", *[""] * (len(_STANDING) - 4)]
    of_steps = f" of {status['of_steps']:,}" if "of_steps" in status else ""
    host = printable(status["host"].partition(".")[0], _LONGEST)
    return [
        str(rank), printable(status["role"], 7), host, printable(status["state"], 7),
        f"{status['counts']['steps']:,}{of_steps}", _rate(status["rates"].get("steps")),
        f"{max(0.0, now - status['time']):.0f} s ago",
    ]  # fmt: skip


def _counts(rank: int, status: Status | None) -> list[str]:
    if status is None:
        return [str(rank), *[""] * (len(_COUNTS) - 1)]
    counts = status["counts"]
    return [
        str(rank), number(counts.get("calls")), _rate(status["rates"].get("calls")),
        number(status.get("modes_found")), number(status.get("loss")),
        number(status.get("mean_age")),
        number(counts.get("sent")), number(counts.get("fed")), number(status.get("stored")),
    ]  # fmt: skip


def _rate(per_second: float | None) -> str:
    return "" if per_second is None else f"{per_second:,.1f}"
