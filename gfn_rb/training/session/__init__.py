"""Runs: a trainer at work in a folder, alone or as one of several ranks."""

from gfn_rb.errors import GfnRbError


class RefusedError(GfnRbError):
    """Another rank says why there is no run, or why it ends."""

    def __init__(self, why: str, code: int = 2) -> None:
        super().__init__(why)
        self.code = code
