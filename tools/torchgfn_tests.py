"""Run torchgfn's own tests with its buffers, manager and samplers replaced by this package's.

``python tools/torchgfn_tests.py CHECKOUT/testing [pytest options]``, or a file of that folder, runs
them twice, with torchgfn's parts and with ours. The imports of the tests are changed, and in
torchgfn the samplers of its GFlowNets. The mark that skips the test of saving as broken is taken
away. Put ``CHECKOUT/src`` on PYTHONPATH if another torchgfn is installed.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from other_tests import Outcomes, compare, outcomes_of

THEIRS = re.compile(
    r"^( *)from gfn\.(?:containers\.replay_buffer(?:_manager)?|samplers) import", re.MULTILINE
)
OURS = r"\1from gfn_rb.interop.torchgfn import"
SKIP = '@pytest.mark.skip(reason="Save is broken")'


def swap(tests: Path) -> None:
    """Put our parts in place of torchgfn's, in a folder of tests and in its GFlowNets."""
    import gfn.gflownet
    import gfn.samplers
    import gfn.utils.training

    from gfn_rb.interop import torchgfn

    for file in tests.rglob("*.py"):
        file.write_text(THEIRS.sub(OURS, file.read_text()))
    for name, module in list(sys.modules.items()):
        if name.startswith("gfn.gflownet.") and hasattr(module, "Sampler"):
            setattr(module, "Sampler", torchgfn.Sampler)  # noqa: B010
    setattr(gfn.utils.training, "ReplayBuffer", torchgfn.ReplayBuffer)  # noqa: B010


def run(ours: bool, arguments: Sequence[str]) -> Outcomes:
    """Run a copy of the tests with the parts of one of the two."""
    given = Path(arguments[0])
    with tempfile.TemporaryDirectory() as folder:
        tests = Path(folder, "testing")
        shutil.copytree(given if given.is_dir() else given.parent, tests)
        for file in tests.rglob("*.py"):
            file.write_text(file.read_text().replace(SKIP, ""))
        if ours:
            swap(tests)
        chosen = tests if given.is_dir() else tests / given.name
        return outcomes_of([str(chosen), "--rootdir", str(tests), *arguments[1:]])


if __name__ == "__main__":
    compare("torchgfn", run, sys.argv[1:])
