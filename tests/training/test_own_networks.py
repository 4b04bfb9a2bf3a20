"""Modules of the user's own as policies and flows."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from training.training_runs import SMALL, equal, resumed_beside, take, timeless

from gfn_rb.envs import ConditionalHyperGrid, HyperGrid
from gfn_rb.errors import ArgumentError
from gfn_rb.policies import ForwardPolicy, Networks
from gfn_rb.policies.networks import OwnNetwork
from gfn_rb.training import HyperGridConfig, ManagersOptions, TrainConfig, Trainer, train
from gfn_rb.training.cli import main

ENV = HyperGrid(2, 6)


def linear(env, out):
    return nn.Sequential(nn.Linear(env.encoded_size, 8), nn.Tanh(), nn.Linear(8, out))


def states():
    return TensorDict({"state": torch.tensor([[0, 0], [3, 5], [2, 1]])}, [3])


class Embedded(nn.Module):
    """Takes states as they are: whole numbers."""

    def __init__(self, out):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(8, out)

    def forward(self, state):
        return self.head(self.embed(state + 1).flatten(1))


@dataclass(frozen=True, kw_only=True)
class PlainConfig(HyperGridConfig):
    """All networks are modules."""

    ndim: int = 2
    height: int = 6

    def make_networks(self, env):
        sizes = (env.n_actions, env.n_actions - 1, 1)
        return Networks(*(linear(env, size) for size in sizes))


@dataclass(frozen=True, kw_only=True)
class EmbeddedConfig(PlainConfig):
    """The forward policy is a TensorDictModule."""

    def make_networks(self, env):
        module = TensorDictModule(Embedded(env.n_actions), ["state"], ["logits"])
        return Networks(forward=module)


@pytest.mark.parametrize("config", [PlainConfig, EmbeddedConfig])
@pytest.mark.parametrize("loss", ["tb", "db", "fm"])
def test_they_are_trained_and_restored(config, loss, tmp_path):
    config = config(loss=loss, **SMALL)
    first = Trainer(config)
    before = {name: value.clone() for name, value in first.loss.named_parameters()}
    take(first, 2)
    changed = {n for n, value in first.loss.named_parameters() if not value.equal(before[n])}
    assert changed == before.keys()
    again = resumed_beside(first, tmp_path, 1)
    equal(again.loss.state_dict(), first.loss.state_dict())
    assert timeless(first.measure()) == timeless(again.measure())


def test_a_module_says_what_it_says():
    """Its output is what is used, on encoded states; a flow has a constant added."""
    module = linear(ENV, 1)
    flow = OwnNetwork(ENV, module, "flow", initial=2.5)
    td = flow(states())
    assert td["log_flow"].equal(module(ENV.encode(td["state"]))[:, 0] + 2.5)
    policy = ForwardPolicy(ENV, (8,))  # a shipped one will do, too
    logits = OwnNetwork(ENV, policy, "forward")(states())["logits"]
    assert logits.equal(policy(states())["logits"])


def test_conditions_stand_beside_states():
    env = ConditionalHyperGrid(2, 5)
    width = env.encoded_size + env.encode_condition(env.sample_condition(1)).shape[1]
    OwnNetwork(env, nn.Linear(width, env.n_actions), "forward").check(env)
    with pytest.raises(ArgumentError, match="encoded conditions beside them, got RuntimeError"):
        OwnNetwork(env, nn.Linear(env.encoded_size, env.n_actions), "forward").check(env)


@pytest.mark.parametrize("mode", [True, False])
def test_a_check_leaves_a_module_in_its_mode(mode):
    network = OwnNetwork(ENV, nn.Sequential(nn.Dropout(), linear(ENV, ENV.n_actions)), "forward")
    network.train(mode).check(ENV)
    assert {each.training for each in network.modules()} == {mode}


@pytest.mark.parametrize("managers", [0, 1])
def test_it_is_named_before_there_is_a_folder(managers, tmp_path, monkeypatch):
    monkeypatch.setattr(PlainConfig, "make_networks", lambda self, env: Networks(linear(env, 4)))
    config = PlainConfig(managers=ManagersOptions(managers), out=tmp_path / "run", **SMALL)
    with pytest.raises(ArgumentError, match=r"networks\.forward must return floats"):
        train(config)
    assert not (tmp_path / "run").exists()


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


@pytest.fixture
def package(tmp_path, monkeypatch, request):
    """Make a package in an empty folder, named after the test so that none is imported twice."""
    name = f"mine{abs(hash(request.node.name))}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "module.py").write_text(MODULE)
    (tmp_path / name / "broken.py").write_text("x = 1\nundefined\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def test_help_shows_its_options(package, capsys):
    with pytest.raises(SystemExit):
        main(["train", f"{package}.module:MyConfig", "--help-all"])
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
        (".broken:MyConfig", r"NameError: name 'undefined' is not .*broken\.py, line 2\)$"),
        (".module:dataclass", "must be a subclass of gfn_rb.training.TrainConfig, got <function"),
        (".module:instance", r"must be a subclass of gfn_rb.training.TrainConfig, got MyConfig\("),
        (".module:HyperGrid", "must be a subclass of gfn_rb.training.TrainConfig, got <class"),
        (".module:WithoutEnv", r"must have a method make_env\(self\), got none"),
        (".module:Undecorated", r"@dataclass\(frozen=True, kw_only=True\), got a class whose more"),
        (".module:Unreadable", "annotations that can be read: name 'Nowhere' is not defined"),
    ],
)
def test_a_path_to_no_configuration_is_named(path, message, package, capsys):
    assert main(["train", package + path, "--steps", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gfn-rb: {package}{path} ")
    assert re.search(message, line)
    assert not Path("runs").exists()


@dataclass(frozen=True, kw_only=True)
class Placed(TrainConfig):
    """Has an option that no JSON file holds."""

    where: Path = Path("here")

    def make_env(self) -> HyperGrid:
        return HyperGrid(2, 4)


def test_an_option_that_cannot_be_written_down_is_named():
    with pytest.raises(ArgumentError, match="where must be a number, a word, true, false or None"):
        Placed().validate()
    assert Placed().to_dict()["env"] == f"{__name__}:Placed"
    assert HyperGridConfig().to_dict()["env"] == "hypergrid"  # a shipped one keeps its name
