"""Run torchgfn's own tests of replay buffers with its buffers and manager replaced by ours.

``python tools/torchgfn_tests.py CHECKOUT/testing/test_replay_buffer.py [pytest options]`` changes
the imports, takes the mark away that skips the test of saving as broken, and runs the file.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

THEIRS = re.compile(r"^from gfn\.containers\.replay_buffer(_manager)? import", re.MULTILINE)
OURS = "from gfn_rb.interop.torchgfn import"
SKIP = '@pytest.mark.skip(reason="Save is broken")'


def main(path: str, *options: str) -> int:
    """Run the tests; return pytest's exit status.

    Args:
        path: torchgfn's ``test_replay_buffer.py``.
        *options: for pytest.
    """
    source = Path(path).read_text()
    assert THEIRS.search(source), f"{path} does not import torchgfn's replay buffers"
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder) / "test_replay_buffer.py"
        changed.write_text(THEIRS.sub(OURS, source).replace(SKIP, ""))
        command = [sys.executable, "-m", "pytest", "-q", "--rootdir", folder, str(changed)]
        return subprocess.run([*command, *options], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
