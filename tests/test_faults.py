"""The page of faults names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_tests_of_faults_exist():
    page = (ROOT / "docs" / "faults.md").read_text()
    named = re.findall(r"`(\w[\w/]*/test_\w+\.py)(?:::(\w+))?`", page)
    rows = [line for line in page.splitlines() if line.startswith("| ")][2:]
    assert len(named) == len(rows)
    for file, function in named:
        source = (ROOT / "tests" / file).read_text()
        assert f"def {function or 'test_'}" in source, (file, function)
