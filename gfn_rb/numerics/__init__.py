"""Pure tensor mathematics: mutable distributions and selections. No TorchRL, no I/O."""

from gfn_rb.numerics.extremes import Extremes
from gfn_rb.numerics.rank_laws import RankedDistribution
from gfn_rb.numerics.weighted_tree import BoundedTree, WeightedTree

__all__ = ["BoundedTree", "Extremes", "RankedDistribution", "WeightedTree"]
