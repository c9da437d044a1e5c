"""The decorator of kernels, which compiles once for all lengths, strides and alignments."""

import inspect

import triton

__all__ = ["kernel"]


def kernel(fn):
    """Applies ``triton.jit`` without specialisation on integers and pointers.

    The compiled code depends on constexpr parameters and dtypes alone. Parameters named ``*_ptr``
    are not specialised on alignment, the others not on their value. A length or stride of 1 or a
    multiple of 16 therefore neither recompiles a kernel nor changes the layout of a reduction.
    """
    # A module with postponed annotations has them as strings.
    parameters = inspect.signature(fn, eval_str=True).parameters
    names = [
        name
        for name, parameter in parameters.items()
        if parameter.annotation is not triton.language.constexpr
    ]
    pointers = [name for name in names if name.endswith("_ptr")]
    return triton.jit(
        fn,
        do_not_specialize=[name for name in names if name not in pointers],
        do_not_specialize_on_alignment=pointers,
    )
