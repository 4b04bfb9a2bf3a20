"""Check every jaxtyping annotation of the package at each call of the test run."""

from jaxtyping import install_import_hook

with install_import_hook("gfn_rb", "beartype.beartype"):
    import gfn_rb  # noqa: F401

import torch

torch.set_num_threads(1)
