"""The classes and arguments that a file may name in the description of a buffer.

A file may be a stranger's. Its description makes objects, so it names parts from this list alone,
and arguments that are no path, device, address or option of the process. Code that is not in the
list needs ``trust=True``.
"""

from __future__ import annotations

_PARTS = "storage", "writer", "sampler", "batch_size", "transform"
_OPTIONS = (
    *("prefetch", "generator", "collate_fn", "sample_unit", "transform_factory", "dim_extend"),
    *("consume_after_n_samples", "compilable"),
)
_OF_WRITERS = "track_generations", "compilable"
_KEEPS_OBJECTS = "unique", "on_duplicate", "group", "per_group"
_GRID = "ndim", "height", "batch_size"
_CORNERS = "r0", "r1", "r2"
_MOVES = "n_steps", "sigma", "batch_size"
_WORDS = "form", "beta", "batch_size"

ALLOWED: dict[str, tuple[str, ...]] = {
    "gfn_rb.buffers.compact:CompactRows": ("env", "states"),
    "gfn_rb.buffers.merged:MergedReplayBuffer": (
        *("batch_size", "transform", "generator", "collate_fn", "p"),
        *("prefetch", "collate_fns", "routing_key"),
    ),
    "gfn_rb.buffers.packing:PackTrajectories": ("env", "patience"),
    "gfn_rb.buffers.rate_limiter:RateLimiter": (
        *("samples_per_insert", "min_size", "tolerance", "timeout"),
    ),
    "gfn_rb.buffers.replay_buffer:GFNReplayBuffer": (
        *(*_PARTS, *_OPTIONS, "priority_key", "statistics", "rate_limiter", "max_age"),
        "max_uses",
    ),
    "gfn_rb.buffers.transforms:KeepItems": ("dropped", "max_length"),
    "gfn_rb.buffers.transforms:KeepStates": ("dropped",),
    "gfn_rb.buffers.transforms:KeepTerminatingStates": ("regenerate",),
    "gfn_rb.buffers.transforms:KeepTransitions": ("dropped",),
    "gfn_rb.buffers.transforms:PadTrajectories": ("max_length",),
    "gfn_rb.envs.bayesian_dag:BayesianDAG": ("n_nodes", "data", "n_samples", "seed", "batch_size"),
    "gfn_rb.envs.bit_sequence:BitSequence": (
        *("n_bits", "word_bits", "n_modes", "delta", "seed", *_WORDS),
    ),
    "gfn_rb.envs.continuous:Box": ("delta", *_CORNERS, "batch_size"),
    "gfn_rb.envs.diffusion:Funnel": ("ndim", *_MOVES),
    "gfn_rb.envs.diffusion:Gaussians25": _MOVES,
    "gfn_rb.envs.diffusion:Line": ("means", "scales", "start", *_MOVES),
    "gfn_rb.envs.diffusion:Manywell": ("ndim", *_MOVES),
    "gfn_rb.envs.grid:ConditionalHyperGrid": ("min_beta", "max_beta", *_CORNERS, *_GRID),
    "gfn_rb.envs.grid:DeceptiveGrid": _GRID,
    "gfn_rb.envs.grid:HyperGrid": (*_CORNERS, *_GRID),
    "gfn_rb.envs.rna_binding:RNABinding": (
        *("targets", "length", "min_reward", "threshold", "modes", *_WORDS),
    ),
    "gfn_rb.envs.scored_sequences:QM9Strings": ("min_reward", *_WORDS),
    "gfn_rb.envs.scored_sequences:TFBind8": ("min_reward", "modes", *_WORDS),
    "gfn_rb.storages.ragged:RaggedStorage": ("max_size", "ragged", "text", "mask", "page_size"),
    "gfn_rb.samplers.groups:GroupSampler": (
        *("group", "num_groups", "samples_per_group", "weight", "key", "temperature"),
        *("replacement", "within", "small"),
    ),
    "gfn_rb.samplers.priority:PrioritySampler": (
        *("key", "alpha", "eps", "beta", "replacement", "decay"),
    ),
    "gfn_rb.samplers.ranked:QuantileRewardSampler": (
        *("key", "top_fraction", "top_share", "replacement"),
    ),
    "gfn_rb.samplers.ranked:RankRewardSampler": ("key", "k", "replacement"),
    "gfn_rb.samplers.ranked:RecencySampler": ("key", "newest", "decay", "replacement"),
    "gfn_rb.samplers.softmax:SoftmaxRewardSampler": ("key", "temperature", "replacement"),
    "gfn_rb.storages.tensors:RowTensorStorage": ("max_size",),
    "gfn_rb.writers.cells:CentroidCells": ("key", "centroids", "offset"),
    "gfn_rb.writers.cells:GridCells": ("key", "low", "high", "shape", "offset"),
    "gfn_rb.writers.diversity:DiversityWriter": (
        *("key", "features", "cutoff_distance", "p", "near", "when", "tie", "group", "per_group"),
        *("distance", "largest", *_OF_WRITERS),
    ),
    "gfn_rb.writers.fifo:FIFOWriter": (*_KEEPS_OBJECTS, "whole_groups", *_OF_WRITERS),
    "gfn_rb.writers.fifo:UniqueFIFOWriter": (*_KEEPS_OBJECTS, "whole_groups", *_OF_WRITERS),
    "gfn_rb.writers.reward:RewardPrioritizedWriter": (
        *("key", "tie", "largest", *_KEEPS_OBJECTS, *_OF_WRITERS),
    ),
    "torch._C:Generator": (),
    "torchrl.data.replay_buffers.replay_buffers:ReplayBuffer": _PARTS,
    "torchrl.data.replay_buffers.replay_buffers:TensorDictReplayBuffer": (*_PARTS, "priority_key"),
    "torchrl.data.replay_buffers.samplers:RandomSampler": (),
    "torchrl.data.replay_buffers.writers:RoundRobinWriter": (),
    "torchrl.data.replay_buffers.writers:TensorDictRoundRobinWriter": (),
}

# Where a buffer is, and who shares it: not written, and refused beside a trusted class, too.
ELSEWHERE = {
    *("device", "shared", "pin_memory", "delayed_init", "checkpointer", "members", "scratch_dir"),
    *("service_backend", "service_backend_options", "transport", "transport_options"),
}
