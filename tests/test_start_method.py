"""An import of this package leaves multiprocessing's start method as it was."""

import os
import signal
import subprocess
import sys

import pytest

# Without `if __name__ == "__main__"`: where processes are spawned, each runs this script again.
TORCHGFN_SCRIPT = """
print("run")
from gfn_rb.interop.torchgfn import ReplayBuffer
from gfn.gym import HyperGrid

env = HyperGrid(ndim=2, height=16, calculate_partition=True, store_all_states=True)
print(len(env.all_states.tensor), ReplayBuffer(env, capacity=10).capacity)
"""
STATED = """
import multiprocessing

{before}
from gfn_rb.buffers.presets import fifo_buffer

print(multiprocessing.get_start_method(allow_none=True))
"""


def printed(tmp_path, source: str) -> list[str]:
    """What a script prints that is run as a file, as users run theirs."""
    script = tmp_path / "script.py"
    script.write_text(source)
    # In a session of its own: the processes that it starts would survive a timeout otherwise.
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=60)[0].splitlines()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.mark.slow
def test_a_torchgfn_script_without_a_main_guard_runs_once(tmp_path) -> None:
    pytest.importorskip("gfn")
    assert printed(tmp_path, TORCHGFN_SCRIPT) == ["run", "256 10"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("", "None"),
        ("multiprocessing.set_start_method('spawn')", "spawn"),
        ("multiprocessing.set_start_method('fork')", "fork"),
        ("import torchrl", "spawn"),  # the user's own import, whose effect stays
    ],
)
def test_an_import_leaves_the_start_method(tmp_path, before: str, found: str) -> None:
    assert printed(tmp_path, STATED.format(before=before)) == [found]
