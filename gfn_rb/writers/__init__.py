"""Writers: which of the offered items a storage keeps."""

from typing import TYPE_CHECKING

from gfn_rb.lazy import lazy_exports

if TYPE_CHECKING:
    from gfn_rb.writers.cells import (
        Cells as Cells,
        CentroidCells as CentroidCells,
        GridCells as GridCells,
    )
    from gfn_rb.writers.diversity import DiversityWriter as DiversityWriter
    from gfn_rb.writers.fifo import FIFOWriter as FIFOWriter
    from gfn_rb.writers.reward import RewardPrioritizedWriter as RewardPrioritizedWriter

__getattr__, __all__ = lazy_exports(__name__)
