"""The cache of compiled loops, with a small package in place of gfn_rb.kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import gfn_rb.kernels.cache

LOOPS = """
import numba
from toy.cache import keep_compiled
from toy.other import SHIFT, shifted

def compiled(loop):
    dispatcher = numba.njit(nogil=True)(loop)
    keep_compiled(dispatcher)
    return dispatcher

@compiled
def total(values):
    result = 0
    for value in values:
        result += shifted(value)
    return result
"""
OTHER = """
import numba
SHIFT = 1

@numba.njit
def shifted(value):
    return value + SHIFT
"""
CALL = "import numpy as np; from toy.loops import total; print(total(np.arange(4)))"


class Package:
    """Package ``toy`` in a folder, whose loops are cached in another."""

    def __init__(self, root: Path) -> None:
        self.folder, self.cache = root / "toy", root / "cache"
        self.folder.mkdir()
        shutil.copy(gfn_rb.kernels.cache.__file__, self.folder)
        self.write(__init__="", loops=LOOPS, other=OTHER)

    def write(self, **sources: str) -> None:
        for name, source in sources.items():
            (self.folder / f"{name}.py").write_text(source)

    def start(self, code: str = CALL, **env: str) -> subprocess.Popen[str]:
        """Start a process, which prints what it returns, and logs to the same stream."""
        env = {"PYTHONPATH": str(self.folder.parent), "NUMBA_CACHE_DIR": str(self.cache), **env}
        env["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
        env = {name: value for name, value in {**os.environ, **env}.items() if value}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([sys.executable, "-c", code], env=env, **pipes)

    def run(self, code: str = CALL, **env: str) -> tuple[str, list[str]]:
        """Return the last line that a process prints, and the others."""
        output, _ = self.start(code, **env).communicate(timeout=500)
        *logged, result = output.splitlines()
        return result, logged

    @property
    def files(self) -> list[Path]:
        return sorted(self.cache.glob("gfn_rb-*/*"))


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return Package(tmp_path)


def is_compiling(lines: list[str]) -> bool:
    return len(lines) == 1 and lines[0].startswith("compiling loops of gfn_rb.kernels")


def test_a_loop_is_compiled_once_and_anew_after_a_change_of_another_file(package: Package) -> None:
    result, logged = package.run()
    assert result == "10"
    assert is_compiling(logged)
    (file,) = package.files
    assert file.name.startswith("loops.total-")
    assert package.run() == ("10", [])
    package.write(other=OTHER.replace("SHIFT = 1", "SHIFT = 2"))
    result, logged = package.run()
    assert result == "14"
    assert is_compiling(logged)
    assert len({file.parent for file in package.files}) == 2
    package.write(other=OTHER)
    assert package.run() == ("10", [])  # the other one is still there


TESTS = """
import numpy as np
from toy.loops import total

def test_total():
    assert total(np.arange(4)) == 10

def test_total_again():
    assert total(np.arange(4)) == 10
