"""Twenty-one tasks with the default options of ``gfn-rb train``, beside tuned ones at equal calls.

A task has the options of its environment, and the batch size of its protocol but for BitSequence;
all other options are the defaults. Calls are those of the protocol or a part of them.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from benchmarks.published.landscapes import LandscapeConfig
from benchmarks.published.rows import ROWS, Figure, Row
from gfn_rb.training import (
    BitSequenceConfig,
    ConditionalHyperGridConfig,
    DeceptiveGridConfig,
    HyperGridConfig,
    QM9StringsConfig,
    RNABindingConfig,
    TrainConfig,
    Trainer,
)

CHOSEN_ON = (
    *("grid_4d_16", "tfbind8", "qm9", "rna1", "hypergrid_8", "bit_sequence", "dag"),
    *("words", "ising", "hypergrid_16_2", "conditional"),  # temperature, rates that fall
    *("grid_3d", "grid_2d_128"),  # clipped gradients
)
"""The tasks that the defaults were compared on when they were chosen; the others report on them."""

FIGURES = (
    Figure("modes found", "modes_found", None),
    Figure("total variation", "total_variation", None, False, digits=4),
    Figure("error of log Z", "log_z_gap", None, False, digits=3),
)


def task_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options of a configuration that say what the task is."""
    common = {each.name for each in fields(TrainConfig)}
    own = {each.name: getattr(config, each.name) for each in fields(config)}
    return {name: value for name, value in own.items() if name not in common}


def figures_of(trainer: Trainer) -> dict[str, float]:
    """Return the modes found, total variation and error of log Z in nats, those that are known."""
    known = {**trainer.discovery.columns(), **trainer.fit.columns()}
    if trainer.env.n_modes == 0:  # none are defined
        known["modes_found"] = None
    return {each.key: known[each.key] for each in FIGURES if known.get(each.key) is not None}


def _of(name: str, calls: int, batch_size: int = 32, title: str | None = None) -> Row:
    """Return a published row with the default options."""
    row = ROWS[name]
    config = type(row.config)(batch_size=batch_size, **task_options(row.config))
    return _new(name, title or row.title, config, calls, row.n_modes)


def _new(name: str, title: str, config: TrainConfig, calls: int, n_modes: int = 0) -> Row:
    """Return a task; ``n_modes`` is 0 where none are counted."""
    return Row(
        name=name,
        title=title,
        protocol="",
        published="",
        settings="",
        config=config,
        calls=calls,
        figures=FIGURES,
        measure=figures_of,
        n_modes=n_modes,
    )


_RNAS = [
    _new(
        f"rna{i}",
        f"RNA{i}, 14 letters, beta 40 ({n:,} published modes)",
        RNABindingConfig(targets=(f"RNA{i}",), form="prepend_append", beta=40.0, modes="published"),
        32_000,
        n,
    )
    for i, n in ((1, 8_967), (2, 8_402), (3, 7_400))
]
_GRID = "deceptive grid, 4-d, height"
_ROWS = (
    _of("grid_4d_16", 48_000, 16, f"{_GRID} 16"),
    _new(
        "grid_4d_20",
        f"{_GRID} 20",
        DeceptiveGridConfig(height=20, batch_size=16),
        96_000,
        256,
    ),
    _new(
        "grid_3d",
        "deceptive grid, 3-d, height 32",
        DeceptiveGridConfig(ndim=3, height=32, batch_size=16),
        48_000,
        216,
    ),
    _new(
        "grid_2d_128",
        "deceptive grid, 2-d, height 128",
        DeceptiveGridConfig(ndim=2, height=128, batch_size=16),
        32_000,
        676,
    ),
    _of("grid_4d", 96_000, 16),
    _of("grid_2d", 48_000, 16),
    _of("tfbind8", 32_000, title="TFBind8 (328 published modes)"),
    _new("qm9", "QM9 strings (805 modes)", QM9StringsConfig(), 32_000, 805),
    *_RNAS,
    _of("bit_sequence", 100_000),
    _new(
        "bit_sequence_10",
        "BitSequence, 120 bits in words of 10 (60 modes)",
        BitSequenceConfig(word_bits=10, form="non_autoregressive", delta=30),
        50_000,
        60,
    ),
    _new("hypergrid_8", "hypergrid 8^4", HyperGridConfig(), 32_000),
    _new("hypergrid_16_2", "hypergrid 16^2", HyperGridConfig(ndim=2, height=16), 64_000),
    _new("hypergrid_20", "hypergrid 20^4", HyperGridConfig(height=20), 64_000),
    _new("conditional", "conditional hypergrid 8^2", ConditionalHyperGridConfig(), 32_000),
    _of("dag", 300_000, title="posterior over Bayesian networks of 5 nodes"),
    *(
        _new(kind, title, LandscapeConfig(kind=kind), 32_000, n)
        for kind, title, n in (
            ("ising", "Ising model, 12 spins (18 modes)", 18),
            ("words", "60 sparse words of 8 letters", 60),
            ("nk", "NK landscape, 16 bits (50 modes)", 50),
        )
    ),
)
DEFAULTS = {row.name: replace(row, name=f"defaults_{row.name}") for row in _ROWS}
"""The rows with default options, by task."""


def _tuned(row: Row) -> Row:
    """Return a task with the options of its published row, annealed over the calls of the task."""
    config = ROWS[row.name].config
    if config.anneal_steps is not None:
        n_steps = row.calls // replace(row, config=config).calls_per_step
        config = replace(config, anneal_steps=n_steps)
    return replace(row, name=f"tuned_{row.name}", config=config)


TOO_COSTLY = ("grid_2d",)
"""Tasks with tuned options that are left out: a run takes more than seven CPU minutes."""
TUNED = {row.name: _tuned(row) for row in _ROWS if row.name in ROWS and row.name not in TOO_COSTLY}
"""The same tasks with tuned options, where the published rows have some."""
