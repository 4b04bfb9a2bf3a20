"""Budgets: the calls that a draw makes, and the lines that a sampler loads."""

import subprocess
import sys
from pathlib import Path

import torch
from factories import rows

import gfn_rb

ROOT = Path(gfn_rb.__file__).parent
LOADED = """
import sys
from gfn_rb.samplers import SoftmaxRewardSampler
print(*(m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "gfn_rb"))
"""


def test_a_draw_makes_few_calls():
    rb = gfn_rb.reward_prioritized_buffer(1000, batch_size=16)
    rb.extend(rows(torch.randn(500, generator=torch.Generator().manual_seed(0))))
    for _ in range(3):
        rb.sample()
    calls = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        rb.sample()
    finally:
        sys.setprofile(None)
    assert 10 < len(calls) <= 30, calls


def test_a_sampler_loads_few_lines():
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = sum(len(Path(path).read_text().splitlines()) for path in done.stdout.split())
    assert 1000 < lines <= 3500
