"""Several runs side by side, from their folders alone: seeds of one configuration together."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gfn_rb.errors import ArgumentError, CheckpointCorruptError
from gfn_rb.shapes import Float64
from gfn_rb.training.config import flat
from gfn_rb.training.rules import suggestion
from gfn_rb.training.session.folder import RunFolder
from gfn_rb.training.session.reading import named_damage, printable, read_json, read_metrics

# Default metrics of a comparison: the first three of these that all runs have.
USUAL = (
    *("modes_found", "total_variation", "accuracy", "spearman", "log_z_gap"),
    *("top_100_score", "loss"),
)
# Options that change nothing of what is learnt until some reward call.
_BESIDE = {
    *("seed", "steps", "threads", "eval_every", "checkpoint_every", "patience"),
    *("metrics_port", "metrics_address"),
    *("format", "metrics", "metrics.samples", "metrics.backward"),
}
# What each rank counts of its own, which says nothing of all ranks together.
_COUNTS = "modes_found", "distinct_reward_calls", "top_100_score", "top_100_diversity"
_MAX_CALLS = 2**53  # beyond which doubles leave out whole numbers


Columns = dict[str, Float64[np.ndarray, "k"]]


class FinishedRun(NamedTuple):
    """The configuration and the metrics in a run folder."""

    path: Path
    config: dict[str, Any]
    columns: Columns
    note: str = ""  # on what is not known of it

    @property
    def calls(self) -> int:
        """The reward calls it took in all."""
        return int(self.columns["reward_calls"][-1])

    def has(self, metric: str) -> bool:
        """Whether a metric was ever measured."""
        return bool(np.isfinite(self.columns.get(metric, np.zeros(0))).any())

    def at(self, metric: str, calls: int | float) -> float:
        """Return a metric after a number of reward calls, linear between rows; NaN beyond them."""
        x = self.columns["reward_calls"]
        y = self.columns.get(metric, np.full_like(x, np.nan))
        known = np.isfinite(y)
        if not known.any():
            return math.nan
        return float(np.interp(calls, x[known], y[known], left=np.nan, right=np.nan))


class Configuration(NamedTuple):
    """Runs that differ in their seed and their length alone."""

    label: str
    runs: list[FinishedRun]

    def at(self, metric: str, calls: int) -> tuple[float, float]:
        """Return mean and standard deviation over the seeds; of one seed the latter is NaN."""
        values = np.array([run.at(metric, calls) for run in self.runs])
        return float(values.mean()), math.nan if len(values) == 1 else float(values.std(ddof=1))


class Comparison(NamedTuple):
    """Configurations of one environment, side by side."""

    env: str
    calls: int
    metrics: list[str]
    configurations: list[Configuration]
    ignored: list[str]  # runs left out, and why
    notes: list[str]  # on runs whose numbers are not all known

    @property
    def title(self) -> str:
        """What is compared, in one line."""
        several = any(len(each.runs) > 1 for each in self.configurations)
        spread = ", mean ± standard deviation over seeds" if several else ""
        return f"{self.env} after {self.calls:,} reward calls{spread}"

    def rows(self) -> list[list[str]]:
        """Return the cells of a table: headings, and a row for each configuration."""
        columns = [
            ["configuration", *(each.label for each in self.configurations)],
            ["seeds", *(str(len(each.runs)) for each in self.configurations)],
            *([metric.replace("_", " "), *self._cells(metric)] for metric in self.metrics),
            ["seconds", *self._cells("time_total")],
        ]
        return [[*row] for row in zip(*columns, strict=True)]

    def _cells(self, metric: str) -> Iterator[str]:
        """Yield the cells of a column; counts and large numbers have fewer digits."""
        numbers = [each.at(metric, self.calls) for each in self.configurations]
        is_count = metric in ("modes_found", "distinct_reward_calls")
        largest = max((abs(mean) for mean, _ in numbers if math.isfinite(mean)), default=0.0)
        digits = 1 if is_count or largest >= 100 else 2 if largest >= 10 else 4
        for mean, spread in numbers:
            more = "" if math.isnan(spread) else f" ± {spread:,.{digits}f}"
            yield "-" if math.isnan(mean) else f"{mean:,.{digits}f}{more}"


def compare_runs(
    paths: Sequence[Path], metrics: Sequence[str] = (), calls: int | None = None
) -> Comparison:
    """Compare runs of one environment at equal reward calls."""
    if not paths:
        raise ArgumentError("runs must be at least one folder, got none")
    runs = [read_run(path) for path in paths]
    first = runs[0]
    for run in runs:
        if run.config["env"] != first.config["env"]:
            raise ArgumentError(
                f"runs must be of one environment, got {first.config['env']!r} in {first.path} "
                f"and {run.config['env']!r} in {run.path}"
            )
    configurations, ignored = _grouped(runs)
    shortest = min((run for each in configurations for run in each.runs), key=lambda run: run.calls)
    if calls is not None and not 0 < calls <= shortest.calls:
        raise ArgumentError(
            f"calls must be in [1, {shortest.calls}], as many as {shortest.path} took, got {calls}"
        )
    for metric in metrics:
        for run in runs:
            if not run.has(metric):
                measured = [*filter(run.has, run.columns)]
                raise ArgumentError(
                    f"metrics must be among {', '.join(measured)}, which {run.path} measured, got "
                    f"{metric!r}{suggestion(metric, measured)}"
                )
    usual = [
        metric
        for metric in USUAL
        if all(run.has(metric) for run in runs)
        and any(np.nan_to_num(run.columns[metric]).any() for run in runs)
    ]
    env, chosen = printable(first.config["env"]), [*metrics] or usual[:3]
    notes = [f"{run.path}: {run.note}" for run in runs if run.note]
    return Comparison(env, calls or shortest.calls, chosen, configurations, ignored, notes)


def read_run(path: Path) -> FinishedRun:
    """Read a run folder, without the code of its environment.

    Of several ranks, the columns are the sum of reward calls, what the ranks found together, and
    the means of the rest, as far as all ranks came.
    """
    folder = RunFolder.open(path)
    config = flat(read_json(folder.config))
    if not isinstance(config.get("env"), str):
        raise CheckpointCorruptError(f"{folder.config} names no environment")
    n_ranks = folder.n_ranks()
    files = [RunFolder(path, rank).metrics for rank in range(n_ranks)]
    tables = [read_columns(file) for file in files if file.exists()]
    if not tables:
        raise ArgumentError(f"runs must have measured something, got {path} without metrics.csv")
    n = min(len(table["reward_calls"]) for table in tables)
    names = [name for name in tables[0] if all(name in table for table in tables)]
    columns = {name: np.mean([table[name][:n] for table in tables], axis=0) for name in names}
    note = ""
    if len(tables) > 1:
        columns["reward_calls"] *= len(tables)
        columns |= _found_together(folder, columns)
        if np.isnan(columns["modes_found"]).all():
            note = f"{', '.join(_COUNTS)} of all ranks together are known at the end of a run alone"
    return FinishedRun(path, {**config, "ranks": n_ranks}, columns, note)


def _found_together(folder: RunFolder, columns: Columns) -> Columns:
    """Return what ranks found together, where their report has it; NaN elsewhere.

    A mean over ranks would count what one of them found, after the reward calls of all.
    """
    x = columns["reward_calls"]
    found = {name: np.full_like(x, np.nan) for name in _COUNTS if name in columns}
    if not folder.ranks_report.exists():
        return found
    with named_damage(folder.ranks_report):
        together = read_json(folder.ranks_report).get("together") or {}
        if calls := [float(n) for n in together.get("reward_calls", ())]:
            modes = [float(n) for n in together["modes_found"]]
            found["modes_found"] = np.interp(x, calls, modes, np.nan, np.nan)
            if together["top_100_score"] is not None and "top_100_score" in found:
                found["top_100_score"][x == calls[-1]] = float(together["top_100_score"])
    return found


def _grouped(runs: Sequence[FinishedRun]) -> tuple[list[Configuration], list[str]]:
    """Put the seeds of one configuration together, named by what sets it apart.

    Of several runs of one seed the longest counts. The others are named.
    """
    longest: dict[tuple[str, str], FinishedRun] = {}
    keys = []
    for run in runs:
        own = {name: value for name, value in run.config.items() if name not in _BESIDE}
        key = json.dumps(own, sort_keys=True), json.dumps(run.config.get("seed"))
        longest[key] = max(longest.get(key, run), run, key=lambda each: each.calls)
        keys.append(key)
    ignored = [
        f"{run.path}, which repeats seed {key[1]} of {longest[key].path}"
        for run, key in zip(runs, keys, strict=True)
        if run is not longest[key]
    ]
    groups: dict[str, list[FinishedRun]] = {}
    for (own_options, _), run in longest.items():
        groups.setdefault(own_options, []).append(run)
    pooled = [*groups.values()]
    configs = [same[0].config for same in pooled]
    names = dict.fromkeys(name for config in configs for name in config if name not in _BESIDE)
    differing = [name for name in names if len({repr(c.get(name)) for c in configs}) > 1]

    def label(config: dict[str, Any]) -> str:
        differences = ", ".join(f"{name}={config.get(name)}" for name in differing)
        return printable(differences or config["env"])

    return [Configuration(label(same[0].config), same) for same in pooled], ignored


def read_columns(path: Path) -> Columns:
    """Return a table of metrics by columns; NaN for log Z before the first step, any number."""
    rows = [row for row in read_metrics(path) if None not in row.values()]  # cut by a kill
    if not rows or "reward_calls" not in rows[0]:
        raise ArgumentError(f"runs must have measured something, got {path} without rows")
    try:
        columns = {name: np.array([float(row[name] or "nan") for row in rows]) for name in rows[0]}
        calls = columns["reward_calls"]
        if not (calls >= 0).all() or calls[-1] > _MAX_CALLS or (np.diff(calls) < 0).any():
            raise ValueError("reward_calls must be ascending counts")
    except ValueError as error:
        raise CheckpointCorruptError(f"{path} must hold numbers: {error}") from error
    for name in columns.keys() & {"log_z", "log_z_gap"} if "step" in columns else ():
        columns[name][columns["step"] <= 0] = np.nan
    return columns
