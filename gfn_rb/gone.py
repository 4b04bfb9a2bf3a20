"""Names and options of earlier versions, and what took over from each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gfn_rb.errors import ArgumentError

_BASELINE = "Baseline(percentile=, alpha=)"

NAMES = {
    "Awaited": 'ReplayBufferWorker(..., mode="awaited")',
    "Deferred": 'ReplayBufferWorker(..., mode="deferred")',
    "EMABaseline": _BASELINE,
    "MinBaseline": _BASELINE,
    "NonBlocking": 'ReplayBufferWorker(..., mode="nonblocking")',
    "PercentileBaseline": _BASELINE,
    "TrackedReplayBuffer": "gfn_rb.buffers.GFNReplayBuffer",
    "archive_buffer": "reward_prioritized_buffer(n, group=GridCells(...), per_group=1)",
    "inspect_checkpoint": "open_buffer(path), or the command gfn-rb inspect",
    "trajectory_log_probs": "taken_log_probs",
    "transition_log_probs": "taken_log_probs",
}
"""What took over from each name of a module."""

OPTIONS = {
    "evict": "fifo_buffer(n, group=, per_group=) keeps the newest rows of each group",
    "layout": "rows are drawn padded, with a mask such as tokens_mask",
    "log_pf": "losses compute log P_F; clipped_surrogate reads stored log-probabilities",
    "max_draws": "max_uses=n removes a row with its n-th draw",
    "payload": "terminating_state_buffer keeps and sends terminating states alone",
}
"""What took over from each option of a constructor or preset."""


def refuse_gone(options: Iterable[str], known: Iterable[str]) -> None:
    """Raise ArgumentError if an option is one of an earlier version, and none that is known."""
    for name in OPTIONS.keys() & set(options):
        if name not in known:
            raise ArgumentError(f"{name!r} was removed: {OPTIONS[name]}")


def refuse_name(package: str, name: str) -> None:
    """Raise ImportError if a name of a package is one of an earlier version.

    Python replaces an AttributeError in ``from package import name`` by an error of its own.
    """
    if name in NAMES:
        raise ImportError(f"{name!r} was removed from {package}: {NAMES[name]}")


def without_gone(package: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports all it exports."""

    def __getattr__(name: str) -> Any:
        refuse_name(package, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__


class NamesGoneOptions:
    """Base of classes whose constructors name what took over from an option that is gone."""

    if not TYPE_CHECKING:  # or checkers would take its signature for that of every constructor
        # Before ``__init__``, which would refuse the option by a TypeError of Python's.
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """Make an object, unless an option is gone."""
            if OPTIONS.keys() & kwargs.keys():
                refuse_gone(kwargs, inspect.signature(cls.__init__).parameters)
            return super().__new__(cls)
