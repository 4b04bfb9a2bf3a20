"""The published protocols: what was published, what is asked, and the configuration run here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gfn_rb.envs import BayesianDAG
from gfn_rb.errors import ArgumentError
from gfn_rb.rollout import Sampler
from gfn_rb.training import Hooks, TrainConfig, Trainer
from gfn_rb.training.metrics import ExactFit, total_variation

N_SAMPLES = 2048  # of a policy, at the end of a run

Measure = Callable[[Trainer], dict[str, float]]


@dataclass(frozen=True)
class Figure:
    """A number that a row is compared by.

    Args:
        title: what it is called.
        key: its name among what the row measures.
        bound: what is asked of its mean over the seeds; None where nothing is.
        more_is_better: whether that is a lower bound.
        is_median: whether the median stands for the runs, instead of their mean.
        digits: how many decimals to print.
    """

    title: str
    key: str
    bound: float | None
    more_is_better: bool = True
    is_median: bool = False
    digits: int = 1

    @property
    def asked(self) -> str:
        """The bound, in words."""
        if self.bound is None:
            return ""
        return f"{'more' if self.more_is_better else 'less'} than {self.bound:,}"


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Args:
        name: what the command line calls it.
        title: the task.
        protocol: the published protocol, what counts as a reward call included.
        published: what others reached, with the source.
        settings: what is done differently here, and why.
        config: the configuration, but for the seed.
        calls: reward calls of a run.
        figures: what is compared.
        measure: returns these figures of a trained run, by name.
        n_modes: how many modes there are to be found; 0 where they are not counted.
        looks: calls, in ascending order, after which the modes found are a figure named
            "modes_at_N".
        milestones: numbers of modes, in ascending order; the calls until each are figures named
            "calls_to_N", and a run ends at the last. A run that falls short has all its calls.
        hooks: returns new hooks of a run.
        trainer: returns what trains, given the configuration and the hooks: a trainer, or a peer
            with a method ``step`` and with ``env``, ``discovery`` and ``fit`` of a trainer.
    """

    name: str
    title: str
    protocol: str
    published: str
    settings: str
    config: TrainConfig
    calls: int
    figures: tuple[Figure, ...]
    measure: Measure
    n_modes: int = 0
    looks: tuple[int, ...] = ()
    milestones: tuple[int, ...] = ()
    hooks: Callable[[], Hooks] = Hooks
    trainer: Callable[..., Any] = Trainer

    @property
    def calls_per_step(self) -> int:
        """Fresh trajectories of one step, proposals of local search among them."""
        return self.config.batch_size * (1 + self.config.search.loops)


def modes_found(trainer: Trainer) -> dict[str, float]:
    """Return how many modes the fresh trajectories of a run have reached."""
    return {"modes_found": trainer.discovery.modes_found}


def fit(trainer: Trainer) -> dict[str, float]:
    """Return how far the learned log Z is off, and the accuracy of 2,048 samples of the policy.

    Accuracy is their mean score over that of the target, at most 1.
    """
    generator = torch.Generator().manual_seed(trainer.config.seed)
    sampler = Sampler(trainer.loss.forward_policy)
    fresh = sampler.sample_trajectories(trainer.env, N_SAMPLES, generator=generator)
    score = trainer.env.score(fresh.terminating_states, fresh.log_reward).mean()
    assert trainer.env.true_log_z is not None
    assert trainer.env.expected_score is not None
    return {
        "log_z_gap": abs(trainer.log_z - trainer.env.true_log_z),
        "accuracy": min(1.0, float(score) / trainer.env.expected_score),
        **modes_found(trainer),
    }


def posterior(trainer: Trainer) -> dict[str, float]:
    """Return the exact distance to the posterior over graphs, and the worst edge's error."""
    assert isinstance(trainer.env, BayesianDAG)
    assert isinstance(trainer.fit, ExactFit)
    log_p = trainer.fit.policy_log_prob()
    error = trainer.env.edge_marginals(log_p) - trainer.env.edge_marginals()
    return {
        "total_variation": total_variation(log_p, trainer.env.target_log_prob()),
        "edge_error": float(error.abs().max()),
    }


_GRID_CALLS = (
    "batches of 16, one gradient step on each batch and one on 16 replayed items; a call is a "
    "fresh trajectory; goals are counted among fresh trajectories over the whole run"
)
_GRID_SETTINGS = (
    "batches of 64; the buffer keeps the best objects, each once (published: the most recent)"
)
_SMALLER = f"{_GRID_SETTINGS}; networks of 2 x 128 units (published: 2 x 256)"


# Every option of every row, resolved: a row does not change with the defaults. A new option must be
# added to the file with the value that leaves the rows as they are.
_PROTOCOLS = json.loads((Path(__file__).parent / "protocols.json").read_text())


def _pinned(name: str) -> TrainConfig:
    """Return the configuration of a row, but for its seed."""
    try:
        return TrainConfig.from_dict(_PROTOCOLS[name])
    except ArgumentError as error:
        raise ArgumentError(f"benchmarks/published/protocols.json, {name}: {error}") from error


