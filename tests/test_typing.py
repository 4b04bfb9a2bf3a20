"""Public types, as mypy and pyright read them in a program that uses the package."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CODE = Path(__file__).parent / "user_code.py"
LINES = dict(enumerate(CODE.read_text().splitlines(), 1))
OPTIONS = "[mypy]\nstrict = true\n[mypy-tensordict.*]\nignore_missing_imports = true\n"

pytestmark = pytest.mark.slow


def marked(but: str = "-") -> list[int]:
    return [n for n, line in LINES.items() if "  # wrong" in line and but not in line]


def checked(folder: Path, *command: object) -> str:
    """Run a checker with the package of this checkout, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_mypy_finds_the_wrong_lines_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("MYPYPATH", str(CODE.parents[1]))
    (tmp_path / "mypy.ini").write_text(OPTIONS)
    printed = checked(tmp_path, "mypy", "--config-file=mypy.ini", "--no-pretty", CODE)
    found = [line.split(":", 3) for line in printed.splitlines() if ": error:" in line]
    assert {Path(path).name for path, *_ in found} == {CODE.name}, printed
    assert [int(at) for _, at, *_ in found] == marked(but="which mypy does not see"), printed


def test_pyright_finds_the_wrong_lines_alone(tmp_path):
    pytest.importorskip("basedpyright")  # pyright in a wheel, which needs no network
    (tmp_path / CODE.name).write_text(CODE.read_text())
    options = {"typeCheckingMode": "standard", "extraPaths": [str(CODE.parents[1])]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options))
    printed = checked(
        tmp_path, "basedpyright", "--outputjson", "--pythonpath", sys.executable
    )  # or it takes the first Python of the path
    found = json.loads(printed)["generalDiagnostics"]
    wrong = [each["range"]["start"]["line"] + 1 for each in found if each["severity"] == "error"]
    assert wrong == marked(), printed
