"""Goodness-of-fit tests shared by the samplers' tests."""

import itertools
import math

import numpy as np
from scipy.stats import chi2


def chi_square_p(counts, probabilities):
    """Return the p-value of observed counts, pooling cells that are expected fewer than 5 times.

    A count in a cell of probability zero is impossible, and makes the p-value 0.
    """
    counts = np.asarray(counts, float)
    expected = np.asarray(probabilities, float) * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    keep = expected > 0
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    return float(chi2.sf(statistic, max(int(keep.sum()) - 1, 1)))


def successive(p, n=2):
    """The law of n draws without replacement, in order: the probability of each tuple of rows."""
    return {
        rows: math.prod(p[rows[i]] / (1 - sum(p[list(rows[:i])])) for i in range(n))
        for rows in itertools.permutations(np.flatnonzero(p).tolist(), n)
    }


def has_successive_law(draw, p, n=2, times=1500):
    """Whether tuples of n distinct rows have the law of draws one after another.

    Args:
        draw: returns the rows of one draw, a list.
        p: the probability of each row.
    """
    law = successive(np.asarray(p, float), n)
    counts = dict.fromkeys(law, 0)
    for _ in range(times):
        counts[tuple(draw())] += 1
    return chi_square_p(list(counts.values()), list(law.values())) > 1e-3
