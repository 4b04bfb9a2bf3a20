"""The configurations of the shipped environments: the options of each, and its defaults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from gfn_rb.training import options, rules
from gfn_rb.training.train_config import (
    CONFIGS as CONFIGS,
    FORMAT as FORMAT,
    TrainConfig as TrainConfig,
    find_config as find_config,
    flat as flat,
    group_named as group_named,
)

FormName = Literal["append", "prepend_append", "non_autoregressive"]
ModesName = Literal["top", "published"]
RNAModesName = Literal["threshold", "published"]
# The square fits these targets sooner.
FITS_SOONER = {"regression": "squared"}


@dataclass(frozen=True, kw_only=True)
class TFBind8Config(TrainConfig):
    """Design DNA 8-mers that the transcription factor SIX6 binds."""

    env: ClassVar[str] = "tfbind8"

    form: FormName = "append"
    """Write letters at the right end, at both ends, or at any place."""
    beta: float = 3.0
    """Exponent of the reward."""
    modes: ModesName = "top"
    """Which 8-mers count as modes: the 327 of highest score, or the 328 published ones, of high
    score and no two within one letter of each other."""


@dataclass(frozen=True, kw_only=True)
class QM9StringsConfig(TrainConfig):
    """Design molecules of five building blocks with a wide HOMO-LUMO gap."""

    env: ClassVar[str] = "qm9_strings"

    form: FormName = "prepend_append"
    """Write blocks at the right end, at both ends, or at any place."""
    beta: float = 20.0
    """Exponent of the reward."""


@dataclass(frozen=True, kw_only=True)
class HyperGridConfig(TrainConfig, defaults=FITS_SOONER):
    """Find the rewarded corners of a grid."""

    env: ClassVar[str] = "hypergrid"
    every_state_terminates: ClassVar[bool] = True
    distance_p: ClassVar[float] = 1.0

    ndim: int = 4
    """Coordinates."""
    height: int = 8
    """Grid points per coordinate."""
    r0: float = 0.1
    """Reward everywhere."""
    r1: float = 0.5
    """Reward added in the outer bands."""
    r2: float = 2.0
    """Reward added in the inner bands."""


@dataclass(frozen=True, kw_only=True)
class ConditionalHyperGridConfig(HyperGridConfig, defaults={"ndim": 2}):
    """Find the rewarded corners of a grid at any temperature that the policy is told."""

    env: ClassVar[str] = "conditional_hypergrid"

    min_beta: float = 0.5
    """Lowest exponent of the reward (inverse temperature)."""
    max_beta: float = 2.0
    """Highest exponent of the reward."""

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Yield the options that have no effect with the others, and the condition they need."""
        yield from super().without_effect()
        yield "lr_log_z", "the environment has no conditions, where log Z is a network"


@dataclass(frozen=True, kw_only=True)
class DeceptiveGridConfig(TrainConfig):
    """Find the goals of a grid that are surrounded by almost no reward (Kim et al. 2024)."""

    env: ClassVar[str] = "deceptive_grid"
    every_state_terminates: ClassVar[bool] = True
    distance_p: ClassVar[float] = 1.0

    ndim: int = 4
    """Coordinates."""
    height: int = 16
    """Grid points per coordinate."""


# Without a local search that rewrites one word of up to 16 at a time few modes are found.
BITS = {"steps": 100, "log_z": 0.0, "search": options.SearchOptions(31, back_ratio=0.06)}


@dataclass(frozen=True, kw_only=True)
class BitSequenceConfig(TrainConfig, defaults=BITS):
    """Write long bit strings that come close to hidden ones."""

    env: ClassVar[str] = "bit_sequence"

    n_bits: int = 120
    """Bits in a string."""
    word_bits: int = 8
    """Bits written at a time."""
    form: FormName = "append"
    """Write words at the right end, at both ends, or at any place."""
    modes: int = field(default=60, metadata={"argument": "n_modes"})
    """Hidden strings."""
    beta: float | None = None
    """Exponent of the reward; twice the bits by default, 2 nats per bit astray."""
    delta: int | None = None
    """A mode is found by any string within this many bits; 28/120 of the bits by default."""


@dataclass(frozen=True, kw_only=True)
class RNABindingConfig(TrainConfig):
    """Design RNA that binds to given RNA, by ViennaRNA's thermodynamic model."""

    env: ClassVar[str] = "rna_binding"

    targets: tuple[str, ...] = ("RNA1",)
    """RNA to bind: names among RNA1 to RNA4, or sequences of ACGU; the score is the mean."""
    length: int = 14
    """Letters to write."""
    form: FormName = "append"
    """Write letters at the right end, at both ends, or at any place."""
    beta: float = 8.0
    """Exponent of the reward."""
    threshold: float = 0.8
    """Sequences that score this much are counted as modes."""
    modes: RNAModesName = "threshold"
    """Count sequences of at least the threshold as modes, or the published ones of one of RNA1 to
    RNA3."""


