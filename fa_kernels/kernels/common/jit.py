"""How a kernel is compiled: once for all lengths, strides and alignments."""

import inspect

import triton

__all__ = ["kernel"]


def kernel(fn):
    """``triton.jit`` without specialisation of integers and pointers.

    Constexpr parameters alone choose the compiled code; parameters named ``*_ptr`` are not
    specialised on alignment, all others not on their value. So a call never compiles because a
    length or a stride is 1 or a multiple of 16, and the same layout of a reduction serves all.
    """
    names = [
        name
        for name, parameter in inspect.signature(fn).parameters.items()
        if parameter.annotation is not triton.language.constexpr
    ]
    pointers = [name for name in names if name.endswith("_ptr")]
    return triton.jit(
        fn,
        do_not_specialize=[name for name in names if name not in pointers],
        do_not_specialize_on_alignment=pointers,
    )
