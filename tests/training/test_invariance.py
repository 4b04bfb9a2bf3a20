"""A constant added to log R changes log Z by as much, and nothing else of a run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from gfn_rb.envs import HyperGrid
from gfn_rb.training import DRAW, KeepRecent, KeepTop, SearchOptions, TeacherOptions, TrainConfig
from gfn_rb.training.trainer import Trainer


class ShiftedGrid(HyperGrid):
    """A grid whose log-rewards are multiples of 1/1024, so that a sum with a constant is exact."""

    def __init__(self, shift, device="cpu"):
        super().__init__(2, 6, r0=0.01, device=device)
        self.shift = shift

    def log_reward(self, state, condition=None):
        return (super().log_reward(state) * 1024).round() / 1024 + self.shift


@dataclass(frozen=True, kw_only=True)
class ShiftedConfig(TrainConfig):
    every_state_terminates = True

    shift: float = 0.0
    hidden: tuple[int, ...] = (16,)
    batch_size: int = 8
    capacity: int = 24

    def make_env(self):
        return ShiftedGrid(self.shift, self.device)


RUNS = {
    "tb": {},
    "squared": {"regression": "squared"},
    "linex": {"regression": "linex"},
    "softmax": {"draw": DRAW["softmax"]()},
    "quantile": {"draw": DRAW["quantile"]()},
    "priority": {"draw": DRAW["priority"]()},
    "trajectories": {"replay": "trajectories", "compact": "rebuild"},
    "recent": {"keep": KeepRecent()},
    "learned backward": {"backward": "learned"},
    "search": {"search": SearchOptions(loops=2)},
    "teacher": {"replay": "trajectories", "teacher": TeacherOptions(share=0.5)},
    "vargrad": {"loss": "vargrad"},
    "subtb": {"loss": "subtb"},
    "db": {"loss": "db", "replay": "transitions", "keep": KeepTop()},
    "mdb": {"loss": "mdb", "replay": "transitions"},
    "fm": {"loss": "fm", "replay": "states", "regression": "squared"},
}


def run(shift, steps, **options):
    trainer = Trainer(ShiftedConfig(shift=shift, seed=3, **options))
    rows = []
    add = trainer.discovery.add
    trainer.discovery.add = lambda fresh: (rows.append(fresh.terminating_states), add(fresh))[1]
    for _ in range(steps):
        trainer.step()
    return trainer, torch.cat(rows)


def differences(options, shift, steps=30):
    """Return how many of the drawn objects differ, and by how much weights and log Z do."""
    (plain, objects), (moved, others) = (run(c, steps, **options) for c in (0.0, shift))
    scales = plain.loss.scales
    weights = {
        key: float((value - moved.loss.get_parameter(key)).detach().abs().max())
        for key, value in plain.loss.named_parameters()
        if key not in scales
    }
    n_different = int((objects != others).any(1).sum())
    log_z = moved.log_z - plain.log_z - shift if plain.loss.networks else 0.0
    return n_different, max(weights.values()), abs(log_z)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(
    "shift", [30.0, *(pytest.param(c, marks=pytest.mark.slow) for c in (-300.0, -30.0, 300.0))]
)
def test_a_constant_in_log_r_moves_log_z_alone(name, shift, request):
    steps = 30 if request.config.getoption("--all") else 12
    n_different, weights, log_z = differences(RUNS[name], shift, steps)
    assert n_different == 0
    assert weights < 1e-3
    assert log_z < 2e-3


def test_a_fixed_start_of_log_z_is_seen_to_break_it():
    assert differences({"log_z": 0.0}, 30.0)[0] > 0
