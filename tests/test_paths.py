"""The paths in docs/architecture.md are those that calls take, and as long as it says."""

import re

import pytest

from tools.paths import PAGE, WORK, calls_of, lengths, stated

TEXT = PAGE.read_text()
PATHS = {
    title: re.findall(r"^\d+\. `(\w+)`, (\S+\.py): ", text, re.MULTILINE)
    for title, text in re.findall(r"^### (.*)\n((?:(?!#).*\n)*)", TEXT, re.MULTILINE)
}


@pytest.mark.parametrize("title", PATHS)
def test_calls_take_the_path_that_is_described(title):
    calls = calls_of(title)
    left = iter([(each.name, each.file) for each in calls])
    missed = next((step for step in PATHS[title] if step not in left), None)  # in this order
    assert missed is None, f"{missed} is not called, or before the step above it"
    for came, told in zip(lengths(calls), stated(TEXT)[title], strict=True):
        assert 0.8 * told <= came <= 1.1 * told, "run python tools/paths.py --write"


def test_paths_have_at_most_ten_steps():
    assert PATHS.keys() == WORK.keys() == stated(TEXT).keys()
    assert all(5 <= len(steps) <= 10 for steps in PATHS.values())
