"""The number of calls of the package's own Python functions in a training step."""

import sys
from pathlib import Path

import pytest

import gfn_rb
from gfn_rb.training import TFBind8Config, Trainer

# Per step. Trajectories to terminating states are sampled backward.
LIMITS = {"trajectories": 680, "terminal": 860}
PACKAGE = str(Path(gfn_rb.__file__).parent)


@pytest.mark.parametrize("replay", LIMITS)
def test_a_step_makes_few_calls(replay):
    trainer = Trainer(TFBind8Config(seed=1, replay=replay, replay_ratio=1.0))
    for _ in range(30):  # until nothing is set up any more
        trainer.step()
    n_calls = 0

    def count(frame, event, _):
        nonlocal n_calls
        n_calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(count)
    try:
        trainer.step()
    finally:
        sys.setprofile(None)
    assert 100 < n_calls <= LIMITS[replay]
