"""Mistakes of newcomers, one per line of mistakes.txt, are refused in at most two lines.

No message names a private thing, or is one of torch's about what it was given.
"""

import contextlib
import io
import json
import re
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ListStorage, TensorDictReplayBuffer

import gfn_rb
from gfn_rb import checkpoint, envs, losses, policies, remote, transports
from gfn_rb.training import Trainer, cli, train
from gfn_rb.training.config import TFBind8Config

MISTAKES = [
    line
    for line in (Path(__file__).parent / "mistakes.txt").read_text().splitlines()
    if line and not line.startswith("#") and ("theirs." not in line or find_spec("gfn"))
]
# What torch and Python say of what nobody has looked at.
VAGUE = re.compile(
    r"not supported between|invalid combination|mat1|must be tuple of ints|NoneType|Value after"
    r"|object has no attribute (?!.(append|to_transitions))|\b_[A-Za-z]|NameError"
)


class WrongUsage(Exception):
    """A command of ``gfn-rb`` that ended with a message and another status than 0."""


def main(line):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(err):
        try:
            status = cli.main(line.split())
        except SystemExit as error:
            status = error.code
    if status:
        raise WrongUsage(err.getvalue().strip())


def rows(n):
    state = torch.arange(2.0 * n).reshape(n, 2)
    return TensorDict({"state": state, "log_reward": torch.arange(float(n))}, [n])


def fill(rb):
    rb.extend(rows(6))
    return rb


def attached(storage=None, **parts):
    storage = LazyTensorStorage(8) if storage is None else storage
    return fill(TensorDictReplayBuffer(storage=storage, **parts))


def names_of_torchgfn():
    """What mistakes with torchgfn use, if it is installed."""
    if find_spec("gfn") is None:
        return {}
    with warnings.catch_warnings():  # torch warns of what torch_geometric uses
        warnings.simplefilter("ignore")
        from interop import torchgfn_items as items
    from gfn_rb.interop import torchgfn

    grid = items.GRID
    network, rb = items.MLP(grid.ndim, grid.n_actions - 1), torchgfn.ReplayBuffer(grid)
    rb.add(items.rollouts(grid, 4))
    return {
        "theirs": torchgfn, "tenv": grid, "tfilled": rb, "tpaths": items.rollouts(grid, 4),
        "twarm": items.WARM, "of_warm": items.rollouts(items.WARM, 4),
        "tpf": items.SAMPLERS[grid].estimator,
        "tpb": items.DiscretePolicyEstimator(network, grid.n_actions, is_backward=True),
    }  # fmt: skip


def changed(container, **entries):
    return type(container).from_tensordict(container.to_tensordict().update(entries))


def names(folder):
    """What each mistake may use: all public names, and some ready objects."""
    known = {}
    for module in (gfn_rb, checkpoint, envs, losses, policies, remote, transports):
        known.update({name: getattr(module, name) for name in module.__all__})
    torch.manual_seed(0)
    env, wide, tall = (envs.HyperGrid(*shape) for shape in ((2, 8), (3, 8), (2, 16)))
    forward, backward = policies.ForwardPolicy(env), policies.UniformBackwardPolicy(env)

    def sample(other, **options):
        policy = policies.ForwardPolicy(other)
        return gfn_rb.Sampler(policy).sample_trajectories(other, n=8, **options)

    trajectories = sample(env)
    filled = fill(gfn_rb.reward_prioritized_buffer(100, batch_size=4))
    of_grid = gfn_rb.reward_prioritized_buffer(100)
    of_grid.extend(trajectories.to_tensordict())
    without_rewards = gfn_rb.fifo_buffer(9)
    without_rewards.extend({"state": torch.zeros(3, 2)})
    text, saved = folder / "notes.txt", folder / "saved.ckpt"
    text.write_text("some text, and more of it")
    gfn_rb.save_checkpoint(saved, filled)
    newer = folder / "newer"
    newer.mkdir()
    config = TFBind8Config().to_dict()
    (newer / "config.json").write_text(json.dumps({**config, "format": config["format"] + 1}))
    return {
        **known, **globals(), **names_of_torchgfn(),
        "without_rewards": without_rewards,
        "ListStorage": ListStorage, "config": TFBind8Config, "Trainer": Trainer, "train": train,
        "env": env, "wide": wide, "forward": forward, "backward": backward,
        "trajectories": trajectories, "of_wide": sample(wide),
        "of_tall": sample(tall, exit_bias=5.0),
        "inf_rewards": changed(trajectories, log_reward=torch.full((8,), torch.inf)),
        "nan_rewards": changed(trajectories, log_reward=torch.full((8,), torch.nan)),
        "empty": gfn_rb.reward_prioritized_buffer(50),
        "tb": losses.TrajectoryBalance(forward, backward, env, policies.LogZ()),
        "rb": gfn_rb.reward_prioritized_buffer(100), "filled": filled, "of_grid": of_grid,
        "other": fill(gfn_rb.reward_prioritized_buffer(50)),
        "ends": transports.LocalTransport.group(2),
        "path": folder / "path.ckpt", "folder": folder, "saved": saved, "text_file": text,
        "newer": newer,
    }  # fmt: skip


def message_of(mistake, known):
    """The type and text of what a mistake raises; None if nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(mistake, dict(known))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return names(tmp_path_factory.mktemp("mistakes"))


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_by_name(mistake, known, unchecked) -> None:
    message = message_of(mistake, known)
    assert message is not None, "nothing was said"
    assert len(message.splitlines()) <= 2, message
    assert not VAGUE.search(message.replace(str(known["folder"]), "")), message
