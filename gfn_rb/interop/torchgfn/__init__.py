"""torchgfn's environments, estimators, buffers and managers on our parts; it needs torchgfn."""

from gfn.containers.replay_buffer import Container as Container

from gfn_rb.interop.torchgfn.buffers import (
    ContainerUnion,
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
from gfn_rb.interop.torchgfn.remote import connect
from gfn_rb.interop.torchgfn.rows import container_of, rows_of
from gfn_rb.interop.torchgfn.samplers import LocalSearchSampler, Sampler

DATA_TAG = 0
"""The tag of torchgfn's messages with items; here each frame contains its kind."""
METADATA_TAG = 1
"""The tag of torchgfn's messages with metadata; here each frame contains its kind."""

__all__ = [
    "DATA_TAG",
    "METADATA_TAG",
    "ContainerUnion",
    "LocalSearchSampler",
    "NormBasedDiversePrioritizedReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferManager",
    "Sampler",
    "TerminatingStateBuffer",
    "TorchGFNEnv",
    "TorchGFNNetwork",
    "adapt_env",
    "adapt_estimator",
    "connect",
    "container_of",
    "rows_of",
]
