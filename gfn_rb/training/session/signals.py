"""Signals that stop a run or a command."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupt:
    """Handler of SIGINT in a command: raises KeyboardInterrupt once, then ends the process.

    With Python's own handler, a second Ctrl-C while the first is being handled prints a traceback.
    """

    def __init__(self) -> None:
        self.is_spent = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, as ``signal.signal`` calls its handlers."""
        if self.is_spent:
            os._exit(128 + number)
        self.is_spent = True
        raise KeyboardInterrupt


class StopSignals:
    """Turns the first SIGINT or SIGTERM into a request to stop; a second one interrupts at once.

    A third ends the process, whatever it is doing.

    Attributes:
        received: the first signal; None before it.
        explain: returns the line that an interrupted run ends with; None for no line.
    """

    _signals = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.explain: Callable[[], str] | None = None
        self._is_second = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # others cannot handle signals
            self._before = {number: signal.signal(number, self._handle) for number in self._signals}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if (is_interrupted := self._is_second and kind is not None) and self.explain is not None:
            print(self.explain(), file=sys.stderr, flush=True)
            self.explain = None  # a signal in the meantime prints it twice rather than not at all
        for number, handler in self._before.items():
            if isinstance(handler, Interrupt) and self.received is not None:
                handler.is_spent = True  # the command is about to end
            signal.signal(number, handler)
        if is_interrupted and kind is not KeyboardInterrupt:  # C code may make another error of it
            raise KeyboardInterrupt

    def request(self) -> None:
        """Ask to stop as SIGTERM would."""
        self.received = self.received or signal.SIGTERM

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_second:
            if self.explain is not None:  # not by print, in which the signal may have come
                os.write(2, f"{self.explain()}\n".encode(errors="replace"))
            os._exit(128 + number)
        if self.received is not None:
            self._is_second = True
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
