"""Run what ``make train`` runs, ``gfn-rb train tfbind8``, with some seeds: what is found, CPU time.

    --seeds N      how many, by default 5
    --store        keep the results in benchmarks/results/make_train.json

CPU seconds are those of the whole command after the imports: training, metrics, checkpoints and the
report. Each seed has a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.records import RESULTS, keep

FIGURES = {"modes_found": 1, "total_variation": 4, "log_z_gap": 3, "cpu_seconds": 1}
"""Names of the figures, and digits to print."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and store."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--store", action="store_true")
    options = parser.parse_args(arguments)
    seeds = range(options.seeds)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        found = [*pool.imap(run, seeds)]
    for each in found:
        print(each)
    print({name: round(mean(each[name] for each in found), 4) for name in FIGURES})
    if options.store:
        keep(RESULTS / "make_train.json", "make_train", "runs", found, seeds=seeds)


def run(seed: int, **options: Any) -> dict[str, float]:
    """Train once as the command line does.

    Args:
        seed: of the run.
        **options: other options of the run than the defaults.
    """
    from gfn_rb.training import TFBind8Config, Trainer, page  # noqa: F401 (loaded before the clock)
    from gfn_rb.training.session import launch

    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        result = launch.train(TFBind8Config(seed=seed, out=Path(folder) / "run", **options))
        seconds = time.process_time() - begun
    assert result is not None
    row = {**result.row, "cpu_seconds": seconds}
    return {"seed": seed, **{name: float(row[name] or 0) for name in FIGURES}}


if __name__ == "__main__":
    main()
