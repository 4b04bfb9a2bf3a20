"""Words that the Tab key completes, in an interactive shell of a terminal."""

from __future__ import annotations

import os
import pty
import select
import shutil
import time
from pathlib import Path

import pytest

from gfn_rb.training.cli import main

SHELLS = {"bash": ("--norc", "--noprofile", "-i"), "zsh": ("-f", "-i")}
# What is typed before the Tab key, and the words that the command then gets.
LINES = {
    "tra": "train",
    "train tfb": "train tfbind8",
    "train tfbind8 --checkpoint-e": "train tfbind8 --checkpoint-every",
    "train tfbind8 --draw quant": "train tfbind8 --draw quantile",
    "train tfbind8 --draw.top-f": "train tfbind8 --draw.top-fraction",
    "train tfbind8 --keep.cut": "train tfbind8 --keep.cutoff",
    "resume --transport gl": "resume --transport gloo",
    "inspect rb.c": "inspect rb.ckpt",
}


class Terminal:
    """A shell in a terminal of its own."""

    def __init__(self, shell: str, folder: Path) -> None:
        child, self._end = pty.fork()
        if child == 0:
            os.chdir(folder)
            kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
            more = {"TERM": "dumb", "COLUMNS": "200", "ZDOTDIR": str(folder)}
            os.execvpe(shell, [shell, *SHELLS[shell]], {**kept, **more})

    def until(self, text: str) -> None:
        """Wait until the terminal shows a text, at most 30 seconds."""
        seen, deadline = "", time.monotonic() + 30
        while text not in seen:
            assert select.select([self._end], [], [], deadline - time.monotonic())[0], repr(seen)
            seen += os.read(self._end, 65536).decode()

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def close(self) -> None:
        os.close(self._end)  # the shell gets SIGHUP


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_commands_environments_options_and_choices(shell, tmp_path, capfd) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["--print-completion"]) == 0
    (tmp_path / "script").write_text(capfd.readouterr().out)
    (tmp_path / "rb.ckpt").touch()
    terminal = Terminal(shell, tmp_path)
    try:
        terminal.type(". ./script; gfn-rb() { echo got: $* .; }; echo do''ne\n")
        terminal.until("done")
        for line, words in LINES.items():
            terminal.type(f"gfn-rb {line}\t")
            time.sleep(0.2)  # or the end of the line may be read with the key
            terminal.type("\n")
            terminal.until(f"got: {words} .\r")
    finally:
        terminal.close()
