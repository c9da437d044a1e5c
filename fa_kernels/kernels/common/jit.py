"""The decorator of kernels, which compiles once for all lengths, strides and alignments."""

import inspect
from collections import defaultdict

import triton

__all__ = ["kernel"]


def kernel(fn):
    """Applies ``triton.jit`` without specialisation on integers and pointers.

    The compiled code depends on constexpr parameters and dtypes alone. Parameters named ``*_ptr``
    are not specialised on alignment, the others not on their value. A length or stride of 1 or a
    multiple of 16 therefore neither recompiles a kernel nor changes the layout of a reduction. The
    same holds for the integers in a tuple, such as the arguments of a predicate.
    """
    # A module with postponed annotations has them as strings.
    parameters = inspect.signature(fn, eval_str=True).parameters
    names = [
        name
        for name, parameter in parameters.items()
        if parameter.annotation is not triton.language.constexpr
    ]
    pointers = [name for name in names if name.endswith("_ptr")]
    jitted = triton.jit(
        fn,
        do_not_specialize=[name for name in names if name not in pointers],
        do_not_specialize_on_alignment=pointers,
    )
    untyped = [x for x in names if parameters[x].annotation is inspect.Parameter.empty]
    tuples = [name for name in untyped if name not in pointers]
    if tuples and isinstance(jitted, triton.JITFunction):
        _keep_general(jitted, {name: [*parameters].index(name) for name in tuples})
    return jitted


def _keep_general(jitted, places):
    """Removes the values of integers in tuples from the specialisation of a kernel.

    ``do_not_specialize`` does not reach the elements of a tuple in Triton 3.6 to 3.9. Triton binds
    the arguments of a launch with the last part of a device's cache.

    Args:
        jitted: The kernel.
        places: The places of parameters that can be tuples, by name.
    """

    def create():
        *others, bind = jitted.create_binder()

        def bind_generally(*args, **kwargs):
            bound, specialised, options = bind(*args, **kwargs)
            for name, place in places.items():
                specialised[place] = _general(*specialised[place], bound[name])
            return bound, specialised, options

        return (*others, bind_generally)

    jitted.device_caches = defaultdict(create)


def _general(kind, key, value):
    """Returns type and specialisation of an argument, the same for all 32-bit integers."""
    if isinstance(value, tuple):
        elements = [_general(*element) for element in zip(kind, key, value, strict=True)]
        return tuple(zip(*elements, strict=True)) if elements else (kind, key)
    if isinstance(value, int) and not isinstance(value, bool):
        # Triton takes 1 for a constant.
        return "i32" if kind == "constexpr" else kind, ""
    return kind, key
