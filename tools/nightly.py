"""Run the tests of buffers on several versions of TorchRL, and print them as a table.

``python tools/nightly.py PYTHON [PYTHON ...]`` takes interpreters of environments in which torch,
torchrl (or torchrl-nightly), tensordict and the packages of the extra ``test`` are installed. The
table is that of docs/versions.md. Its exit status is 1 if a test failed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("writers", "samplers", "buffers", "containers", "checkpoint")
VERSIONS = """
import json
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in ("torch", "torchrl", "torchrl-nightly", "tensordict", "tensordict-nightly"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def row(python: str) -> tuple[str, bool]:
    """Run the short tests in one environment; return its row of the table, and whether all passed.

    Args:
        python: path of an interpreter.
    """
    told = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True)
    found = json.loads(told.stdout)
    tests = [f"tests/{folder}" for folder in FOLDERS]
    command = [python, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False
    )
    failed = re.findall(r"^FAILED (\S+)", ran.stdout, re.MULTILINE)
    result = "all pass" if ran.returncode == 0 else f"{len(failed)} fail: {', '.join(failed)}"
    if ran.returncode not in (0, 1):
        result = f"pytest ended with status {ran.returncode}"
    torchrl = found.get("torchrl") or f"nightly of {found.get('torchrl-nightly', 'none')}"
    tensordict = found.get("tensordict") or f"nightly of {found.get('tensordict-nightly', 'none')}"
    return f"| {torchrl} | {tensordict} | {found['torch']} | {result} |", ran.returncode == 0


def main(*pythons: str) -> int:
    """Print the table; return 1 if a test failed anywhere."""
    print("| torchrl | tensordict | torch | result |\n| --- | --- | --- | --- |", flush=True)
    rows = []
    for python in pythons:
        rows.append(row(python))
        print(rows[-1][0], flush=True)
    return int(not all(passed for _, passed in rows))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
