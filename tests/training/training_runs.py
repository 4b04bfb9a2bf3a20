"""Small configurations and comparisons that the tests of training share."""

from dataclasses import replace

from factories import assert_equal as equal  # noqa: F401

from gfn_rb.training import (
    DRAW,
    BitSequenceConfig,
    ConditionalHyperGridConfig,
    HyperGridConfig,
    KeepDiverse,
    KeepRecent,
    KeepTop,
    RNABindingConfig,
    SearchOptions,
    TFBind8Config,
    Trainer,
)

# What most tests of training look at are rows: trajectories, any of them, and as they came.
KEPT = {"top": KeepTop(unique=False), "diverse": KeepDiverse(), "recent": KeepRecent(unique=False)}
ROWS = {
    "keep": KEPT["top"], "compact": "none", "replay": "trajectories", "replay_ratio": 1.0,
    "regression": "squared", "lr": 3e-3,
}  # fmt: skip
GRID = HyperGridConfig(
    **ROWS,
    ndim=2, height=6, steps=12, batch_size=8, capacity=24, hidden=(16,), eval_every=5,
    checkpoint_every=4,
)  # fmt: skip
SMALL = {**ROWS, "batch_size": 8, "hidden": (16,), "eval_every": 3, "checkpoint_every": 2}
DNA = TFBind8Config(steps=6, **SMALL)
WARM_GRID = ConditionalHyperGridConfig(ndim=2, height=6, steps=6, capacity=24, **SMALL)
BITS = BitSequenceConfig(n_bits=40, word_bits=4, modes=5, steps=6, search=SearchOptions(), **SMALL)
RNA = RNABindingConfig(targets=("GGGAAACCCU",), length=6, steps=6, **SMALL)


def grid(**options):
    """GRID with other options, of which draw and keep may be a kind alone."""
    return changed(GRID, **options)


def changed(config, draw=None, keep=None, **options):
    if draw is not None:
        options["draw"] = DRAW[draw]() if isinstance(draw, str) else draw
    if keep is not None:
        options["keep"] = KEPT[keep] if isinstance(keep, str) else keep
    config = replace(config, **options)
    if config.replay in ("transitions", "states") and hasattr(config.keep, "unique"):
        config = replace(config, keep=type(config.keep)())  # there, unique has no effect
    return config


def trained(config, steps):
    trainer = Trainer(config)
    take(trainer, steps)
    return trainer


def take(trainer, steps):
    for _ in range(steps):
        trainer.step()
        if trainer.steps_done % trainer.config.eval_every == 0:
            trainer.record()


def resumed_beside(whole, folder, steps):
    """Save a run, and let it and one that is restored take more steps; return that one."""
    whole.save(folder / "checkpoint")
    take(whole, steps)
    restored = Trainer(whole.config)
    restored.load(folder / "checkpoint")
    take(restored, steps)
    return restored


def timeless(row):
    return {name: value for name, value in row.items() if "time" not in name}
