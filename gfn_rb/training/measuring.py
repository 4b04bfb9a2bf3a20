"""What a training run measures, as its configuration asks."""

from __future__ import annotations

from gfn_rb.envs import GFNEnv
from gfn_rb.losses import Loss
from gfn_rb.numerics.flat import flat_rows
from gfn_rb.numerics.near.distances import Distance
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.metrics import DiscoveryMetrics, Evaluation, SeparatedModes, norm_distance
from gfn_rb.training.objectives import backward_policy


def make_discovery(config: TrainConfig, env: GFNEnv) -> DiscoveryMetrics:
    """Return what counts the discoveries of a run."""
    between, separated = config.make_distance(), None
    distance = _of_rows(between) if callable(between) else norm_distance(between)
    if config.mode_score is not None:
        separated = SeparatedModes(config.mode_score, config.mode_cutoff, distance)
    return DiscoveryMetrics(env, distance, separated)


def _of_rows(distance: Distance) -> Distance:
    return lambda a, b: distance(flat_rows(a), flat_rows(b))


def make_evaluation(config: TrainConfig, env: GFNEnv, loss: Loss, seed: int) -> Evaluation:
    """Return what measures the policy of a run.

    Args:
        config: names the metrics.
        env: the environment.
        loss: has the networks.
        seed: of what is sampled to measure by.

    Raises:
        ArgumentError: the environment cannot answer one of the metrics.
    """
    return Evaluation(
        env,
        loss.forward_policy,
        backward_policy(loss),
        loss.estimate_log_z,
        config.metrics,
        n_samples=config.eval_samples,
        n_backward=config.eval_backward,
        seed=seed,
    )
