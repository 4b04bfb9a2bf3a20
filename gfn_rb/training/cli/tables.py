"""Lines that the command line prints: the end of a run, and the content of a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gfn_rb.errors import (
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    SecretError,
)
from gfn_rb.training.config import CONFIGS, FORMAT, TrainConfig, flat
from gfn_rb.training.options import GeneralOptions
from gfn_rb.training.session.folder import RunFolder, run_secret, saved_env
from gfn_rb.training.session.reading import named_damage, printable, read_json, read_metrics

if TYPE_CHECKING:
    import gfn_rb.training.trainer

Lines = Iterator[str]

_DISTANCES = {
    "total_variation": "total variation, policy to target",
    "jensen_shannon_distance": "Jensen-Shannon distance",
}
_DRAWS = 1000
_SETTLED = 0.5  # nats by which log Z may move in the last quarter of a run, or somewhat more
_FITTED = 10.0  # a loss above it: residuals are about four nats and more
_OTHERS = {
    "spearman": "Spearman, log P(x) with log R(x)",
    "pearson": "Pearson, log P(x) with log R(x)",
    "accuracy": "mean score over the target's",
    "elbo": "evidence lower bound",
    "eubo": "evidence upper bound",
    "log_z_importance": "log Z by importance weights",
    "top_100_diversity": "mean distance between the best 100",
}


def result_lines(trainer: gfn_rb.training.trainer.Trainer, row: Mapping[str, Any]) -> Lines:
    """Yield the table at the end of a run; the row was measured there."""
    config = trainer.config
    title = f"{config.env}, {row['step']:,} steps of {config.batch_size}, seed {config.seed}"
    total = row["time_total"]
    seconds = {n[5:]: s for n, s in row.items() if n.startswith("time_") and n != "time_total"}
    seconds["other"] = total - sum(seconds.values())
    times = {f"  {name}": f"{s:.1f} s ({s / total:.0%})" for name, s in seconds.items()}
    log_z, true = row["log_z"], trainer.fit.log_z
    n_found, n_modes = row["modes_found"], trainer.env.n_modes
    of_true = "" if true is None else f", true {true:.3f} ({log_z - true:+.3f})"
    of_all = f" of {n_modes:,} ({n_found / n_modes:.0%})" if n_modes else ""
    known = {name: value for name, value in row.items() if value is not None}
    method = trainer.fit.method
    distances = {t: f"{row[n]:.4f} ({method})" for n, t in _DISTANCES.items() if n in row}
    values = {
        **distances,
        "log Z": f"{log_z:.3f}{of_true}",
        "modes found": f"{n_found:,}{of_all}",
        "mean score of the best 100": f"{row['top_100_score']:.4f}",
        **{title: number(known[name]) for name, title in _OTHERS.items() if name in known},
        **_replay(trainer),
        "distinct reward calls": f"{row['distinct_reward_calls']:,} of {row['reward_calls']:,}",
        "wall time": f"{total:.1f} s",
    }
    yield from described(title, {**values, **times})


def warning_lines(rows: Sequence[Mapping[str, Any]]) -> Lines:
    """Yield what the rows of metrics of a run show to be unfinished, each with a remedy."""
    last = rows[-1]
    # At step 0 log Z is any number.
    past = [row for row in rows if 0 < row["step"] <= 0.75 * last["step"]]
    moved = last["log_z"] - past[-1]["log_z"] if past and last["log_z"] is not None else 0.0
    if abs(moved) > _SETTLED:
        yield (
            f"warning: log Z moved by {moved:+.2f} nats since step {past[-1]['step']:,}: raise "
            "--steps or --lr-log-z"
        )
    if last["loss"] is not None and last["loss"] > _FITTED:
        yield (
            f"warning: the loss is still {last['loss']:,.1f}, a fitted policy's is near 0: raise "
            "--steps or --lr"
        )


def _replay(trainer: gfn_rb.training.trainer.Trainer) -> dict[str, str]:
    """Return the three best objects found, and what is drawn to be replayed."""
    from gfn_rb.buffers.summary import locked, read_columns  # which loads TorchRL

    found = trainer.discovery
    top = zip(trainer.env.describe(found.top_state[:3]), found.top[:3].tolist(), strict=True)
    titles = "best object", "  second", "  third"
    told = {t: f"{name}, score {score:.4f}" for t, (name, score) in zip(titles, top, strict=False)}
    if not trainer.config.n_replayed or not len(trainer.replayed):
        return told
    with locked(trainer.replayed) as members:
        columns = read_columns(trainer.replayed, members)
    if columns.log_prob is not None:
        p = columns.log_prob.exp()
        # Expected: a row with probability p is among n draws with probability 1 - (1 - p)^n.
        share = float(-((-p).log1p() * _DRAWS).expm1().sum()) / _DRAWS
        told[f"different rows in {_DRAWS:,} draws"] = f"{share:.1%}"
        if columns.age is not None:
            told["mean age of a draw"] = f"{float(p @ columns.age.double()):,.1f} steps"
    return told


def ranks_lines(folder: RunFolder) -> Lines:
    """Yield the table of what each rank of a finished run did; nothing where it had but one."""
    if not folder.ranks_report.exists():
        return
    measures = "reward_calls", "modes_found", "total_variation"
    headings = (name.replace("_", " ") for name in measures)
    rows = [["ranks", *headings, "sent", "fed", "received", "stored"]]
    with named_damage(folder.ranks_report):
        report = read_json(folder.ranks_report)
        for rank, done in report["ranks"].items():
            counters = done["counters"]
            cells = [number(done["measured"].get(name)) for name in measures]
            cells += number(counters.get("sent")), number(counters.get("fed")), "", ""
            rows.append([printable(f"rank {rank}"), *cells])
        for manager in map(int, report["managers"]):
            cells = ["", "", ""]  # how many rows it fed, received and stored
            if (path := RunFolder(folder.path, manager).manager).exists():
                with named_damage(path):
                    known = read_json(path)
                    senders = known["senders"].values()
                    totals = (sum(each[name] for each in senders) for name in ("fed", "items"))
                    cells = [*map(number, totals), number(known["stored"])]
            rows.append([f"manager {manager}", "", "", "", "", *cells])
        together = number(report["reward_calls"]), number(report["modes_found"])
        yield from aligned_lines([*rows, ["together", *together, "", "", "", "", ""]])


def number(value: Any) -> str:
    """Return a number as it is shown, "" where there is none; a text as it is."""
    if value is None or isinstance(value, str):
        return printable(value or "")
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def aligned_lines(rows: Sequence[Sequence[str]]) -> Lines:
    """Yield rows as text, however wide: the first column to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *cells])


