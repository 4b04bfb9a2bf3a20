"""One HTML page that shows what a run found and what its buffer keeps and draws."""

from typing import TYPE_CHECKING

from gfn_rb.lazy import lazy_exports

if TYPE_CHECKING:
    from gfn_rb.page.document import view as view

__getattr__, __all__ = lazy_exports(__name__)
