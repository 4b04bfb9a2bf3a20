"""Thirteen tasks with the default options of ``gfn-rb train``, beside tuned ones at equal calls.

A task has the options of its environment, and the batch size of its protocol but for BitSequence;
all other options are the defaults. Calls are those of the protocol or a part of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from benchmarks.published.rows import ROWS, Figure, Row, modes_found
from gfn_rb.training import (
    BitSequenceConfig,
    HyperGridConfig,
    QM9StringsConfig,
    RNABindingConfig,
    TrainConfig,
    Trainer,
)
from gfn_rb.training.metrics import ExactFit, total_variation

CHOSEN_ON = ("grid_4d_16", "tfbind8", "qm9", "rna1", "hypergrid_8", "bit_sequence", "dag")
"""The tasks that the defaults were compared on when they were chosen; the others report on them."""

_MODES = (Figure("modes found", "modes_found", None),)
_DISTANCE = (Figure("total variation", "total_variation", None, False, digits=4),)


def task_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options of a configuration that say what the task is."""
    common = {each.name for each in fields(TrainConfig)}
    own = {each.name: getattr(config, each.name) for each in fields(config)}
    return {name: value for name, value in own.items() if name not in common}


def distance(trainer: Trainer) -> dict[str, float]:
    """Return the exact total variation distance between policy and target."""
    assert isinstance(trainer.fit, ExactFit)
    log_p = trainer.fit.policy_log_prob()
    return {"total_variation": total_variation(log_p, trainer.env.target_log_prob())}


def modes_and_distance(trainer: Trainer) -> dict[str, float]:
    """Return the modes found, and the exact total variation distance to the target."""
    return {**modes_found(trainer), **distance(trainer)}


def _with_distance(row: Row) -> Row:
    return replace(row, figures=_MODES + _DISTANCE, measure=modes_and_distance)


def _of(name: str, calls: int, figures: Sequence[Figure] = _MODES, batch_size: int = 32) -> Row:
    """Return a published row with the default options."""
    row = ROWS[name]
    config = type(row.config)(batch_size=batch_size, **task_options(row.config))
    return replace(row, config=config, calls=calls, figures=tuple(figures), looks=(), milestones=())


def _new(name: str, title: str, config: TrainConfig, calls: int, n_modes: int | None) -> Row:
    """Return a task that no tuned row has."""
    return Row(
        name=name,
        title=title,
        protocol="",
        published="",
        settings="",
        config=config,
        calls=calls,
        figures=_DISTANCE if n_modes is None else _MODES,
        measure=distance if n_modes is None else modes_found,
        n_modes=n_modes or 0,
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
_ROWS = (
    _with_distance(
        replace(_of("grid_4d_16", 48_000, batch_size=16), title="deceptive grid, 4-d, height 16")
    ),
    _of("grid_4d", 96_000, batch_size=16),
    _of("grid_2d", 48_000, batch_size=16),
    _with_distance(replace(_of("tfbind8", 32_000), title="TFBind8 (328 published modes)")),
    _with_distance(_new("qm9", "QM9 strings (805 modes)", QM9StringsConfig(), 32_000, 805)),
    *_RNAS,
    _of("bit_sequence", 100_000),
    _new(
        "bit_sequence_10",
        "BitSequence, 120 bits in words of 10 (60 modes)",
        BitSequenceConfig(word_bits=10, form="non_autoregressive", delta=30),
        50_000,
        60,
    ),
    _new("hypergrid_8", "hypergrid 8^4", HyperGridConfig(), 32_000, None),
    _new("hypergrid_20", "hypergrid 20^4", HyperGridConfig(height=20), 64_000, None),
    replace(_of("dag", 100_000, _DISTANCE), title="posterior over Bayesian networks of 5 nodes"),
)
DEFAULTS = {row.name: replace(row, name=f"defaults_{row.name}") for row in _ROWS}
"""The rows with default options, by task."""


def _tuned(row: Row) -> Row:
    """Return a task with the options of its published row, annealed over the calls of the task."""
    config = ROWS[row.name].config
    if config.anneal.steps is not None:
        n_steps = row.calls // replace(row, config=config).calls_per_step
        config = replace(config, anneal=replace(config.anneal, steps=n_steps))
    return replace(row, name=f"tuned_{row.name}", config=config)


TUNED = {row.name: _tuned(row) for row in _ROWS if row.name in ROWS}
"""The same tasks with tuned options, where the published rows have some."""
