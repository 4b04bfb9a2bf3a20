"""How a mutable array is cut into blocks.

Both structures of this package are trees of depth two. The N rows are in N/B blocks of B rows.
Each block has one summary (a sum, a minimum), which is recomputed from its rows alone. A write of m
rows costs m*B, and a query N/B + m*B, each in a few tensor operations. Summaries are therefore a
pure function of the rows: nothing drifts, and a restored structure equals one never interrupted.
"""

from __future__ import annotations

import math

_SMALLEST_BLOCK = 16


def block_size(capacity: int) -> int:
    """Return B, the power of two near sqrt(capacity / 256), at least 16.

    It balances N/B against m*B for batches of some 100 rows, a gathered row costing more than a
    scanned one, and was measured flat within a factor of two either way.
    """
    return max(_SMALLEST_BLOCK, 2 ** round(math.log2(max(capacity, 1) / 256) / 2))


def block_count(capacity: int) -> int:
    """Return the number of blocks that hold ``capacity`` rows, the last one perhaps padded."""
    return max(1, -(-capacity // block_size(capacity)))
