"""Small configurations and comparisons that the tests of training share."""

from dataclasses import replace

import torch

from gfn_rb.training import (
    BitSequenceConfig,
    ConditionalHyperGridConfig,
    HyperGridConfig,
    RNABindingConfig,
    TFBind8Config,
    Trainer,
)

GRID = HyperGridConfig(
    ndim=2, height=6, steps=12, batch_size=8, capacity=24, hidden=(16,), eval_every=5,
    checkpoint_every=4,
)  # fmt: skip
SMALL = {"batch_size": 8, "hidden": (16,), "eval_every": 3, "checkpoint_every": 2}
DNA = TFBind8Config(steps=6, **SMALL)
WARM_GRID = ConditionalHyperGridConfig(ndim=2, height=6, steps=6, capacity=24, **SMALL)
BITS = BitSequenceConfig(n_bits=40, word_bits=4, modes=5, steps=6, **SMALL)
RNA = RNABindingConfig(targets=("GGGAAACCCU",), length=6, steps=6, **SMALL)


def grid(**options):
    return replace(GRID, **options)


def trained(config, steps):
    trainer = Trainer(config)
    take(trainer, steps)
    return trainer


def take(trainer, steps):
    for _ in range(steps):
        trainer.step()
        if trainer.steps_done % trainer.config.eval_every == 0:
            trainer.record()


def timeless(row):
    return {name: value for name, value in row.items() if "time" not in name}


def equal(one, other, path=""):
    """Assert that nested values are the same, bit for bit."""
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            equal(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, pair in enumerate(zip(one, other, strict=True)):
            equal(*pair, f"{path}/{i}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, path
        assert torch.equal(one, other), path
    else:
        assert one == other, path