"""


@pytest.mark.slow
@pytest.mark.parametrize(("option", "times"), [("default", 1), ("error", 0)])
def test_tests_in_which_loops_are_compiled_say_so_and_pass(package, option, times) -> None:
    (package.folder / "test_toy.py").write_text(TESTS)
    words = ["-q", "-p", "no:cacheprovider", f"-W{option}", str(package.folder / "test_toy.py")]
    code = f"import pytest; pytest.main({words}); print('done')"
    _, lines = package.run(code)
    assert any(line.startswith("2 passed") for line in lines)
    said = "UserWarning: compiling loops of gfn_rb.kernels, once per machine"
    assert sum(said in line for line in lines) == times
    assert all(said not in line for line in package.run(code)[1])  # they are kept


def test_logging_gets_the_line(package: Package) -> None:
    package.run(
        f"import logging; logging.basicConfig(filename={str(package.folder / 'log')!r}); {CALL}"
    )
    (line,) = (package.folder / "log").read_text().splitlines()
    assert line.startswith("WARNING:gfn_rb.kernels:compiling loops of gfn_rb.kernels")


def with_checksum(content: bytes) -> bytes:
    return gfn_rb.kernels.cache.xxhash.xxh3_128_digest(content) + content


DAMAGE = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "flipped": lambda content: content[:999] + bytes([content[999] ^ 1]) + content[1000:],
    "no pickle": lambda content: with_checksum(b"nothing"),
    "another pickle": lambda content: with_checksum(b"\x80\x04]\x94."),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_compiled_anew(package: Package, kind: str) -> None:
    package.run()
    (file,) = package.files
    content = file.read_bytes()
    file.write_bytes(DAMAGE[kind](content))
    result, logged = package.run()
    assert result == "10"
    (line,) = (line for line in logged if str(file) in line)
    assert line.startswith("cannot use ")
    assert package.run() == ("10", [])
    assert [each.name for each in package.files] == [file.name]


@pytest.mark.slow
def test_a_file_that_can_be_neither_read_nor_written_is_compiled_each_time(
    package: Package,
) -> None:
    package.run()
    (file,) = package.files
    file.unlink()
    file.mkdir()  # permissions do not keep root out
    for _ in range(2):
        result, logged = package.run()
        assert result == "10"
        assert [line.split()[:2] for line in logged] == [
            ["cannot", "use"], ["compiling", "loops"], ["cannot", "keep"]
        ]  # fmt: skip
    assert list(package.files) == [file]


@pytest.mark.slow
@pytest.mark.parametrize(
    "before",
    [
        "",  # the folder is a file
        "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (999, 999));",  # as on a full disk
    ],
)
def test_without_a_folder_that_can_be_written_to_loops_run(package: Package, before: str) -> None:
    if not before:
        package.cache.write_text("")
    result, logged = package.run(before + CALL)
    assert result == "10"
    assert logged[1:] == [line for line in logged if line.startswith("cannot keep compiled loops")]
    assert len(logged) == 2
    assert package.files == []


@pytest.mark.slow
def test_loops_of_a_zip_file_without_a_home_run(package: Package) -> None:
    archive = package.folder.parent / "toy.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        for path in package.folder.glob("*.py"):
            stream.write(path, f"toy/{path.name}")
    env = {"PYTHONPATH": str(archive), "NUMBA_CACHE_DIR": ""}
    result, logged = package.run(XDG_CACHE_HOME="/dev/null/none", **env)
    assert result == "10"
    assert len(logged) == 2
    home = package.folder.parent / "home"
    result, logged = package.run(XDG_CACHE_HOME=str(home), **env)
    assert result == "10"
    assert is_compiling(logged)
    assert len(list(home.glob("gfn_rb/gfn_rb-*/loops.total-*"))) == 1
    assert package.run(XDG_CACHE_HOME=str(home), **env) == ("10", [])


@pytest.fixture
def full_home(tmp_path: Path) -> Iterator[Path]:
    """A home on a small and full file system of its own."""
    home = tmp_path / "home"
    home.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(home)]
    if shutil.which("mount") is None or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        with suppress(OSError), (home / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
        yield home
    finally:
        subprocess.run(["umount", str(home)], check=True)


@pytest.mark.slow
def test_a_full_home_and_a_package_that_cannot_be_written_to_are_no_error(
    package: Package, full_home: Path
) -> None:
    subprocess.run(["mount", "--bind", "-r", package.folder, package.folder], check=True)
    try:
        for _ in range(2):
            env = {"NUMBA_CACHE_DIR": "", "XDG_CACHE_HOME": "", "PYTHONDONTWRITEBYTECODE": "1"}
            result, logged = package.run(HOME=str(full_home), **env)
            assert result == "10"
            assert [line.split()[:2] for line in logged] == [
                ["compiling", "loops"], ["cannot", "keep"]
            ]  # fmt: skip
            assert "Read-only file system" in logged[1]
            assert "No space left on device" in logged[1]
    finally:
        subprocess.run(["umount", package.folder], check=True)


@pytest.mark.slow
def test_files_are_beside_the_package_unless_told_otherwise(package: Package) -> None:
    package.run(NUMBA_CACHE_DIR="")
    assert len(list(package.folder.glob("__pycache__/gfn_rb-*/loops.total-*"))) == 1
    assert package.run(NUMBA_CACHE_DIR="") == ("10", [])


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"NUMBA_CPU_NAME": "generic"}, {"NUMBA_BOUNDSCHECK": "1"}])
def test_processors_and_options_have_folders_of_their_own(
    package: Package, other: dict[str, str]
) -> None:
    package.run()
    assert is_compiling(package.run(**other)[1])
    assert package.run() == package.run(**other) == ("10", [])
    assert len({file.parent for file in package.files}) == 2


@pytest.mark.slow
def test_processes_that_start_at_once_fill_one_cache(package: Package) -> None:
    for _ in range(20):
        shutil.rmtree(package.cache, ignore_errors=True)
        both = [package.start() for _ in range(2)]
        for each in both:
            *logged, result = each.communicate(timeout=500)[0].splitlines()
            assert result == "10"
            assert logged == [] or is_compiling(logged)
        assert len(package.files) == 1
    assert package.run() == ("10", [])


@pytest.mark.slow
def test_what_changes_after_the_import_is_not_kept(package: Package) -> None:
    change = f"open({str(package.folder / 'other.py')!r}, 'a').write('# changed');"
    imports = "import numpy as np; from toy.loops import total;"
    assert package.run(imports + change + "print(total(np.arange(4)))")[0] == "10"
    assert package.files == []


@pytest.mark.slow
def test_folders_that_nobody_uses_are_removed(package: Package) -> None:
    package.run()
    (used,) = package.files
    for folder, n_days in (("gfn_rb-old", 91), ("gfn_rb-new", 89), ("mine", 999)):
        path = package.cache / folder
        path.mkdir()
        (path / "file").write_text("")
        os.utime(path, (0, used.stat().st_mtime - n_days * 86400))
    os.utime(used.parent, (0, 0))
    package.run()  # which uses it
    package.run(NUMBA_CPU_NAME="generic")
    names = {path.name for path in package.cache.iterdir()}
    assert names >= {"gfn_rb-new", "mine", used.parent.name}
    assert len(names) == 4


FORK = """
import os, signal, threading, time
import numpy as np
from toy import cache
from toy.loops import compiled, total

