"""Measured columns of runs, checked, and the plots that a page makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gfn_rb.arguments import kind_of, require_kind, shown
from gfn_rb.errors import ArgumentError
from gfn_rb.shapes import Float64

Columns: TypeAlias = Mapping[str, Float64[np.ndarray, "k"]]

CALLS = "reward_calls"
AGE = "age, policy versions (steps)"


class CurvePlot(NamedTuple):
    """A plot: title, label of the axis, text, and the names of its lines by column."""

    title: str
    axis: str
    text: str
    lines: Mapping[str, str]


_KNOWN = {
    "losses": CurvePlot(
        "Loss", "mean loss", "Mean loss of fresh and replayed batches since the last point.",
        {"loss": "fresh", "replay_loss": "replayed"},
    ),
    "modes": CurvePlot(
        "Modes found", "modes", "Distinct modes sampled so far.", {"modes_found": "modes"}
    ),
    "best": CurvePlot(
        "Best 100 found", "mean score", "Mean score of the best 100 distinct objects so far.",
        {"top_100_score": "best 100"},
    ),
    "distances": CurvePlot(
        "Distance from policy to target", "distance", "Exact, over all objects.",
        {"total_variation": "total variation", "jensen_shannon_distance": "Jensen-Shannon"},
    ),
    "agreement": CurvePlot(
        "Agreement of policy and target", "1 for an exact policy",
        "Correlations of log P(x) with log R(x), and mean score over the target's.",
        {"spearman": "Spearman", "pearson": "Pearson", "accuracy": "mean score"},
    ),
    "log_z": CurvePlot(
        "log Z", "nats", "Learned log Z, its estimates by samples, and the true one.",
        {"log_z": "learned", "true_log_z": "true", "log_z_importance": "importance",
         "elbo": "ELBO", "eubo": "EUBO"},
    ),
    "drawn_ages": CurvePlot(
        "Age of drawn rows", AGE, "Mean age of the rows drawn since the last point.",
        {"mean_age": "mean age"},
    ),
}  # fmt: skip
USUAL = frozenset(column for plot in _KNOWN.values() for column in plot.lines)


def plots_of(runs: Mapping[str, Sequence[Columns]]) -> dict[str, CurvePlot]:
    """Return the plots of all measured columns by name: those that are usual, then all others."""
    names = dict.fromkeys(name for each in runs.values() for run in each for name in run)
    others = [name for name in names if name not in {*USUAL, CALLS}]
    own = {
        f"own_{i}": CurvePlot(name, name, "Measurements given in curves.", {name: name})
        for i, name in enumerate(others)
    }
    return {**_KNOWN, **own}


def checked_curves(curves: Any) -> dict[str, list[dict[str, Float64[np.ndarray, "k"]]]]:
    """Return measurements as columns of numbers, NaN where nothing was measured.

    Raises:
        ArgumentError: they are no lists of runs by configuration, a run is no table of columns,
            lacks ``reward_calls``, has columns of other lengths, or holds something else than
            numbers.
    """
    require_kind("curves", curves, Mapping)
    return {str(name): _runs(str(name), runs) for name, runs in curves.items()}


def _runs(name: str, runs: Any) -> list[dict[str, Float64[np.ndarray, "k"]]]:
    where = f"curves[{name!r}]"
    if _is_table(runs) or isinstance(runs, str) or not isinstance(runs, Sequence):
        hint = f": put the run in a list, {{{name!r}: [run]}}" if _is_table(runs) else ""
        raise ArgumentError(f"{where} must be a list of runs, got {kind_of(runs)}{hint}")
    return [_columns(f"{where}[{i}]", run) for i, run in enumerate(runs)]


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or hasattr(value, "columns")  # such as of pandas


def _columns(where: str, run: Any) -> dict[str, Float64[np.ndarray, "k"]]:
    if not _is_table(run):
        raise ArgumentError(
            f"{where} must be a run, a dict of columns or a DataFrame, got {kind_of(run)}"
        )
    names = [*run.keys()]
    if CALLS not in names:
        raise ArgumentError(
            f"{where} must have the column {CALLS!r}, the x of all curves, got {shown(names)}"
        )
    columns = {str(name): _numbers(f"{where}[{name!r}]", run[name]) for name in names}
    n = len(columns[CALLS])
    for name, column in columns.items():
        if len(column) != n:
            raise ArgumentError(
                f"{where}[{name!r}] must have {n} numbers, as many as {CALLS!r}, got {len(column)}"
            )
    return columns


def _numbers(where: str, column: Any) -> Float64[np.ndarray, "k"]:
    try:
        numbers = np.asarray(column, np.float64)
    except (TypeError, ValueError):
        numbers = np.zeros(())
    if numbers.ndim != 1:
        raise ArgumentError(f"{where} must be a list of numbers or None, got {kind_of(column)}")
    return numbers
