"""The secret of training runs."""

from __future__ import annotations

import os

from gfn_rb.checkpoint import Secret

VARIABLE = "GFN_RB_SECRET_FILE"


def run_secret() -> Secret | None:
    """Return the secret in the file that the environment names, None where it names none.

    Checkpoints, journals and frames of a run are made with it, and must have been.
    """
    path = os.environ.get(VARIABLE)
    return Secret.read(path) if path else None
