"""Modules of the user's own as policies and flows."""

from dataclasses import dataclass

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from training.training_runs import SMALL, equal, timeless

from gfn_rb.envs import ConditionalHyperGrid, HyperGrid
from gfn_rb.errors import ArgumentError
from gfn_rb.policies import ForwardPolicy, Networks
from gfn_rb.policies.networks import OwnNetwork
from gfn_rb.training import HyperGridConfig, ManagersOptions, Trainer, train

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


@dataclass(frozen=True, kw_only=True)
class WideConfig(PlainConfig):
    """The forward policy has one number too many."""

    def make_networks(self, env):
        return Networks(forward=linear(env, env.n_actions + 1))


@pytest.mark.parametrize("config", [PlainConfig, EmbeddedConfig])
@pytest.mark.parametrize("loss", ["tb", "db", "fm"])
def test_they_are_trained_and_restored(config, loss, tmp_path):
    config = config(loss=loss, **SMALL)
    first, again = Trainer(config), Trainer(config)
    before = {name: value.clone() for name, value in first.loss.named_parameters()}
    for _ in range(2):
        first.step()
    changed = {n for n, value in first.loss.named_parameters() if not value.equal(before[n])}
    assert changed == before.keys()
    first.save(tmp_path / "checkpoint")
    again.load(tmp_path / "checkpoint")
    first.step(), again.step()
    equal(again.loss.state_dict(), first.loss.state_dict())
    assert timeless(first.measure()) == timeless(again.measure())


def test_a_module_says_what_it_says():
    """Its output is what is used, on encoded states; a flow has a constant added."""
    module = linear(ENV, 1)
    flow = OwnNetwork(ENV, module, "flow", initial=2.5)
    td = flow(states())
    torch.testing.assert_close(
        td["log_flow"], module(ENV.encode(td["state"]))[:, 0] + 2.5, rtol=0, atol=0
    )


def test_a_shipped_policy_will_do_too():
    policy = ForwardPolicy(ENV, (8,))
    logits = OwnNetwork(ENV, policy, "forward")(states())["logits"]
    assert logits.equal(policy(states())["logits"])


def test_conditions_stand_besidestates():
    env = ConditionalHyperGrid(2, 5)
    width = env.encoded_size + env.encode_condition(env.sample_condition(1)).shape[1]
    OwnNetwork(env, nn.Linear(width, env.n_actions), "forward").check(env)
    with pytest.raises(ArgumentError, match="encoded conditions beside them, got RuntimeError"):
        OwnNetwork(env, nn.Linear(env.encoded_size, env.n_actions), "forward").check(env)


@pytest.mark.parametrize(
    ("module", "role", "message"),
    [
        (linear(ENV, 4), "forward", r"forward must return floats of shape \[2, 3\] for 2 states"),
        (linear(ENV, 3), "backward", r"backward must return floats of shape \[2, 2\]"),
        (linear(ENV, 2), "flow", r"flow must return floats of shape \[2, 1\]"),
        (nn.Linear(5, 3), "forward", r"forward must take encoded states, float32 \[n, 12\], got"),
        (
            TensorDictModule(Embedded(3), ["state"], ["scores"]),
            "forward",
            "forward must take 'state', and write 'logits', got",
        ),
        (
            TensorDictModule(Embedded(3), ["board"], ["logits"]),
            "forward",
            "forward must take 'state', and write 'logits', got",
        ),
    ],
)
def test_one_that_does_not_fit_is_named(module, role, message):
    with pytest.raises(ArgumentError, match=f"^networks.{message}"):
        OwnNetwork(ENV, module, role).check(ENV)


@pytest.mark.parametrize("managers", [0, 1])
def test_it_is_named_before_there_is_a_folder(managers, tmp_path):
    with pytest.raises(ArgumentError, match=r"networks\.forward must return floats"):
        train(WideConfig(managers=ManagersOptions(managers), out=tmp_path / "run", **SMALL))
    assert not (tmp_path / "run").exists()


@dataclass(frozen=True, kw_only=True)
class BareConfig(PlainConfig):
    """Returns a module where several are expected."""

    def make_networks(self, env):
        return linear(env, env.n_actions)


def test_a_single_module_is_told_what_is_expected(unchecked):
    with pytest.raises(ArgumentError, match="make_networks must be a Networks, got a Sequential"):
        Trainer(BareConfig(**SMALL))
