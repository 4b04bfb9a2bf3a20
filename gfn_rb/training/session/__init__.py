"""Runs: a trainer at work in a folder, alone or as one of several ranks."""

from gfn_rb.errors import GfnRbError


class RefusedError(GfnRbError):
    """Rank 0 has already said why there will be no run."""

    def __init__(self, why: str, code: int = 2) -> None:
        super().__init__(why)
        self.code = code
