"""Importing TorchRL through this package leaves multiprocessing's start method as it was.

TorchRL's import sets the start method to "spawn" where none is set. A script without
``if __name__ == "__main__"`` that starts processes would then run again in each of them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_TORCHRL = "torchrl"


class _TorchRLFinder(MetaPathFinder):
    """Finds TorchRL once, with a loader that restores the start method after the import."""

    def find_spec(
        self, name: str, path: Iterable[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _TORCHRL:
            return None
        sys.meta_path.remove(self)  # the others find it from now on
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _restore_after(spec)
        return spec


def _restore_after(spec: ModuleSpec) -> None:
    run = spec.loader.exec_module  # type: ignore[union-attr]

    def exec_module(module: ModuleType) -> None:
        import multiprocessing  # which the command line does not need to parse words

        former = multiprocessing.get_start_method(allow_none=True)
        try:
            run(module)
        finally:
            multiprocessing.set_start_method(former, force=True)

    spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]


def keep_start_method() -> None:
    """Have a later import of TorchRL leave the start method of processes as it finds it."""
    if _TORCHRL not in sys.modules:
        sys.meta_path.insert(0, _TorchRLFinder())
