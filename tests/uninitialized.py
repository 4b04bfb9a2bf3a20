"""Importing this fills memory that nobody wrote with NaN or the largest integer.

``torch.empty`` and its kin do so in deterministic mode; ``np.empty`` is replaced. Processes that
tests start by the fork server inherit both.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def filled(empty: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def make(*args: Any, **options: Any) -> np.ndarray:
        array = empty(*args, **options)
        if array.dtype.kind in "fc":
            array.fill(np.nan)
        elif array.dtype.kind in "iu":
            array.fill(np.iinfo(array.dtype).max)
        return array

    return make


torch.use_deterministic_algorithms(True)
np.empty, np.empty_like = filled(np.empty), filled(np.empty_like)
