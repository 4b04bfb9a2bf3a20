"""The interfaces of other libraries on this one's parts.

:mod:`gfn_rb.interop.torchgfn` needs torchgfn. :mod:`gfn_rb.interop.objectrl` needs nothing more.
"""

__all__: list[str] = []