def loop_of(i):
    @compiled
    def loop(values):
        return (values + i).sum()
    return loop

for i in range(50):
    loop, start = loop_of(i), threading.Event()
    thread = threading.Thread(target=lambda: (start.set(), loop(np.arange(4))))
    thread.start()
    start.wait()
    time.sleep(i * 0.001)
    if (child := os.fork()) == 0:
        signal.alarm(20)
        os._exit(int(total(np.arange(i)) != np.arange(1, i + 1).sum()))
    assert os.waitpid(child, 0)[1] == 0, i
    thread.join()
print("done")
"""


@pytest.mark.slow
def test_a_child_forked_while_another_thread_compiles_can_compile(package: Package) -> None:
    assert package.run(FORK, NUMBA_CACHE_DIR="/dev/null/none")[0] == "done"


INTERRUPT = """
import signal
import numpy as np
from numba.core.event import Listener, register
from toy.loops import total

class Interrupt(Listener):
    def on_start(self, event):
        signal.raise_signal(signal.SIGINT)
    def on_end(self, event):
        pass

register("numba:compile", Interrupt())
try:
    total(np.arange(4))
except KeyboardInterrupt:
    from toy.cache import global_compiler_lock
    with global_compiler_lock:
        print("interrupted", len(total.overloads))
"""


INTERRUPTED_LOAD = """
import signal
import numpy as np
from toy import cache
from toy.loops import total

def interrupted(*args):
    signal.raise_signal(signal.SIGINT)
    return read(*args)

read, cache._read = cache._read, interrupted
try:
    total(np.arange(4))
except KeyboardInterrupt:
    cache._read = read
    print("interrupted", total(np.arange(4)))
"""


@pytest.mark.slow
def test_an_interrupt_while_a_loop_is_loaded_leaves_it_usable(package: Package) -> None:
    package.run()
    assert package.run(INTERRUPTED_LOAD) == ("interrupted 10", [])


@pytest.mark.slow
def test_an_interrupt_does_not_end_a_compilation_halfway(package: Package) -> None:
    assert package.run(INTERRUPT)[0] == "interrupted 1"
    assert package.run() == ("10", [])
