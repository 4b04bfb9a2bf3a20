"""A configuration of the user's own, by import path, within this process and in another."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from gfn_rb.envs import HyperGrid
from gfn_rb.errors import ArgumentError
from gfn_rb.training import HyperGridConfig, TrainConfig, train
from gfn_rb.training.cli import main
from gfn_rb.training.config import find_config
from gfn_rb.training.session.folder import RunFolder
from gfn_rb.training.session.reading import read_metrics

MODULE = '''
from dataclasses import dataclass

from gfn_rb.envs import HyperGrid
from gfn_rb.training import HyperGridConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class MyConfig(TrainConfig):
    """A grid of my own."""

    size: int = 5
    """Points along each side."""
    lr: float = 1e-2

    def make_env(self):
        return HyperGrid(2, self.size, device=self.device)


class Undecorated(HyperGridConfig):
    more: int = 3


class WithoutEnv(TrainConfig):
    pass


@dataclass(frozen=True, kw_only=True)
class Unreadable(HyperGridConfig):
    more: "Nowhere" = 3


instance = MyConfig()
'''
QUICK = ["--batch-size", "4", "--hidden", "8", "--eval-every", "4", "--checkpoint-every", "2"]


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch, request):
    """Make a package in an empty folder, named after the test so that none is imported twice."""
    name = f"mine{abs(hash(request.node.name))}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "module.py").write_text(MODULE)
    (tmp_path / name / "broken.py").write_text("x = 1\nundefined\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


@pytest.mark.slow
def test_trained_and_resumed_by_its_path(package, capsys):
    path = f"{package}.module:MyConfig"
    assert main(["train", path, *QUICK, "--size", "6", "--steps", "4", "--workers", "1"]) == 0
    folder = RunFolder(Path("runs/MyConfig-seed0-001"))
    values = json.loads(folder.config.read_text())
    assert (values["env"], values["size"], values["lr"]) == (path, 6, 1e-2)
    assert read_metrics(folder.metrics)[-1]["reward_calls"] == "16"
    assert main(["resume", str(folder.path), "--steps", "6"]) == 0
    assert read_metrics(folder.metrics)[-1]["reward_calls"] == "24"
    assert main(["inspect", str(folder.path)]) == 0
    assert path in capsys.readouterr().out


def test_help_shows_its_options(package, capsys):
    with pytest.raises(SystemExit):
        main(["train", f"{package}.module:MyConfig", "--help"])
    out = capsys.readouterr().out
    assert "A grid of my own." in out
    assert out.index("--patience") < out.index("--size") < out.index("draw options")
    assert "Points along each side. (default: 5)" in out
    assert out.count("--lr ") == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (".module:Nothing", ".module:Nothing cannot be imported from"),
        (".nowhere:MyConfig", "ModuleNotFoundError: No module named"),
        (".broken:MyConfig", "NameError: name 'undefined' is not defined ("),
        (".module:dataclass", "must be a subclass of gfn_rb.training.TrainConfig, got <function"),
        (".module:instance", "must be a subclass of gfn_rb.training.TrainConfig, got MyConfig("),
        (".module:HyperGrid", "must be a subclass of gfn_rb.training.TrainConfig, got <class"),
        (".module:WithoutEnv", "must have a method make_env(self), got none"),
        (".module:Undecorated", "@dataclass(frozen=True, kw_only=True), got a class whose more"),
        (".module:Unreadable", "annotations that can be read: name 'Nowhere' is not defined"),
    ],
)
def test_a_path_to_no_configuration_is_named(path, message, package, capsys):
    assert main(["train", package + path, "--steps", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gfn-rb: {package}{path} ")
    assert message in line
    assert not Path("runs").exists()


def test_where_a_module_fails_is_told(package):
    with pytest.raises(ArgumentError, match=r"broken\.py, line 2\)$"):
        find_config(f"{package}.broken:MyConfig")


def test_a_class_that_no_other_process_finds_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class Local(HyperGridConfig):
        """Made within a function."""

    with pytest.raises(
        ArgumentError, match=r"must be of a class that can be imported, got .*Local"
    ):
        train(Local(ndim=2, steps=1))


@dataclass(frozen=True, kw_only=True)
class Placed(TrainConfig):
    """Has an option that no JSON file holds."""

    where: Path = Path("here")

    def make_env(self) -> HyperGrid:
        return HyperGrid(2, 4)


def test_an_option_that_cannot_be_written_down_is_named():
    with pytest.raises(ArgumentError, match="where must be a number, a word, true, false or None"):
        Placed().validate()


def test_a_shipped_configuration_keeps_its_name():
    assert HyperGridConfig().to_dict()["env"] == "hypergrid"
    assert Placed().to_dict()["env"] == f"{__name__}:Placed"
    assert Placed.env == "Placed"
