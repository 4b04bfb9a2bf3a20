from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from gfn_rb.envs.scored_sequences import TFBIND8_PATH, load_table
from gfn_rb.errors import ArgumentError
from tools.tfbind8_table import read_scores, write_table

COMPLEMENT = str.maketrans("ACGT", "TGCA")


def rows_of(score_of_pair: dict[tuple[str, str], str]) -> str:
    lines = [f"{a}\t{b}\t{score}\t1.0\t2.0" for (a, b), score in score_of_pair.items()]
    return "\n".join(["8-mer\t8-mer\tE-score\tMedian\tZ-score", *lines, ""])


def pairs() -> dict[tuple[str, str], str]:
    every = ["".join(letters) for letters in product("ACGT", repeat=8)]
    strands = [(text, text.translate(COMPLEMENT)[::-1]) for text in every]
    first = [pair for pair in strands if pair[0] <= pair[1]]
    return {pair: f"{i / 1e5 - 0.1:.5f}" for i, pair in enumerate(first)}


def test_shipped_table_holds_known_values() -> None:
    # the original's first rows: AAAAAAAA 0.03000, AAAAAAAC -0.12351, AAAAAAAG -0.04566
    scores = load_table(TFBIND8_PATH)
    assert scores[:3].tolist() == [3000, -12351, -4566]
    assert scores[-1] == 3000  # TTTTTTTT, the other strand of AAAAAAAA
    assert scores[int("23333333", 4)] == -12351  # GTTTTTTT, the other strand of AAAAAAAC
    assert (int(scores.min()), int(scores.max())) == (-47907, 49105)
    assert TFBIND8_PATH.stat().st_size < 300_000


def test_reading_and_writing_a_table(tmp_path: Path) -> None:
    source, target = tmp_path / "source.txt", tmp_path / "table.npz"
    source.write_text(rows_of(pairs()))
    scores = read_scores(source)
    assert scores[:2].tolist() == [-10000, -9999]
    assert scores[-1] == -10000  # TTTTTTTT
    write_table(source, target)
    assert load_table(target).equal(scores.double())


def test_missing_and_double_scores_are_refused(tmp_path: Path) -> None:
    source, scores = tmp_path / "source.txt", pairs()
    source.write_text(rows_of(scores) + "AAAAAAAA\tTTTTTTTT\t0.5\t1.0\t2.0\n")
    with pytest.raises(ArgumentError, match="AAAAAAAA one score, got two"):
        read_scores(source)
    del scores["AAAAAAAC", "GTTTTTTT"]
    source.write_text(rows_of(scores))
    with pytest.raises(ArgumentError, match="got none for AAAAAAAC"):
        read_scores(source)
