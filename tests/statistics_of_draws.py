"""Goodness-of-fit tests shared by the samplers' tests."""

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
