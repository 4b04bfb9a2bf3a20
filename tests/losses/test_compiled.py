"""Losses compile without a graph break and export, with the values and gradients of eager mode."""

import pytest
import torch
import torch._dynamo as dynamo
from factories import in_fresh_process
from tensordict import TensorDict
from torch import nn

from gfn_rb.containers import Trajectories
from gfn_rb.losses import LOSSES
from gfn_rb.rollout import Sampler
from gfn_rb.training.config import (
    BayesianDAGConfig,
    BitSequenceConfig,
    ConditionalHyperGridConfig,
    HyperGridConfig,
    TFBind8Config,
)
from gfn_rb.training.objectives import make_loss

REPLAY = {"fm": "states", "db": "transitions", "mdb": "transitions"}
SMALL = {"hidden": (8,)}
LEARNED = {"backward": "learned", **SMALL}
CONFIGS = {
    **{
        name: HyperGridConfig(
            ndim=2,
            height=4,
            loss=name,
            replay=REPLAY.get(name, "terminal"),
            **(SMALL if name == "fm" else LEARNED),
        )
        for name in LOSSES
    },
    "strings": TFBind8Config(**SMALL),
    "shared trunk": TFBind8Config(share_trunk=True, **LEARNED),
    "Linex": TFBind8Config(regression="linex", **SMALL),
    "conditions": ConditionalHyperGridConfig(ndim=2, height=4, **SMALL),
    "graphs": BayesianDAGConfig(**SMALL),
    "bits": BitSequenceConfig(n_bits=8, word_bits=2, modes=2, **SMALL),
}


def made(config, n=6, seed=0):
    """A loss, and rows for it, of which some trajectories run backward."""
    env = config.make_env()
    loss = make_loss(config, env, 0)
    generator = torch.Generator().manual_seed(seed)
    rows = Sampler(loss.forward_policy).sample_trajectories(env, n=n, generator=generator)
    if loss.reads is Trajectories:
        rows = Trajectories.cat([rows[: n // 2], rows[n // 2 :].reverse()])
    else:
        rows = getattr(rows, f"to_{loss.reads.__name__.lower()}")()
    return loss, rows.to_tensordict()


def gradients(loss, call, rows):
    loss.zero_grad()
    value = call(rows)
    value.backward()
    return [value.detach(), *(each.grad.clone() for each in loss.parameters())]


def values_of(names):
    """Value and gradients of each loss, as it is and compiled as one graph."""
    found = {}
    for name in names:
        loss, rows = made(CONFIGS[name])
        dynamo.reset()
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        found[name] = gradients(loss, loss, rows), gradients(loss, compiled, rows)
    return found


@pytest.mark.slow
def test_a_compiled_loss_is_one_graph():
    # In a process without beartype, whose checks of annotations are no part of a graph.
    found = in_fresh_process(values_of, [*CONFIGS])
    for name, (expected, values) in found.items():
        for one, other in zip(values, expected, strict=True):
            torch.testing.assert_close(
                one, other, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
    assert [*found] == [*CONFIGS]


class OfTensors(nn.Module):
    """A loss of plain tensors, as torch.export takes them."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, state, action, length, log_reward):
        fields = {"state": state, "action": action, "length": length, "log_reward": log_reward}
        return self.loss(TensorDict(fields, [state.shape[0]]))


def fields_of(rows):
    rows = Trajectories.from_tensordict(rows).forward().drop("is_backward").to_tensordict()
    return tuple(rows[key] for key in ("state", "action", "length", "log_reward"))


def export_and_call():
    """Values of an exported loss and of itself for two sizes, and the error for a bad length."""
    loss, rows = made(TFBind8Config(**SMALL))
    n = torch.export.Dim("n", min=2)
    program = torch.export.export(
        OfTensors(loss), fields_of(rows), dynamic_shapes=[{0: n}] * 4, strict=True
    )
    pairs = []
    for size in (6, 20):
        _, rows = made(TFBind8Config(**SMALL), size, seed=size)
        pairs.append(
            tuple(
                float(each(*fields_of(rows)).detach())
                for each in (program.module(), OfTensors(loss))
            )
        )
    state, action, length, log_reward = fields_of(rows)
    try:
        program.module()(state, action, torch.full_like(length, 100), log_reward)
    except RuntimeError as error:
        return pairs, str(error)
    return pairs, "none"


@pytest.mark.slow
def test_an_exported_loss_takes_batches_of_any_size():
    pairs, error = in_fresh_process(export_and_call)
    for exported, eager in pairs:
        assert exported == pytest.approx(eager, rel=1e-6)
    assert error == "length must be 1 to 9 in every row"
