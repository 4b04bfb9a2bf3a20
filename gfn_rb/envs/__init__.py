"""Environments native to TorchRL, with exact answers where they can be enumerated."""

from gfn_rb.envs.base import GFNEnv
from gfn_rb.envs.bayesian_dag import BayesianDAG
from gfn_rb.envs.bit_sequence import BitSequence
from gfn_rb.envs.checks import check_env
from gfn_rb.envs.continuous import Box, ContinuousEnv
from gfn_rb.envs.diffusion import DiffusionEnv, Funnel, Gaussians25, Line, Manywell
from gfn_rb.envs.enumerable import EnumerableEnv, uniform_log_pf
from gfn_rb.envs.grid import ConditionalHyperGrid, DeceptiveGrid, GridEnv, HyperGrid
from gfn_rb.envs.rna_binding import RNABinding
from gfn_rb.envs.scored_sequences import QM9Strings, ScoredSequenceEnv, TFBind8
from gfn_rb.envs.sequence import SequenceEnv

__all__ = [
    "BayesianDAG",
    "BitSequence",
    "Box",
    "ConditionalHyperGrid",
    "ContinuousEnv",
    "DeceptiveGrid",
    "DiffusionEnv",
    "EnumerableEnv",
    "Funnel",
    "GFNEnv",
    "Gaussians25",
    "GridEnv",
    "HyperGrid",
    "Line",
    "Manywell",
    "QM9Strings",
    "RNABinding",
    "ScoredSequenceEnv",
    "SequenceEnv",
    "TFBind8",
    "check_env",
    "uniform_log_pf",
]
