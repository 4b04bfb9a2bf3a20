"""Storages: rows as columns in memory or files, who may write to them, and which rows changed."""

from typing import TYPE_CHECKING

from gfn_rb.lazy import lazy_exports

if TYPE_CHECKING:
    from gfn_rb.storages.memmaps import RowMemmapStorage as RowMemmapStorage
    from gfn_rb.storages.ragged import RaggedStorage as RaggedStorage
    from gfn_rb.storages.tensors import RowTensorStorage as RowTensorStorage

__getattr__, __all__ = lazy_exports(__name__)