def described(title: str, values: Mapping[str, Any]) -> Lines:
    """Yield a title, what values there are by name, and an empty line."""
    yield printable(title)
    width = max((len(printable(name)) for name in values), default=0)
    for name, value in values.items():
        text = f"{value:,}" if type(value) is int else printable(value)
        yield f"  {printable(name).ljust(width)}  {text}"
    yield ""


def inspection(path: Path, top: int | None = None, export: Path | None = None) -> Lines:
    """Yield what a run folder or a checkpoint holds; see the command ``inspect``."""
    if top is not None and top < 1:
        raise ArgumentError(f"top must be at least 1, got {top}")
    if export is not None and export.suffix not in (".csv", ".parquet"):
        raise ArgumentError(f"export must end in .csv or .parquet, got {export}")
    if not path.exists():
        raise ArgumentError(f"path must be a run folder or a checkpoint, got {path}, which is not")
    folder = RunFolder.open(path) if path.is_dir() else None
    options = {} if folder is None else read_json(folder.config)
    if isinstance(version := options.get("format"), int) and version > FORMAT:
        raise ArgumentError(
            f"path must be a run of this gfn_rb or an older one, got {path}, of format {version}: "
            f"expected {FORMAT} at most"
        )
    checkpoint = path if folder is None else folder.checkpoint
    if checkpoint.exists():
        yield from _checkpoint_lines(checkpoint, options, top, export)
    if folder is None:
        return
    yield from described(f"{path}: options that differ from the defaults", _changed(options))
    if folder.metrics.exists() and (rows := read_metrics(folder.metrics)):
        yield from described(f"{folder.metrics}: last of {len(rows)} rows", rows[-1])
    yield from ranks_lines(folder)


def _checkpoint_lines(
    path: Path, options: Mapping[str, Any], top: int | None, export: Path | None
) -> Lines:
    from gfn_rb.buffers.summary import summarize  # which loads TorchRL
    from gfn_rb.checkpoint import open_buffer
    from gfn_rb.checkpoint.api import outline
    from gfn_rb.checkpoint.database import is_database
    from gfn_rb.checkpoint.tables import table_of, write_table

    values = None if is_database(path) else outline(path, run_secret())
    options = options or (values or {}).get("config") or {}
    try:
        rb = open_buffer(path, secret=run_secret())
    except (CheckpointCorruptError, SecretError):
        raise
    except CheckpointError as error:  # such as for want of code that nobody trusts
        yield f"the buffer is not opened: {printable(error)}"
    else:
        env = saved_env(options)  # no code of the user's is run
        yield from map(printable, str(summarize(rb, env)).splitlines())
        yield ""
        if top is not None or export is not None:
            table = table_of(rb, env, top)
            if top is not None:
                heading = [name.replace("_", "-") for name in table]
                rows = zip(*table.values(), strict=True)
                yield from aligned_lines([heading, *([*map(number, row)] for row in rows)])
                yield ""
            if export is not None:
                write_table(export, table)
    if values is not None:
        size = f"{path.stat().st_size / 1e6:,.1f} MB"
        yield from described(str(path), {"size": size, "values": ", ".join(map(str, values))})


def _kind(options: Mapping[str, Any]) -> type[TrainConfig] | None:
    """Return the shipped configuration that options are of."""
    name = options.get("env")
    return CONFIGS.get(name) if isinstance(name, str) else None


def _changed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that differ from the defaults, and its environment."""
    kind = _kind(options)
    usual = asdict(GeneralOptions()) if kind is None else kind().to_dict()
    defaults = flat(json.loads(json.dumps(usual, default=str)))
    changed = {
        name: value
        for name, value in flat(options).items()
        if name not in defaults or defaults[name] != value
    }
    return {"env": options.get("env"), **changed}
