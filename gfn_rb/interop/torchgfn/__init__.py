"""torchgfn's environments, estimators, buffers and managers on our parts; it needs torchgfn."""

from gfn_rb.interop.torchgfn.buffers import (
    NormBasedDiversePrioritizedReplayBuffer,
    ReplayBuffer,
    TerminatingStateBuffer,
)
from gfn_rb.interop.torchgfn.environment import (
    TorchGFNEnv,
    TorchGFNNetwork,
    adapt_env,
    adapt_estimator,
)
from gfn_rb.interop.torchgfn.manager import ReplayBufferManager
from gfn_rb.interop.torchgfn.rows import container_of, rows_of

__all__ = [
    "NormBasedDiversePrioritizedReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferManager",
    "TerminatingStateBuffer",
    "TorchGFNEnv",
    "TorchGFNNetwork",
    "adapt_env",
    "adapt_estimator",
    "container_of",
    "rows_of",
]
