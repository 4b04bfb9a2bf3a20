"""Sequence logos: which letters the best objects have in each place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gfn_rb.envs import GFNEnv
from gfn_rb.envs.enumerable import EnumerableEnv
from gfn_rb.envs.sequence import SequenceEnv
from gfn_rb.shapes import Float64

N_BEST = 100
_MAX_PLACES, _MAX_LETTERS = 60, 26


class Logo(NamedTuple):
    """Letters by place.

    Attributes:
        n: number of sequences.
        letters: the alphabet.
        bits: information of each letter in each place; a column adds up to log2 of the number of
            letters, less the entropy of its letters (Schneider and Stephens 1990).
    """

    n: int
    letters: Sequence[str]
    bits: Float64[np.ndarray, "places letters"]


def read_logos(
    words: Sequence[str], env: GFNEnv | None, describe: Callable[[Any], Sequence[str]]
) -> dict[str, Logo]:
    """Return the logo of the best different objects, and of the best of all that ``env`` can list.

    Both count the same number of objects, and have the letters of all. Without sequences of one
    length, there are none.

    Args:
        words: objects in order of reward, lowest first.
        env: environment of the objects.
        describe: callable from states [n, *S] to a text for each.
    """
    separator = env.separator if isinstance(env, SequenceEnv) else ""
    if not words or not (isinstance(env, SequenceEnv) or all(map(str.isalpha, words))):
        return {}
    best = {"best rows": [*dict.fromkeys(reversed(words))][:N_BEST]}
    if isinstance(env, EnumerableEnv) and env.true_log_z is not None:
        order = env.target_log_prob().argsort(descending=True, stable=True)
        top = env.terminating_states()[order[: len(best["best rows"])]]
        best["best of all objects"] = [*describe(top)]
    split = {
        name: [each.split(separator) if separator else [*each] for each in texts]
        for name, texts in best.items()
    }
    lengths = {len(each) for rows in split.values() for each in rows}
    letters = sorted({letter for rows in split.values() for each in rows for letter in each})
    if len(lengths) > 1 or not 2 <= max(lengths) <= _MAX_PLACES or len(letters) > _MAX_LETTERS:
        return {}
    logos = {}
    for name, rows in split.items():
        share = (np.array(rows)[:, :, None] == np.array(letters)).mean(0)
        entropy = -(share * np.log2(share, where=share > 0, out=np.zeros_like(share))).sum(1)
        information = (np.log2(len(letters)) - entropy).clip(0)  # not -0.0 by rounding
        logos[name] = Logo(len(rows), letters, share * information[:, None])
    return logos
