"""What messages are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Buffer = Any  # bytes, memoryview, array: anything contiguous that memoryview takes; or LazyBuffer


class LazyBuffer(NamedTuple):
    """A buffer that is made while those before it may already be on their way.

    So a checksum can be computed while what it sums is being sent.
    """

    nbytes: int
    make: Callable[[], bytes]
