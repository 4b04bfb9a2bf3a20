"""The examples train: what they minimise falls, and their policy comes nearer to the target.

That the scripts among them run is seen where a page includes them: tests/test_readme.py.
"""

import sys
from pathlib import Path

import pytest
import torch

from gfn_rb.envs.conformance import EnumerableEnvConformance
from gfn_rb.training import Trainer
from gfn_rb.training.config import find_config

ROOT = Path(__file__).parents[2]
TINY = {
    "batch_size": 16, "replay_ratio": 0.0, "backward": "uniform", "lr_log_z": 0.1, "log_z": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _found(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "options", "steps"),
    [
        ("examples.mlp:MLPConfig", {"size": 6, "width": 32, "batch_size": 16, "lr": 1e-2}, 60),
        ("examples.transformer:TransformerConfig", {"width": 16, **TINY}, 60),
        ("examples.graph_network:GraphConfig", {"n_nodes": 3, "width": 16, "lr": 3e-3, **TINY}, 60),
    ],
)
def test_an_example_learns(path, options, steps):
    trainer = Trainer(find_config(path)(**options))
    before = trainer.measure()["total_variation"]
    losses = [trainer.step() for _ in range(steps)]
    assert sum(losses[-15:]) < 0.7 * sum(losses[:15])
    assert trainer.measure()["total_variation"] < before


class TestTeams(EnumerableEnvConformance):
    def make_env(self):
        from examples.own_environment import Teams

        return Teams(torch.arange(16).reshape(4, 4) / 10)
