"""Processes that tests start, all from one interpreter that has imported what they need."""

from __future__ import annotations

import multiprocessing as mp
from multiprocessing.context import ForkServerContext

_PRELOAD = ["torchrl.collectors", "gfn_rb.training", "hypothesis", "pytest", "scipy.stats"]


def fast_spawn() -> ForkServerContext:
    """Return a context as strict as "spawn", in which only the first process takes seconds.

    What a process is given is pickled and nothing else is inherited, as with "spawn"; but it is
    forked from a server that has made its imports, once for all tests.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context
