"""Machine code of loops on disk, and the only place that touches private names of numba.

numba's own cache looks at a loop's own file alone, so that a change of a loop that it calls leaves
old machine code in use; a file that is damaged, or that cannot be read or written, ends the call.
Here the name of a folder is a digest of all that decides on machine code: all files of this
package, the versions, and the processor. Each file of the folder has one loop for one signature,
starts with a checksum, and is published by one rename. Processes that write the same file write
the same content. Whatever cannot be read is compiled, and what cannot be written is not kept.

Read in numba 0.61.0 and 0.68.1: ``Dispatcher.compile``, by which calls and callers compile;
``Dispatcher._cache``, of which it calls ``load_overload`` and ``save_overload`` under the lock of
the compiler; ``CompileResult._reduce`` and ``_rebuild``; ``serialize.dumps``; ``magic_tuple`` of
the code generator.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
import xxhash
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.event import Event, Listener, register
from numba.core.serialize import dumps

_CHECKSUM = 16  # bytes of a file before its content
_PREFIX = "gfn_rb-"  # of folders
_SECONDS_KEPT = 90 * 24 * 3600.0  # of folders that no process uses
# Options of numba that change machine code.
_OPTIONS = "OPT", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "LOOP_VECTORIZE", "SLP_VECTORIZE"
_log = logging.getLogger("gfn_rb.kernels")
_logged = set[str]()  # kinds of lines
_used = set[Path]()  # folders


def keep_compiled(dispatcher: Any) -> None:
    """Have the machine code of a loop outlive this process, and no interrupt end its making."""
    dispatcher._cache = LoopCache(dispatcher.py_func)
    dispatcher.compile = _uninterrupted(dispatcher.compile)


def _uninterrupted(compile_: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Have another thread compile, because an interrupt amid that may leave numba unusable.

    Python interrupts the main thread alone. The other one then goes on until it is done.
    """

    def compile_beside(signature: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return compile_(signature)
        result: Future[Any] = Future()

        def work() -> None:
            try:
                result.set_result(compile_(signature))
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=work, name="gfn_rb compiler").start()
        return result.result()

    return compile_beside


def _digest_of_sources() -> str | None:
    """Return a digest of the files of this package, None where there are none to read."""
    digest, n = xxhash.xxh3_128(), 0
    with suppress(OSError, ImportError):
        for each in sorted(resources.files(__package__).iterdir(), key=lambda file: file.name):
            if each.name.endswith((".py", ".pyc")):
                digest.update(each.name.encode())
                digest.update(each.read_bytes())
                n += 1
    return digest.hexdigest() if n else None


# Of the files that this process imports.
_SOURCES = _digest_of_sources()


def _folders() -> list[Path]:
    """Return where folders of machine code may be, those to be preferred first."""
    if numba.config.CACHE_DIR:
        return [Path(numba.config.CACHE_DIR)]
    beside, home = Path(__file__).parent / "__pycache__", os.path.expanduser("~")
    of_user = os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    return [beside, Path(of_user, "gfn_rb")] if os.path.isabs(of_user) else [beside]


def _name_of_folder(codegen: Any) -> str:
    """Return a digest of what decides on machine code."""
    options = [getattr(numba.config, name, None) for name in _OPTIONS]
    versions = numba.__version__, llvmlite.__version__, np.__version__, sys.version
    stamp = repr((_SOURCES, versions, options, codegen.magic_tuple()))
    return _PREFIX + xxhash.xxh3_128_hexdigest(stamp.encode())


class LoopCache:
    """Cache of the machine code of one loop, with the methods that numba calls.

    Args:
        loop: the function that is compiled.
    """

    cache_path = None  # of numba's statistics

    def __init__(self, loop: Callable[..., Any]) -> None:
        self._loop = loop

    def load_overload(self, signature: Any, target_context: Any) -> CompileResult | None:
        """Return the compiled loop, None where no file has it whole."""
        target_context.refresh()
        for path in self._paths(signature, target_context.codegen()):
            try:
                return _read(path, target_context)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except Exception as error:
                _log_once("read", f"cannot use {path}, and compiles anew: {error!r}")
        return None

    def save_overload(self, signature: Any, result: CompileResult) -> None:
        """Write a compiled loop into the first folder that can be written to."""
        # A process compiles what it has imported. Files may have changed since.
        if result.library.has_dynamic_globals or _digest_of_sources() != _SOURCES:
            return
        content, errors = dumps(result._reduce()), []
        for path in self._paths(signature, result.codegen):
            try:
                _write(path, xxhash.xxh3_128_digest(content) + content)
                return
            except OSError as error:
                errors.append(error)
        _log_once(
            "write",
            f"cannot keep compiled loops, so that each process compiles them: {errors}. Set "
            "NUMBA_CACHE_DIR to a folder that can be written to",
        )

    def _paths(self, signature: Any, codegen: Any) -> list[Path]:
        """Return where the loop may be for a signature."""
        if _SOURCES is None:
            return []
        loop = self._loop
        cells = [cell.cell_contents for cell in loop.__closure__ or ()]
        key = str(signature).encode() + loop.__code__.co_code + dumps(cells)
        name = f"{loop.__module__.rpartition('.')[2]}.{loop.__name__}"
        folder, file = _name_of_folder(codegen), f"{name}-{xxhash.xxh3_64_hexdigest(key)}"
        return [each / folder / file for each in _folders()]


def _read(path: Path, target_context: Any) -> CompileResult:
    content = path.read_bytes()
    checksum, content = content[:_CHECKSUM], content[_CHECKSUM:]
    if checksum != xxhash.xxh3_128_digest(content):
        raise ValueError(f"it is damaged, at {len(content)} bytes")
    if path.parent not in _used:
        _used.add(path.parent)
        with suppress(OSError):
            os.utime(path.parent)  # or it would be removed as unused
    return CompileResult._rebuild(target_context, *pickle.loads(content))  # noqa: S301


def _write(path: Path, content: bytes) -> None:
    """Write a file that others see in whole or not at all."""
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_old_folders(path.parent.parent)
    aside = path.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        aside.write_bytes(content)
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise


def _drop_old_folders(root: Path) -> None:
    """Remove folders that no process has used for long."""
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_mtime < time.time() - _SECONDS_KEPT:
                shutil.rmtree(folder)


def _log_once(kind: str, line: str) -> None:
    """Log a line, unless this process has logged one of its kind."""
    if kind not in _logged:
        _logged.add(kind)
        _log.warning(line)


def _announce(line: str) -> None:
    """Log a line once. pytest hides what is logged in tests that pass, and shows warnings."""
    is_shown = "compile" not in _logged and _log.isEnabledFor(logging.WARNING)
    if is_shown and "pytest" in sys.modules:
        with suppress(UserWarning):  # where a filter makes it an error
            warnings.warn(line, stacklevel=2)
    _log_once("compile", line)


class _Announcement(Listener):
    """Says once per process that loops are compiled, which takes some seconds."""

    def on_start(self, event: Event) -> None:
        """Log the first compilation of a loop of this package."""
        if event.data["dispatcher"].py_func.__module__.startswith(f"{__package__}."):
            _announce("compiling loops of gfn_rb.kernels, once per machine and version (20 s)")

    def on_end(self, event: Event) -> None:
        """Do nothing."""


register("numba:compile", _Announcement())
# A child that is forked while another thread compiles has none that would release the lock.
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)
