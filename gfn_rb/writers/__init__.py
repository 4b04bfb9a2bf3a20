"""Writers: which of the offered items a storage keeps."""

from gfn_rb.writers.diversity import DiversityWriter
from gfn_rb.writers.fifo import FIFOWriter
from gfn_rb.writers.reward import RewardPrioritizedWriter

__all__ = ["DiversityWriter", "FIFOWriter", "RewardPrioritizedWriter"]
