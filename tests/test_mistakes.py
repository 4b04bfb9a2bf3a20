"""Wrong calls, one per line of mistakes.txt, are refused in at most two lines.

No message names a private thing, or is one of torch's about what it was given. Where a line has
``  #: words`` behind the call, the error's kind and message hold these words; "..." stands for any.
"""

import contextlib
import csv
import io
import json
import math  # noqa: F401
import re
import warnings
from dataclasses import replace  # noqa: F401
from importlib.util import find_spec
from pathlib import Path

import factories
import pytest
import torch
import torchrl  # noqa: F401
from tensordict import NonTensorStack, TensorDict  # noqa: F401
from tensordict.nn import TensorDictModule  # noqa: F401
from torchrl.data import LazyTensorStorage, ListStorage, TensorDictReplayBuffer
from training.training_runs import grid  # noqa: F401

import gfn_rb
from gfn_rb import checkpoint, envs, losses, policies, remote, rollout, training, transports
from gfn_rb.training import Trainer, cli, train
from gfn_rb.training.config import TFBind8Config

SECTIONS = {
    title: [line for line in lines if line and ("theirs." not in line or find_spec("gfn"))]
    for title, *lines in map(
        str.splitlines, (Path(__file__).parent / "mistakes.txt").read_text().split("\n# ")[1:]
    )
}
MODULES = gfn_rb, checkpoint, envs, losses, policies, remote, rollout, training, transports
TOP = {"feed": training.FeedOptions("top"), "managers": training.ManagersOptions(1)}
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
        raise WrongUsage(f"exit {status}: {err.getvalue().strip()}")


def rows(n):
    state = torch.arange(2.0 * n).reshape(n, 2)
    return TensorDict({"state": state, "log_reward": torch.arange(float(n))}, [n])


def fill(rb, data=None):
    rb.extend(rows(6) if data is None else data)
    return rb


def attached(storage=None, data=None, **parts):
    storage = LazyTensorStorage(8) if storage is None else storage
    return fill(TensorDictReplayBuffer(storage=storage, **parts), data)


def reloaded(one, other):
    """Give a writer the state of another one, of which no row is offered."""
    state = attached(data=rows(0), writer=one).writer.state_dict()
    attached(data=rows(0), writer=other).writer.load_state_dict(state)


def names_of_torchgfn():
    """What mistakes with torchgfn use, if it is installed."""
    if find_spec("gfn") is None:
        return {}
    with warnings.catch_warnings():  # torch warns of what torch_geometric uses
        warnings.simplefilter("ignore")
        import gfn.gym.graph_building
        from interop import torchgfn_items as items
    from gfn_rb.interop import torchgfn

    tenv = items.GRID
    network, rb = items.MLP(tenv.ndim, tenv.n_actions - 1), torchgfn.ReplayBuffer(tenv)
    rb.add(items.rollouts(tenv, 4))
    return {
        "gfn": gfn, "theirs": torchgfn, "tenv": tenv, "tfilled": rb,
        "tpaths": items.rollouts(tenv, 4), "twarm": items.WARM,
        "of_warm": items.rollouts(items.WARM, 4), "tpf": items.SAMPLERS[tenv].estimator,
        "twpf": items.SAMPLERS[items.WARM].estimator,
        "tpb": items.DiscretePolicyEstimator(network, tenv.n_actions, is_backward=True),
    }  # fmt: skip


def changed(container, **entries):
    return type(container).from_tensordict(container.to_tensordict().update(entries))


def memory(n=0):
    made = gfn_rb.ExperienceMemory("cpu", "cpu", 10)
    if n:
        made.add_batch(rows(n))
    return made


def table(rows, columns=("object", "log_reward")):
    with Path("t.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([columns, *rows])
    return Path("t.csv")


def reread(kind, **entries):
    """Read a configuration from a file that has other entries, or lacks one."""
    values = {**kind().to_dict(), **entries}
    return training.TrainConfig.from_dict({k: v for k, v in values.items() if v is not ...})


def names(folder):
    """What each mistake may use: all public names, and some ready objects."""
    known = {}
    for module in MODULES:
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
        **vars(factories), **known, **globals(), **names_of_torchgfn(),
        "without_rewards": without_rewards,
        "ListStorage": ListStorage, "config": TFBind8Config, "Trainer": Trainer, "train": train,
        "conditional": type(
            "Ladder", (factories.Ladder,), {"sample_condition": lambda *_: None}
        )(3),
        "warm": envs.ConditionalHyperGrid(2, 8), "line": envs.Line(),
        "letters": factories.CountOnes(2, 3),
        "env": env, "wide": wide, "forward": forward, "backward": backward,
        "trajectories": trajectories, "of_wide": sample(wide),
        "search": gfn_rb.LocalSearchSampler(forward, backward),
        "of_tall": sample(tall, exit_bias=5.0),
        "inf_rewards": changed(trajectories, log_reward=torch.full((8,), torch.inf)),
        "nan_rewards": changed(trajectories, log_reward=torch.full((8,), torch.nan)),
        "empty": gfn_rb.reward_prioritized_buffer(50),
        "tb": losses.TrajectoryBalance(forward, backward, env, policies.LogZ()),
        "rb": gfn_rb.reward_prioritized_buffer(100), "filled": filled, "of_grid": of_grid,
        "other": fill(gfn_rb.reward_prioritized_buffer(50)),
        "ends": transports.LocalTransport.group(2), "trio": transports.LocalTransport.group(3),
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


def holds(message, words):
    return re.search(".*".join(map(re.escape, words.split(" ... "))), message) is not None


@pytest.mark.parametrize("section", SECTIONS)
def test_a_mistake_is_refused_by_name(section, known, unchecked, monkeypatch) -> None:
    monkeypatch.chdir(known["folder"])
    wrong = []
    for line in SECTIONS[section]:
        mistake, _, words = line.partition("  #: ")
        message = message_of(mistake, known) or ""
        is_vague = VAGUE.search(message.replace(str(known["folder"]), ""))
        if is_vague or len(message.splitlines()) not in (1, 2) or not holds(message, words):
            wrong.append(f"{line}\n    {message or 'nothing was said'}")
    assert not wrong, "\n".join(wrong)
    assert not Path("page.html").exists()
