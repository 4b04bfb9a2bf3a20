"""A loss that one module defines is trained with by its name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from training.training_runs import GRID, grid

import gfn_rb
from gfn_rb.errors import ArgumentError
from gfn_rb.losses import LOSSES, TrajectoryBalance
from gfn_rb.training import TrainConfig, Trainer
from gfn_rb.training.cli import commands, main

MODULE = """
from gfn_rb.losses.trajectory_balance import TrajectoryBalance

class Absolute(TrajectoryBalance):
    name = "absolute"
    is_signed = False

    def evaluate(self, batch):
        residual = self.residual(batch)
        return residual.abs(), residual
"""


@pytest.fixture
def absolute():
    namespace = {"__name__": "mine"}
    exec(MODULE, namespace)
    yield namespace["Absolute"]
    del LOSSES["absolute"]


def test_it_is_trained_with_by_name(absolute, monkeypatch, capsys):
    trainer = Trainer(grid(loss="absolute"))
    assert type(trainer.loss) is absolute
    assert trainer.step() > 0
    assert TrainConfig.from_dict(trainer.config.to_dict()) == trainer.config
    trained = []
    monkeypatch.setattr(commands, "train", trained.append)
    assert main(["train", "hypergrid", "--loss", "absolute"]) == 0
    assert trained[0].loss == "absolute"
    with pytest.raises(SystemExit):
        main(["train", "hypergrid", "--loss", "absolut"])
    assert "absolute" in capsys.readouterr().err
    with pytest.raises(ArgumentError, match="got 'absolut': did you mean absolute"):
        grid(loss="absolut").validate()


def test_what_it_says_of_itself_decides_what_goes_with_it(absolute):
    with pytest.raises(ArgumentError, match="regression must be squared with loss absolute"):
        grid(loss="absolute", regression="linex").validate()
    absolute.every_state_terminates = True
    grid(loss="absolute").validate()
    absolute.options = ("subtb_lambda",)
    absolute.__init__ = lambda self, *args, subtb_lambda, **options: TrajectoryBalance.__init__(
        self, *args, **options
    )
    with pytest.raises(ArgumentError, match="no effect unless loss is subtb or absolute"):
        grid(loss="tb", subtb_lambda=0.5).validate()
    assert Trainer(grid(loss="absolute", subtb_lambda=0.5)).step() > 0


def test_a_name_stands_for_one_loss(absolute):
    exec(MODULE, {"__name__": "mine"})  # as a cell of a notebook that is run again
    assert LOSSES["absolute"] is not absolute
    with pytest.raises(ArgumentError, match="name of Absolute must be new, got 'absolute', as"):
        exec(MODULE, {"__name__": "theirs"})
    assert "tb" in LOSSES
    assert GRID.loss == "tb"


@pytest.mark.slow
def test_a_file_among_the_losses_is_enough(tmp_path):
    package = tmp_path / "gfn_rb"
    shutil.copytree(Path(gfn_rb.__file__).parent, package)
    (package / "losses" / "absolute.py").write_text(MODULE)
    words = ["train", "hypergrid", "--ndim", "2", "--loss", "absolute", "--steps", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "gfn_rb", *words], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
