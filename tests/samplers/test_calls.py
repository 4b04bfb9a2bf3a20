"""The calls that a draw makes."""

import sys
from pathlib import Path

import torch
from factories import rows

import gfn_rb

ROOT = Path(gfn_rb.__file__).parent


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
