"""The library works where the application is absent."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gfn_rb

PACKAGE = Path(gfn_rb.__file__).parent
TESTS = Path(__file__).parents[1]
APPLICATION = ("training", "__main__.py")
CHOSEN = ("writers", "samplers", "buffers", "envs/test_continuous.py", "envs/test_sequence.py")


@pytest.mark.slow
def test_the_library_passes_its_tests_without_the_application(tmp_path):
    without = shutil.ignore_patterns("__pycache__", *APPLICATION)
    shutil.copytree(PACKAGE, tmp_path / "gfn_rb", ignore=without)
    shutil.copytree(TESTS, tmp_path / "tests", ignore=without)
    shutil.copy(PACKAGE.parent / "pyproject.toml", tmp_path)
    assert not (tmp_path / "gfn_rb" / "training").exists()
    # An editable installation would find it elsewhere.
    blocked = 'import sys; sys.modules["gfn_rb.training"] = None'
    (tmp_path / "sitecustomize.py").write_text(blocked)

    def python(*words):
        return subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=900,
        )  # fmt: skip

    chosen = [f"tests/{each}" for each in CHOSEN]
    done = python("-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", *chosen)
    assert done.returncode == 0, done.stdout
    check = "import gfn_rb.envs, gfn_rb.losses, gfn_rb.remote, gfn_rb.interop.objectrl as last\n"
    check += f"assert last.__file__.startswith({str(tmp_path)!r})\nimport gfn_rb.training"
    stopped = "ModuleNotFoundError: import of gfn_rb.training halted"
    assert stopped in python("-c", check).stderr