@dataclass(frozen=True, kw_only=True)
class BayesianDAGConfig(TrainConfig, defaults={**FITS_SOONER, "lr_end": 1.0}):
    """Draw structures of Bayesian networks by how well they explain data (Deleu et al. 2022)."""

    env: ClassVar[str] = "bayesian_dag"
    every_state_terminates: ClassVar[bool] = True

    n_nodes: int | None = None
    """Nodes of the network; by default the columns of the data, or 5."""
    data: str | None = None
    """A .npy or .csv file with a row per sample and a column per node. By default samples are drawn
    from a random linear-Gaussian network."""
    n_samples: rules.PositiveInt = 100
    """Samples to draw where no data is given."""
    data_seed: rules.Seed = field(default=0, metadata={"argument": "seed"})
    """Seed of the network and its samples."""

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Yield the options that have no effect with the others, and the condition they need."""
        yield from super().without_effect()
        if self.data is not None:
            yield from ((name, "data is not given") for name in ("n_samples", "data_seed"))


# First walks may end where the reward is next to nothing, by hundreds of nats, of which Linex makes
# less than the square; with alpha 1, fresh trajectories leave no bias in log Z.
CONTINUOUS = {"compact": "none", "hidden": (128, 128), "lr": 3e-3, "linex_alpha": 1.0}


@dataclass(frozen=True, kw_only=True)
class ContinuousConfig(TrainConfig, defaults=CONTINUOUS):
    """Defaults of environments whose moves have parameters."""

    distance_p: ClassVar[float] = 1.0


@dataclass(frozen=True, kw_only=True)
class LineConfig(ContinuousConfig, defaults={"replay": "trajectories", "replay_ratio": 1.0}):
    """Walk to where a mixture of normal distributions is dense (Lahlou et al. 2023)."""

    env: ClassVar[str] = "line"

    means: tuple[float, ...] = (-1.5, 1.5)
    """Means of the normal distributions."""
    scales: tuple[float, ...] = (0.5, 0.5)
    """Their standard deviations."""
    n_steps: rules.PositiveInt = 5
    """Moves of a walk."""


# Some walks have far too little flow: replayed they drive log Z up, and with Linex their gradients
# are long.
BOX = {"replay_ratio": 0.0, "lr_end": 0.05, "clip_grad_norm": 5.0}


@dataclass(frozen=True, kw_only=True)
class BoxConfig(ContinuousConfig, defaults=BOX):
    """Step over the unit square to its rewarded corners (Lahlou et al. 2023)."""

    env: ClassVar[str] = "box"

    delta: rules.PositiveFloat = 0.25
    """Length of a step."""
    r0: float = 0.1
    """Reward everywhere."""
    r1: float = 0.5
    """Reward added in the outer bands."""
    r2: float = 2.0
    """Reward added in the inner bands."""


DIFFUSION = {
    "steps": 2500,
    "batch_size": 128,
    "hidden": (64, 64),
    "lr": 1e-3,
    "regression": "squared",
    "lr_log_z": 0.1,
    "replay_ratio": 1.0,
    "keep": options.KeepRecent(),  # the densest points would all be centres of modes
    "draw": options.RankDraw(k=0.01),
}


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig(ContinuousConfig, defaults=DIFFUSION):
    """Defaults of diffusion samplers (Sendera et al. 2024, arXiv:2402.05098).

    They are meant for runs of 320,000 walks, 2,500 steps of 128. For a few thousand walks they were
    not compared with the defaults of other environments.
    """

    n_steps: rules.PositiveInt = 100
    """Moves of a walk."""
    sigma: rules.PositiveFloat = 1.0
    """Standard deviation of the end of the reference walk."""


@dataclass(frozen=True, kw_only=True)
class Gaussians25Config(DiffusionConfig, defaults={"sigma": 5**0.5}):
    """Sample a mixture of 25 normal distributions in the plane (Sendera et al. 2024)."""

    env: ClassVar[str] = "gaussians25"


@dataclass(frozen=True, kw_only=True)
class FunnelConfig(DiffusionConfig):
    """Sample Neal's funnel in ten dimensions (Sendera et al. 2024)."""

    env: ClassVar[str] = "funnel"

    ndim: int = 10
    """Coordinates."""


@dataclass(frozen=True, kw_only=True)
class ManywellConfig(DiffusionConfig):
    """Sample a product of double wells in 32 dimensions (Sendera et al. 2024)."""

    env: ClassVar[str] = "manywell"

    ndim: int = 32
    """Coordinates, an even number."""
