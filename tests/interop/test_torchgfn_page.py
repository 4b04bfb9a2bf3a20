"""The code blocks of docs/torchgfn.md run, and print what they say."""

from pathlib import Path

import pytest
import torch
from test_readme import mismatches, parse

pytest.importorskip("gfn.gym")

PAGE = Path(__file__).parents[2] / "docs" / "torchgfn.md"


@pytest.mark.parametrize(
    "example", parse(PAGE.read_text()), ids=lambda e: f"line {e.blocks[0].line}"
)
def test_the_examples_run(example) -> None:
    with torch.random.fork_rng():
        assert not [*mismatches(example, PAGE.name)]
