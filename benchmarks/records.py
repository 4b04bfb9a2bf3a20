"""What a stored figure says of itself, and whether the code that it measures has changed since.

A file of ``benchmarks/results`` has ``measured``: its format, the command, commit, date, machine,
versions, options and seeds, and a digest of the code that the benchmark depends on (:data:`CODE`).
The digest is of syntax trees: comments and layout do not count.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gfn_rb.training.options import GeneralOptions

FORMAT = 1
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = ("torch", "torchrl", "tensordict", "numpy", "numba", "torchgfn", "cpprb", "ribs")

NO_TORCHGFN = "torchgfn must be installed for this benchmark: pip install 'gfn_rb[bench]'"
_CONTENT = {"parts", "results", "runs", "arms", "measured"}
"""What a file of results has one of."""
_BUFFERS = (
    *("gfn_rb/writers", "gfn_rb/samplers", "gfn_rb/kernels", "gfn_rb/numerics", "gfn_rb/buffers"),
    *("gfn_rb/storages", "gfn_rb/torchrl_compat"),
    *("benchmarks/timing.py", "benchmarks/workloads.py"),
)
_ROLLOUTS = ("gfn_rb/envs", "gfn_rb/policies", "gfn_rb/rollout", "gfn_rb/containers")
_LEARNING = (
    *_BUFFERS[:-2],
    *_ROLLOUTS,
    *("gfn_rb/losses", "gfn_rb/training"),
)
CODE: dict[str, tuple[str, ...]] = {
    "local": (*_BUFFERS, "benchmarks/local.py", "benchmarks/fifty_lines.py"),
    "groups": (*_BUFFERS, "benchmarks/groups.py"),
    "interop": (*_BUFFERS, "gfn_rb/interop/torchgfn", "benchmarks/interop.py"),
    "selection": (*_BUFFERS, "benchmarks/selection.py"),
    "compact": (*_BUFFERS, "benchmarks/compact.py"),
    "ragged": (*_BUFFERS, "benchmarks/ragged.py"),
    "checkpoint": (
        *("gfn_rb/checkpoint", "gfn_rb/codec", "benchmarks/checkpoint.py", "benchmarks/timing.py"),
    ),
    "rollout": (*_ROLLOUTS, "benchmarks/rollout.py", "benchmarks/timing.py"),
    "distributed": ("gfn_rb/remote", "gfn_rb/transports", "gfn_rb/codec", *_BUFFERS),
    "device": (*_BUFFERS, *_ROLLOUTS, "benchmarks/device.py"),
    "training": (*_LEARNING, "benchmarks/training.py"),
    "figures": (
        *_LEARNING,
        "gfn_rb/interop/torchgfn",
        "gfn_rb/checkpoint",
        "benchmarks/figures.py",
    ),
    "make_train": (*_LEARNING, "benchmarks/make_train.py"),
    "diffusion": (*_LEARNING, "benchmarks/diffusion.py"),
    "learning": (*_LEARNING, "benchmarks/learning.py"),
    "published": (
        *_LEARNING,
        *("benchmarks/published/defaults.py", "benchmarks/published/landscapes.py"),
        *("benchmarks/published/rows.py", "benchmarks/published/runs.py"),
        *("benchmarks/published/sceptic.py", "benchmarks/sceptic", "benchmarks/fifty_lines.py"),
    ),
    "language_model": (*_LEARNING, "benchmarks/language_model.py"),
    "distributed_learning": (*_LEARNING, "gfn_rb/remote", "gfn_rb/transports"),
    "message_costs": (*_BUFFERS, "gfn_rb/remote", "benchmarks/message_costs.py"),
    "simulation": (
        *(*_BUFFERS, "gfn_rb/remote", "gfn_rb/transports"),
        *("benchmarks/message_costs.py", "benchmarks/simulation.py"),
    ),
    "many_ranks": (
        *("gfn_rb/remote", "gfn_rb/transports", "gfn_rb/training/session/joining.py"),
        "benchmarks/many_ranks.py",
    ),
}
"""Paths of the repository that the figures of each benchmark depend on."""


class RecordError(ValueError):
    """A file of results cannot be read."""


def measured(
    benchmark: str, options: Mapping[str, Any] | None = None, seeds: Iterable[int] = ()
) -> dict[str, Any]:
    """Return what is known of a measurement that is being made now.

    Args:
        benchmark: a key of :data:`CODE`.
        options: all options of the run, resolved.
        seeds: its seeds.
    """
    return {
        "format": FORMAT,
        "benchmark": benchmark,
        "command": " ".join(["python -m", _module(), *map(_said, sys.argv[1:])]),
        "commit": _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": machine(),
        "load": round(os.getloadavg()[0], 1),  # of the last minute: many processes slow each other
        "versions": versions(),
        "options": dict(options or {}),
        "seeds": list(seeds),
        "code": code_of(benchmark),
    }


def keep(
    path: Path, benchmark: str, part: str, results: list[dict[str, Any]], **facts: Any
) -> None:
    """Write the results of a part of a benchmark; those of its other parts are kept.

    Args:
        path: the file.
        benchmark: a key of :data:`CODE`.
        part: name of the part.
        results: what came out.
        **facts: ``options`` and ``seeds`` of :func:`measured`.
    """
    report = read(path) or {"parts": {}}
    report["parts"][part] = {"measured": measured(benchmark, **facts), "results": results}
    path.write_text(json.dumps(report, indent=1, default=str) + "\n")


def read(path: Path) -> Any:
    """Return what a file of results holds, None if there is no file.

    Raises:
        RecordError: it is no JSON, has no results, or is of a newer format.
    """
    if not path.exists():
        return None
    try:
        report = json.loads(path.read_text())
    except ValueError as error:
        raise RecordError(f"{path.name} must be a file of results, got no JSON: {error}") from None
    if not (isinstance(report, list) or (isinstance(report, dict) and _CONTENT & report.keys())):
        raise RecordError(f"{path.name} must have one of {', '.join(sorted(_CONTENT))}, got none")
    for each in _records(report):
        if (found := each.get("format")) != FORMAT:
            raise RecordError(f"{path.name} must be of format {FORMAT}, got {found!r}")
    return report


def _with_added(
    known: Mapping[str, Any], now: Mapping[str, Any], usual: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a configuration with the usual values of the options that it lacks."""
    filled = {name: usual[name] for name in now if name not in known and name in usual} | known
    for name, value in filled.items():
        if isinstance(value, dict) and isinstance(now.get(name), dict):
            inner = usual.get(name, usual)
            filled[name] = _with_added(value, now[name], inner if isinstance(inner, dict) else {})
    return filled


