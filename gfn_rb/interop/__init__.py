"""What lets programs written for other libraries run on this one's parts.

:mod:`gfn_rb.interop.torchgfn` needs torchgfn. :mod:`gfn_rb.interop.objectrl` and
:mod:`gfn_rb.interop.recursion` need nothing more.
"""

__all__: list[str] = []
