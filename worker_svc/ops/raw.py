"""Addresses in compiled loops: arrays over memory that is known by its address, and calls of machine code.

Knows numba's way of generating code. Beware: numba frees an array after its last use, and an address is no use.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic


def _pointer_to(typing_context, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), generate


def _call_at(typing_context, function, a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    """A function of up to six words; what one does not take, it does not see (registers of the C convention)."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [word] * 6)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


pointer: Any = intrinsic(_pointer_to)
call: Any = intrinsic(_call_at)