_GRID_4D = Row(
    name="grid_4d",
    title="deceptive grid, 4-d, height 32 (1,296 goals)",
    protocol=_GRID_CALLS,
    published=(
        "TB 16.6, PER about 47, PRT 120.4 ± 19.1, adaptive teacher 246.6 ± 14.7 (Kim et al. 2024, "
        "arXiv:2410.01432)"
    ),
    settings=f"two replayed items for each fresh one; {_SMALLER}",
    config=_pinned("grid_4d"),
    calls=384_000,
    figures=(
        Figure("calls until 121 goals (PRT 120.4)", "calls_to_121", 384_000, False, digits=0),
        Figure("calls until 247 goals (teacher 246.6)", "calls_to_247", 384_000, False, digits=0),
    ),
    measure=modes_found,
    n_modes=1_296,
    milestones=(121, 247),
)
_GRID_4D_16 = Row(
    name="grid_4d_16",
    title="deceptive grid, 4-d, height 16 (81 goals), 36,000 calls",
    protocol=_GRID_CALLS,
    published="measured with the published code, PRT, see the table of published code",
    settings=(
        "Linex cost of the residual; two replayed items for each fresh one, drawn by a sharper "
        "rank (k = 0.001, published: 0.01); "
        f"{_GRID_SETTINGS}"
    ),
    config=_pinned("grid_4d_16"),
    calls=36_000,
    figures=(Figure("goals found", "modes_found", 69),),
    measure=modes_found,
    n_modes=81,
)
_GRID_2D = Row(
    name="grid_2d",
    title="deceptive grid, 2-d, height 256 (2,601 goals)",
    protocol=_GRID_CALLS,
    published="PRT 2,165, adaptive teacher 2,453 (Kim et al. 2024, arXiv:2410.01432)",
    settings=f"a teacher samples every other batch; {_SMALLER}",
    config=_pinned("grid_2d"),
    calls=96_000,
    figures=(
        Figure("calls until 2,454 goals (teacher 2,453)", "calls_to_2454", 96_000, False, digits=0),
    ),
    measure=modes_found,
    n_modes=2_601,
    milestones=(2_454,),
)
_TFBIND8 = Row(
    name="tfbind8",
    title="TFBind8 (328 published modes), 64,000 calls",
    protocol=(
        "letters at both ends, reward to the power of 3, learned backward policy, 1% random "
        "actions; 2,000 rounds of 32 calls; three gradient steps on each round and three on 32 "
        "replayed items, half of them from the best tenth; LS-GFN: 4 trajectories and 7 loops of "
        "local search around each"
    ),
    published="Kim et al. 2023 (arXiv:2310.02710) count other modes; their code is measured here",
    settings=(
        "16 trajectories and 7 loops of local search around each; three replayed items for each "
        "fresh one, half of them from the best tenth; batches of 16"
    ),
    config=_pinned("tfbind8"),
    calls=64_000,
    figures=(
        Figure("modes after 16,000 calls (their code: 226)", "modes_at_16000", 226),
        Figure("modes found", "modes_found", None),
    ),
    measure=modes_found,
    n_modes=328,
    looks=(16_000,),
)
_RNA = Row(
    name="rna",
    title="RNA1, 14 letters, reward to the power of 8, 160,000 calls",
    protocol=(
        "letters at both ends, learned backward policy, 1% random actions; 5,000 rounds of 32 "
        "calls; three gradient steps on each round and three on 32 replayed items (Kim et al. "
        "2023, arXiv:2310.02710)"
    ),
    published="curves only; log Z 12.3815 and the mean reward .5472 are exact",
    settings=(
        "terminating states and a uniform backward policy; three replayed items for each fresh "
        "one, drawn in proportion to the reward; "
        "networks of 2 x 256 units; learning rates fall to 0"
    ),
    config=_pinned("rna"),
    calls=160_000,
    figures=(
        Figure("log Z gap", "log_z_gap", 0.1, False, digits=3),
        Figure("accuracy", "accuracy", 0.97, digits=4),
    ),
    measure=fit,
)
_BIT_SEQUENCE = Row(
    name="bit_sequence",
    title="BitSequence, 120 bits in words of 8 (60 modes)",
    protocol=(
        "words in any order; a mode counts as found within 30 bits; log R = -2 times the number of "
        "wrong bits; batches of 16, one gradient step on each; a transformer of 3 layers"
    ),
    published=(
        "median of 5 runs: DB 214,000 (13,400 steps of 16); TB in 1 of 5 runs within 4 million "
        "(code of Tiapkin et al. 2024, arXiv:2310.12934)"
    ),
    settings=(
        "32 trajectories with half of their words random; 31 loops of local search around each; a "
        "loop rewrites one word, continues from the better string and counts as a call; batches of "
        "32, one replayed item for ten fresh ones; a network of 2 x 128 units"
    ),
    config=_pinned("bit_sequence"),
    calls=428_000,
    figures=(Figure("calls until all modes", "calls_to_60", 214_000, False, True, digits=0),),
    measure=modes_found,
    n_modes=60,
    milestones=(60,),
)
_DAG = Row(
    name="dag",
    title="posterior over Bayesian networks of 5 nodes, 100 samples",
    protocol=(
        "uniform backward policy, modified detailed balance, replay (Deleu et al. 2022, "
        "arXiv:2202.13903); the posterior over all 29,281 graphs and the policy's distribution are "
        "exact; a call is a fresh trajectory (that loss also reads the score of every graph of the "
        "trajectory from a table)"
    ),
    published="curves of the posterior's edges and paths beside the exact ones",
    settings=(
        "trajectory balance, which came closer than modified detailed balance; samples of a random "
        "linear-Gaussian network; batches of 128; two replayed items for each fresh one, uniform; "
        "networks of 2 x 256 units; learning rates fall to 0"
    ),
    config=_pinned("dag"),
    calls=300_000,
    figures=(
        Figure("total variation", "total_variation", 0.05, False, digits=4),
        Figure("worst edge's error", "edge_error", 0.02, False, digits=4),
    ),
    measure=posterior,
)

ROWS = {
    row.name: row for row in (_GRID_4D, _GRID_4D_16, _GRID_2D, _TFBIND8, _RNA, _BIT_SEQUENCE, _DAG)
}
