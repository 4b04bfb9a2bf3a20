"""The command line: ``gfn-rb train``, ``resume``, ``inspect``, ``compare`` and ``recover``."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

from gfn_rb.errors import ArgumentError, GfnRbError
from gfn_rb.training.session import RefusedError
from gfn_rb.training.session.reading import printable
from gfn_rb.training.session.signals import Interrupt
from gfn_rb.transports.launch import end_process, launched

__all__ = ["main"]

_FAILURE, _USAGE, _INTERRUPTED = 1, 2, 130
_EXTRA = ("tyro", "tqdm")
_GRACE = 2.0  # seconds that the rank which failed has to tell the others and to print why


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. User errors are reported in one line on stderr.

    Args:
        arguments: the words after the program's name; None for ``sys.argv``.

    Returns:
        The exit status: 0, also if the reader of the output has gone; 1 if a command failed; 2 for
        a wrong argument; 130 and 143 after SIGINT and SIGTERM.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by a daemon
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    interrupt = Interrupt()
    if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
            interrupt.is_spent = True  # the process ends, where a traceback would be of no use
            if (colors := sys.modules.get("colorama.initialise")) is not None:  # numba's
                atexit.unregister(colors.reset_all)  # an escape code as the last line of a log
    except BrokenPipeError:  # the reader of the output, such as head, has closed it
        nothing = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):  # which the interpreter flushes at its end
            os.dup2(nothing, number)
        return 0


def _run(arguments: Sequence[str] | None) -> int:
    if list(sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        from importlib.metadata import version

        print(f"gfn-rb {version('gfn_rb')}")
        return 0
    os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")  # TorchRL reads it when it is imported
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    if launched() is not None:  # mpiexec gives each rank a terminal, wherever it writes to itself
        os.environ["TERM"] = "dumb"
    code = _attempt(arguments)
    if code in (_FAILURE, _INTERRUPTED):
        end_process(code)  # one of several ranks must not leave the others waiting
    return code


def _attempt(arguments: Sequence[str] | None) -> int:
    try:
        # Not above: what is missing here is reported in one line.
        from gfn_rb.training.cli.commands import parse

        return parse(arguments)()
    except BrokenPipeError:
        raise
    except RefusedError as error:  # another rank says why, unless the launcher ends it too early
        if launched() is not None:
            time.sleep(_GRACE)
        return error.code
    except ArgumentError as error:
        return _complain(str(error), _USAGE)
    except (GfnRbError, OSError) as error:
        return _complain(str(error), _FAILURE)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        hint = "pip install '.[train]' in a clone of gfn_rb"
        return _complain(f"{error.name} is not installed: {hint}", _FAILURE)
    except KeyboardInterrupt:
        return _complain("interrupted", _INTERRUPTED)
    except Exception as error:
        if isinstance(error, MemoryError) or "memory" in str(error):  # torch raises RuntimeError
            return _complain(f"not enough memory: {printable(error):.200}", _FAILURE)
        sys.excepthook(*sys.exc_info())
        end_process(_FAILURE)
        raise


def _complain(message: str, code: int) -> int:
    started = launched()
    rank = "" if started is None else f"rank {started.rank}: "
    lines = (printable(line) for line in message.splitlines())
    print(f"gfn-rb: {rank}{chr(10).join(lines)}", file=sys.stderr)
    return code
