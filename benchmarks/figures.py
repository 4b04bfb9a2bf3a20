"""Measure in ten CPU minutes, and name the figures that left their range: ``make figures``.

    --store        also keep the figures in benchmarks/results, and write the pages from them

Every benchmark runs as a command of its own. A ratio has left its range if it is more than a
quarter beyond the quartiles of the stored rounds; a figure of learning, if it is beyond the stored
seeds by more than their spread. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.records import RESULTS, read

SLACK = 1.25
TIMED = {
    "groups": ["--parts", "extend", "prompts"],
    "interop": ["--parts", "best"],
    "rollout": [],
    "checkpoint": ["--gigabytes", "0.5", "--seconds", "15"],
}
LEARNED = ("defaults_tfbind8", "defaults_qm9", "defaults_hypergrid_8")


def main() -> int:
    """Run the commands, and print what left its range; 1 if anything did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--store", action="store_true")
    options = parser.parse_args()
    left = []
    with tempfile.TemporaryDirectory() as folder:
        for name, words in TIMED.items():
            path = Path(folder) / f"{name}.json"
            store = ["--store"] * options.store
            before = read(RESULTS / path.name)
            _run(name, *words, "--json", str(path), *store)
            left += [f"{name}, {line}" for line in ratios_out_of_range(read(path), before)]
        for row in LEARNED:
            name = f"published_{row}.json"
            _run("published", row, "--seeds", "1", "--out", folder)
            found, stored = read(Path(folder) / name), read(RESULTS / name)
            left += [f"{row}, {line}" for line in learned_out_of_range(found, stored)]
    if options.store:
        pages.main()
    print("\n".join(left) if left else "every figure is in its range")
    return int(bool(left))


def ratios_out_of_range(
    found: Mapping[str, Any], stored: Mapping[str, Any] | None
) -> Iterator[str]:
    """Yield a line for each comparison whose ratio is not near the stored quartiles.

    Args:
        found: a report that was made now.
        stored: the stored one; None if there is none.
    """
    known = {
        (part, each["name"], each["capacity"]): each
        for part, of in ({} if stored is None else stored["parts"]).items()
        for each in of["results"]
    }
    for part, of in found["parts"].items():
        for each in of["results"]:
            name, ratio = f"{each['name']} at {each['capacity']:,}", each["ratio"]
            old = known.get((part, each["name"], each["capacity"]))
            if old is None:
                yield f"{name}: {ratio:.3g}, not measured before"
            elif not old["low"] / SLACK <= ratio <= old["high"] * SLACK:
                yield f"{name}: {ratio:.3g}, stored {old['low']:.3g} to {old['high']:.3g}"


def learned_out_of_range(
    found: Mapping[str, Any], stored: Mapping[str, Any] | None
) -> Iterator[str]:
    """Yield a line for each figure of a run that is far from those of the stored seeds.

    Args:
        found: a report that was made now.
        stored: the stored one; None if there is none.
    """
    if stored is None:
        yield "not measured before"
        return
    for key, value in found["results"][0]["figures"].items():
        old = [each["figures"][key] for each in stored["results"] if key in each["figures"]]
        if not old:
            yield f"{key}: {value:.4g}, not measured before"
            continue
        low, high = min(old), max(old)
        if not low - (high - low) <= value <= high + (high - low):
            yield f"{key}: {value:.4g}, stored {low:.4g} to {high:.4g}"


def _run(name: str, *words: str) -> None:
    begun = time.monotonic()
    print(f"python -m benchmarks.{name} {' '.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *words], check=True)
    print(f"{time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
