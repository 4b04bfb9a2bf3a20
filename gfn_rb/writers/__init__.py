"""Writers: which of the offered items a storage keeps."""

from typing import TYPE_CHECKING

from gfn_rb.lazy import lazy_exports

if TYPE_CHECKING:
    from gfn_rb.writers.diversity import DiversityWriter
    from gfn_rb.writers.fifo import FIFOWriter
    from gfn_rb.writers.reward import RewardPrioritizedWriter

__all__ = ["DiversityWriter", "FIFOWriter", "RewardPrioritizedWriter"]

__getattr__ = lazy_exports(
    __name__, diversity="DiversityWriter", fifo="FIFOWriter", reward="RewardPrioritizedWriter"
)
