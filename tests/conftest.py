"""Two tiers of tests, and the type checks of the long one.

``pytest`` runs the short tier. ``pytest --all`` also runs the tests marked ``slow``, tries more
examples of each property, checks every annotation of the package at each call, and fills memory
that nobody wrote (``torch.empty``, ``np.empty``) with NaN or the largest integer.
"""

import functools
import gc
import importlib
import inspect
import logging
import multiprocessing
import os
import re
from multiprocessing.forkserver import ensure_running

import hypothesis
import jaxtyping
import pytest
import torch

SHAPED = re.compile(
    r"\b(Bool|Float|Float64|Int|Int64|Shaped)\[|Batch\b|\b(Flags|Integers|Floats|Modes)\b"
)
with_shapes = jaxtyping.jaxtyped


def checked(function=None, *, typechecker):
    """Check a function's annotations: by jaxtyping only where one names a shape.

    jaxtyping binds the arguments of a call and calls the type checker twice, which is half of
    the suite's time. Where no dimension is named, the type checker alone sees the same errors.
    """
    if function is None:
        return functools.partial(checked, typechecker=typechecker)
    if "<locals>" in getattr(function, "__qualname__", ""):
        return function  # made at each call, and each time a checked one would stay in memory
    annotations = getattr(function, "__annotations__", {}).values()
    if not inspect.isfunction(function) or any(SHAPED.search(str(a)) for a in annotations):
        return with_shapes(function, typechecker=typechecker)
    if not annotations:
        return function
    strict = typechecker(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        chosen = function if jaxtyping.config.jaxtyping_disable else strict
        return chosen(*args, **kwargs)

    return call


os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")  # it logs a line for every storage
logging.getLogger("gfn_rb.kernels").setLevel("ERROR")  # the first run on a machine compiles loops
torch.set_num_threads(1)
# Processes are as fresh as with "spawn" (what they are given is pickled, nothing else inherited),
# but forked from a server that has made its imports: seconds of CPU, once for the whole run.
multiprocessing.set_start_method("forkserver", force=True)
PRELOADED = ["torchrl.collectors", "gfn_rb.training", "hypothesis", "pytest", "scipy.stats"]
multiprocessing.set_forkserver_preload(PRELOADED)
# A deadline would measure what else the machine does.
CHECKS = hypothesis.HealthCheck
UNTIMED = {
    "deadline": None,
    "suppress_health_check": [CHECKS.too_slow, CHECKS.function_scoped_fixture],
}
hypothesis.settings.register_profile("short", max_examples=25, **UNTIMED)
hypothesis.settings.register_profile("all", **UNTIMED)


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run slow tests too, and check types")


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a CUDA device")
    config.addinivalue_line("markers", "slow: runs with --all only")
    hypothesis.settings.load_profile("all" if config.option.all else "short")
    if config.option.all:
        importlib.import_module("tests.uninitialized")
        multiprocessing.set_forkserver_preload([*PRELOADED, "tests.uninitialized"])
        ensure_running()  # here, as it imports from the working directory, which tests change
        jaxtyping.jaxtyped = checked  # which is what the import hook writes above each function
        jaxtyping.install_import_hook("gfn_rb", "beartype.beartype")


def pytest_collection_modifyitems(config, items):
    if not config.option.all:
        config.hook.pytest_deselected(
            items=[item for item in items if item.get_closest_marker("slow")]
        )
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish():
    """Leave what imports made out of each later garbage collection, which else takes 0.1 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def unlogged():
    """Log nothing: what the test run keeps of each record is the error, and all that led to it."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def unchecked():
    """Switch the type checks off, to see what a user without them is told of a wrong type."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def pytest_ignore_collect(collection_path, config):
    """Leave tests of the emulated device to a process of their own: it changes autograd there."""
    if collection_path.name == "device" and not any("device" in str(arg) for arg in config.args):
        return True
    return None