def require_same(path: Path, known: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise unless stored results have the configuration that is to be run now.

    An option that was added since has its default in the stored results, as nothing else was there.

    Raises:
        RecordError: it has another one, whose results would be mixed or lost.
    """
    usual = json.loads(json.dumps(asdict(GeneralOptions()), default=str))
    known = _with_added(known, now, usual)
    names = sorted(known.keys() | now.keys())
    absent = object()
    if wrong := [name for name in names if known.get(name, absent) != now.get(name, absent)]:
        raise RecordError(
            f"{path.name} must have the configuration of this run, got another "
            f"{', '.join(wrong[:3])}{f' and {len(wrong) - 3} more' * (len(wrong) > 3)}: --replace "
            "drops its results, --out FOLDER keeps them"
        )


def age(record: Mapping[str, Any] | None) -> str:
    """Return a sentence about when something was measured, by which commit, and if that is old.

    Args:
        record: as of :func:`measured`; None if none was kept.
    """
    if not record or not record.get("commit"):
        return "Measured before commits were recorded: older than the code."
    text = f"Measured on {record['date']} at commit {record['commit']}"
    return f"{text}." if is_current(record) else f"{text}: older than the code."


def is_current(record: Mapping[str, Any]) -> bool:
    """Return whether the code that was measured is that of this checkout."""
    return record.get("code") == code_of(record["benchmark"])


@cache
def code_of(benchmark: str) -> str:
    """Return a digest of the code that a benchmark depends on."""
    digest = hashlib.sha256()
    for name in CODE[benchmark]:
        path = ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(str(file.relative_to(ROOT)).encode())
            digest.update(ast.dump(ast.parse(file.read_text())).encode())
    return digest.hexdigest()[:16]


def machine() -> dict[str, Any]:
    """Return what the figures depend on beside the software."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "system": platform.platform(terse=True),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are measured."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _records(report: Any) -> list[Mapping[str, Any]]:
    """Return the descriptions of measurements in a report."""
    if isinstance(report, list):
        return [each for entry in report for each in _records(entry)]
    if not isinstance(report, dict):
        return []
    own = [report["measured"]] if report.get("measured") else []
    return own + [each for value in report.values() for each in _records(value)]


def _commit() -> str:
    """Return the commit of the checkout, with a + if it has changes; empty outside of git."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"],  # noqa: S607
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()


def _module() -> str:
    """Return the module that runs; in a process that another one started, that one's."""
    spec, path = getattr(sys.modules["__main__"], "__spec__", None), Path(sys.argv[0])
    if spec is not None and spec.name not in ("__main__", "__mp_main__"):
        return str(spec.name).removesuffix(".__main__")
    if not path.is_relative_to(ROOT):
        return path.stem
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")


def _said(word: str) -> str:
    """Return a word of a command line, of an absolute path the last part alone."""
    return Path(word).name if word.startswith("/") else word


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
