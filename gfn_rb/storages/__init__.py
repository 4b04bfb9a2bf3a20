"""Storages: rows as columns in memory or files, who may write to them, and which rows changed.

:mod:`gfn_rb` exports the storages themselves.
"""

__all__: list[str] = []
