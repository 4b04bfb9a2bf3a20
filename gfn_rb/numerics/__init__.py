"""Pure tensor mathematics: mutable distributions and selections. No TorchRL, no I/O."""

from gfn_rb.numerics.extremes import Extremes
from gfn_rb.numerics.host_extremes import extremes_of
from gfn_rb.numerics.host_tree import weighted_tree
from gfn_rb.numerics.rank_laws import RankedDistribution
from gfn_rb.numerics.weighted_tree import WeightedTree

__all__ = ["Extremes", "RankedDistribution", "WeightedTree", "extremes_of", "weighted_tree"]
