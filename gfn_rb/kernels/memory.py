"""Memory by its address: rows as bytes, and what is read ahead.

An address that is wrong corrupts memory where an index would raise. Those who pass addresses check
dtypes, shapes and strides before, as ``gfn_rb/writers/exchange.py`` does. With
``NUMBA_DISABLE_JIT=1`` there are no addresses: nothing is read ahead, and PyTorch copies rows.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from gfn_rb.kernels import compiled, inlined

IS_AVAILABLE = not numba.config.DISABLE_JIT
_LINE = 64  # bytes of a line of the cache
_FEW = 256  # bytes, beyond which ``memcpy`` is quicker than its call is long
_BYTE, _SHORT = ir.IntType(8).as_pointer(), ir.IntType(32)


@intrinsic
def pointer(context: Any, address: Any) -> Any:
    """Return an address as a pointer."""

    def code(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), code


@intrinsic
def _address_of(context: Any, array: Any) -> Any:
    """Return the address of the first element of an array."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        held = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.ptrtoint(held.data, ir.IntType(64))

    return types.int64(array), code


@intrinsic
def _prefetch(context: Any, address: Any) -> Any:
    """Have the processor read a line of memory to write to it (``llvm.prefetch``)."""

    def code(target: Any, builder: Any, _: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_BYTE, _SHORT, _SHORT, _SHORT])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        options = [_SHORT(0), _SHORT(3), _SHORT(1)]  # a read, kept in all caches, of data
        builder.call(function, [builder.inttoptr(arguments[0], _BYTE), *options])
        return target.get_dummy_value()

    return types.void(types.int64), code


@intrinsic
def _copy(context: Any, target: Any, source: Any, n: Any) -> Any:
    """Copy bytes (``memcpy``)."""

    def code(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        target, source = (builder.inttoptr(each, _BYTE) for each in arguments[:2])
        cgutils.raw_memcpy(builder, target, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


def _copy_of(bits: int) -> Any:
    @intrinsic
    def copy(context: Any, target: Any, source: Any) -> Any:
        """Copy an integer, wherever it begins."""

        def code(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            kind = ir.IntType(bits).as_pointer()
            value = builder.load(builder.inttoptr(arguments[1], kind), align=1)
            builder.store(value, builder.inttoptr(arguments[0], kind), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), code

    return copy


_copy_64, _copy_32 = _copy_of(64), _copy_of(32)

if IS_AVAILABLE:

    @inlined
    def prefetch(address):  # type: ignore[no-untyped-def]
        """Read a line of memory ahead."""
        _prefetch(np.int64(address))

    @inlined
    def address_of(array):  # type: ignore[no-untyped-def]
        """Return the address of an array, quicker than ``array.ctypes.data``."""
        return _address_of(array)

else:

    def address_of(array: np.ndarray) -> int:
        """Return the address of an array."""
        return array.ctypes.data

    def prefetch(address: int) -> None:
        """Do nothing."""


@inlined
def prefetch_row(address, width):  # type: ignore[no-untyped-def]
    """Read a row of so many bytes ahead."""
    for offset in range(0, width, _LINE):
        prefetch(address + offset)


@inlined
def copy_row(target, source, width):  # type: ignore[no-untyped-def]
    """Copy a row of so many bytes, which does not overlap its target."""
    if width == 4:
        _copy_32(target, source)
    elif width % 8 == 0 and width <= _FEW:
        for offset in range(0, width, 8):
            _copy_64(target + offset, source + offset)
    else:
        _copy(target, source, width)


@compiled
def integers_at(address, n):  # type: ignore[no-untyped-def]
    """Return n integers of 64 bits as an array."""
    return numba.carray(pointer(np.int64(address)), (n,), np.int64)


@intrinsic
def set_short(context: Any, address: Any, value: Any) -> Any:
    """Write an integer of 32 bits."""

    def code(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        number = builder.inttoptr(arguments[0], _SHORT.as_pointer())
        builder.store(builder.trunc(arguments[1], _SHORT), number)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code
