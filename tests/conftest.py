"""Check every jaxtyping annotation of the package at each call of the test run."""

from jaxtyping import install_import_hook

with install_import_hook("gfn_rb", "beartype.beartype"):
    import gfn_rb  # noqa: F401

import pytest
import torch

torch.set_num_threads(1)


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a CUDA device")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
