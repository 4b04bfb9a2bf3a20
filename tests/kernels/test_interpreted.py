"""All loops give the same, bit for bit, compiled and interpreted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HISTORY = """
import hashlib, sys, warnings
sys.path.append("tests")
import numpy as np, torch
from gfn_rb.kernels.weights import Weights
from gfn_rb.numerics.rank_laws import GeometricLaw, HarmonicLaw, RankedDistribution, StepLaw
from tests.kernels import test_groups, test_objects, test_order

warnings.simplefilter("error")
print(test_objects.run(1, 30, 2, 20, 5), test_objects.run(2, 10, 1, 20, 10))
print(test_groups.run(1, 50, 5, 9), test_groups.run(2, 50, 50, 9))
print(test_order.run(3, 300, 40, 5, np.array([0.0, 1.0, 2.5])))
print(test_order.run(4, 300, 10, 300, np.array([0.0, 1.5])))
warnings.simplefilter("ignore")  # scores of rows near the largest float overflow
digest, generator = hashlib.sha256(), torch.Generator().manual_seed(0)

def note(*tensors):
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            digest.update(tensor.numpy().tobytes())

tree = Weights(700)
for scale in (1.0, 50.0, 1e4, 1e308):
    values = torch.randn(700, generator=generator, dtype=torch.float64).clamp(-1, 1) * scale
    values[torch.randint(700, (99,), generator=generator)] = -torch.inf
    tree.assign(values)
    for n in (1, 30, 600, 700):
        row = torch.randint(700, (n,), generator=generator)
        tree.update(row, values[row.flip(0)])
        note(*tree.draw(n, generator), *tree.draw_distinct(n, generator))
        note(*tree.perturbed(n, generator), tree.log_total, torch.from_numpy(tree._mass))
for law in (HarmonicLaw(9000, 3.0), StepLaw(9000, 90, 0.7), GeometricLaw(9000, 8000, 0.999)):
    key = torch.randn(9000, generator=generator)
    ranked = RankedDistribution(9000, lambda n: law)
    ranked.assign(key)
    note(*ranked.draw(500, generator), *ranked.draw_distinct(500, generator))
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_loops_give_the_same_compiled_and_interpreted():
    command, cwd = [sys.executable, "-c", HISTORY], Path(__file__).parents[2]
    compiled, interpreted = (
        subprocess.check_output(command, env={**os.environ, "NUMBA_DISABLE_JIT": disable}, cwd=cwd)
        for disable in "01"
    )
    assert compiled == interpreted != b""
