"""The functions of CUDA's libdevice for interpreted kernels.

Triton's interpreter has none: ``triton.language.extra.libdevice`` holds stubs that return None.
Here a call dispatches on the types of its arguments as in compiled code, to one of the functions
below. They compute in float64. A result in float32 is rounded once, so it errs by half a unit in
the last place where a GPU errs by up to a few. The fast functions round where a GPU does, which
gives their large errors: ``__nv_fast_expf(x)`` is 2 to the power of the rounded x log2(e).
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fa_verify.simulator.interpreter.limits import CannotRunError

__all__ = ["interpret_libdevice"]

Array = npt.NDArray[Any]
Function = Callable[..., Array]

# They order a launch after the one before it, which has ended.
_IN_ORDER = ("gdc_wait", "gdc_launch_dependents")


def interpret_libdevice(interpreter: Any) -> None:
    """Let kernels call libdevice, and the builtins of ``triton.language.extra.cuda``.

    Kernels that have imported a function by its name get the replacement at their first launch.

    Args:
        interpreter: The module ``triton.runtime.interpreter``.
    """
    semantic, handle_of = interpreter.interpreter_semantic, interpreter.TensorHandle
    generic, cuda, of_cuda = (
        importlib.import_module(f"triton.language.extra{name}")
        for name in (".libdevice", ".cuda", ".cuda.libdevice")
    )
    # Triton 3.9 loads this module twice, and the attribute is the other.
    other = interpreter.tl.extra.cuda

    def extern_elementwise(
        self: Any, library: str, path: str, symbol: str, args: Any, result: Any, is_pure: bool
    ) -> Any:
        target = result.scalar
        data = _function(symbol)(*np.broadcast_arrays(*(x.data for x in args)))
        return handle_of(np.asarray(data).astype(interpreter._get_np_dtype(target)), target)

    def interpreted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            return function(*args, **options | {"_semantic": semantic})

        return call

    # By id, with the original: names of a kernel's module may have values that cannot be hashed.
    replaced: dict[int, tuple[object, Callable[..., Any]]] = {}
    for modules in ([other, cuda], [other.libdevice, generic, of_cuda]):
        for name, function in vars(modules[-1]).copy().items():
            # The semantic is passed to builtins of the language alone.
            if not interpreter.tl.core.is_builtin(function):
                continue
            call = interpreted(function) if name not in _IN_ORDER else _no_wait
            for module in modules:
                if before := vars(module).get(name):
                    replaced[id(before)] = before, call
                setattr(module, name, call)
    original_rewrite = interpreter.InterpretedFunction.rewrite

    def rewrite(self: Any) -> Any:
        if self.fn not in self.rewritten_fn:
            names = self.fn.__globals__
            names.update({x: replaced[id(y)][1] for x, y in names.items() if id(y) in replaced})
        return original_rewrite(self)

    interpreter.InterpreterBuilder.create_extern_elementwise = extern_elementwise
    interpreter.InterpretedFunction.rewrite = rewrite


def _no_wait(_semantic: Any = None) -> None:
    """Do nothing: kernels run one after another."""


def _function(symbol: str) -> Function:
    """Return the function of a symbol, of arrays of its types.

    Raises:
        CannotRunError: There is none here.
    """
    name = symbol.removeprefix("__nv_")
    if name in _OF_BITS:
        return _OF_BITS[name]
    if name in _FAST:
        return _FAST[name]
    if found := re.fullmatch(r"(?:float|double)2(int|uint|ll|ull)_(rn|rz|rd|ru)", name):
        return _to_integer(*found.groups())
    if re.fullmatch(r"u?(int|ll)2(float|double)_rn", name):
        return lambda x: x
    if found := re.fullmatch(r"[fd]?(add|sub|mul|div|rcp|sqrt|rsqrt)_rn", name):
        # NumPy rounds each to nearest, in the type of its operands.
        return _ROUNDED_ONCE[found[1]]
    if found := re.fullmatch(r"fmaf?(_rn)?", name):
        return _fma
    for of in (name, name.removesuffix("f"), name.removesuffix("d")):
        if of in _IN_FLOAT64:
            return _in_float64(_IN_FLOAT64[of])
    raise CannotRunError(f"the interpreter has no {symbol} of libdevice")


def _in_float64(function: Function) -> Function:
    """Return the function of operands that are widened to float64."""
    return lambda *args: function(
        *(x.astype(np.float64) if x.dtype.kind == "f" else x for x in args)
    )


def _of_torch(function: Callable[[torch.Tensor], torch.Tensor]) -> Function:
    return lambda x: function(torch.from_numpy(np.array(x))).numpy()


def _gamma(x: float) -> float:
    try:
        return math.gamma(x)
    except OverflowError:
        return math.inf
    except ValueError:  # a pole
        return math.copysign(math.inf, x) if x == 0 else math.nan


def _round_half_away(x: Array) -> Array:
    whole = np.trunc(x)
    rounded: Array = whole + np.copysign(np.abs(x - whole) >= 0.5, x)
    return np.copysign(rounded, x)


def _sin_pi(x: Array) -> Array:
    """Return the sine of pi x, of an angle in [-pi / 2, pi / 2]."""
    turn = np.fmod(x, 2.0)
    near = np.rint(turn)
    value: Array = np.sin(np.pi * (turn - near))
    value = np.where(value == 0, np.copysign(0.0, x), np.where(near % 2 == 0, value, -value))
    return np.where(np.isinf(x), np.nan, value)


def _cos_pi(x: Array) -> Array:
    turn = np.fmod(np.abs(x), 2.0)
    # The cosine is the sine of half a turn more, which is exact where the cosine is 0.
    return np.where(turn <= 0.25, np.cos(np.pi * turn), _sin_pi(turn + 0.5))


def _norm(*args: Array) -> Array:
    largest = np.maximum.reduce([np.abs(x) for x in args])
    scale = np.where(np.isfinite(largest) & (largest > 0), largest, 1.0)
    return np.asarray(scale * np.sqrt(np.add.reduce([(x / scale) ** 2 for x in args])))


def _to_integer(kind: str, mode: str) -> Function:
    """Return the conversion of floats, which saturates; NaN is 0."""
    signed, bits = kind[0] != "u", 64 if kind.endswith("ll") else 32
    least, end = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    target = np.dtype(f"{'i' if signed else 'u'}{bits // 8}")
    whole = {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}[mode]

    def convert(x: Array) -> Array:
        if np.isnan(x).any() and x.dtype == np.float64:
            raise CannotRunError("the interpreter converts no NaN of float64 to an integer")
        value = np.nan_to_num(whole(x.astype(np.float64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
        inside = (value >= least) & (value < end)
        number = np.where(inside, value, 0.0).astype(target)
        edge = np.where(value < 0, np.array(least, target), np.array(end - 1, target))
        return np.where(inside, number, edge)

    return convert


def _fma(x: Array, y: Array, z: Array) -> Array:
    from triton.runtime import interpreter

    of = interpreter.interpreter_builder.create_fma
    kind = interpreter.tl.float32 if z.dtype == np.float32 else interpreter.tl.float64
    result: Array = of(*(interpreter.TensorHandle(each, kind) for each in (x, y, z))).data
    return result


def _fast_divide(x: Array, y: Array) -> Array:
    quotient: Array = x / y
    # The reciprocal of such a divisor is flushed to zero.
    return np.where(np.abs(y) > 2.0**126, x * np.float32(0.0), quotient)


def _exp2(x: Array) -> Array:
    return np.exp2(x.astype(np.float64)).astype(np.float32)


def _log2(x: Array) -> Array:
    return np.log2(x.astype(np.float64)).astype(np.float32)


# Float32 alone, with the roundings of the GPU's sequence of instructions.
_FAST: dict[str, Function] = {
    "fast_expf": lambda x: _exp2(x * np.float32(math.log2(math.e))),
    "fast_exp10f": lambda x: _exp2(x * np.float32(math.log2(10.0))),
    "fast_log2f": _log2,
    "fast_logf": lambda x: _log2(x) * np.float32(math.log(2.0)),
    "fast_log10f": lambda x: _log2(x) * np.float32(math.log10(2.0)),
    "fast_powf": lambda x, y: _exp2(y * _log2(x)),
    "fast_sinf": _in_float64(np.sin),
    "fast_cosf": _in_float64(np.cos),
    "fast_tanf": lambda x: (
        np.sin(x.astype(np.float64)).astype(np.float32)
        / np.cos(x.astype(np.float64)).astype(np.float32)
    ),
    "fast_fdividef": _fast_divide,
}
_ROUNDED_ONCE: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": _in_float64(lambda x: 1 / np.sqrt(x)),
}
# Functions whose result depends on the type of their operands.
_OF_BITS: dict[str, Function] = {
    "abs": np.abs,
    "llabs": np.abs,
    "nextafterf": np.nextafter,
    "nextafter": np.nextafter,
    "float_as_int": lambda x: x.view(np.int32),
    "float_as_uint": lambda x: x.view(np.uint32),
    "int_as_float": lambda x: x.view(np.float32),
    "uint_as_float": lambda x: x.view(np.float32),
    "double_as_longlong": lambda x: x.view(np.int64),
    "longlong_as_double": lambda x: x.view(np.float64),
}
_OF_NUMPY = (
    np.cbrt, np.ceil, np.copysign, np.cos, np.cosh, np.exp, np.exp2, np.expm1, np.fabs, np.floor,
    np.fmod, np.hypot, np.isinf, np.isnan, np.ldexp, np.log, np.log10, np.log1p, np.log2, np.rint,
    np.signbit, np.sin, np.sinh, np.sqrt, np.tan, np.tanh, np.trunc,
)  # fmt: skip
_ARCS = (
    np.arccos, np.arccosh, np.arcsin, np.arcsinh, np.arctan, np.arctan2, np.arctanh,
)  # fmt: skip
# By the name of the function of float64; that of float32 ends in f.
_IN_FLOAT64: dict[str, Function] = {
    **{function.__name__: function for function in _OF_NUMPY},
    **{function.__name__.replace("arc", "a"): function for function in _ARCS},
    **{
        name: _of_torch(getattr(torch.special, of))
        for name, of in (
            ("erf", "erf"),
            ("erfc", "erfc"),
            ("erfcx", "erfcx"),
            ("erfinv", "erfinv"),
            ("normcdf", "ndtr"),
            ("normcdfinv", "ndtri"),
            ("lgamma", "gammaln"),
            ("j0", "bessel_j0"),
            ("j1", "bessel_j1"),
            ("y0", "bessel_y0"),
            ("y1", "bessel_y1"),
            ("cyl_bessel_i0", "i0"),
            ("cyl_bessel_i1", "i1"),
        )
    },
    "exp10": lambda x: np.power(10.0, x),
    "pow": np.power,
    "powi": lambda x, n: np.power(x, n.astype(np.float64)),
    "remainder": np.vectorize(math.remainder, otypes=[np.float64]),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rcbrt": lambda x: 1 / np.cbrt(x),
    "rhypot": lambda x, y: 1 / np.hypot(x, y),
    "norm3d": _norm,
    "norm4d": _norm,
    "rnorm3d": lambda *args: 1 / _norm(*args),
    "rnorm4d": lambda *args: 1 / _norm(*args),
    "erfcinv": lambda x: -_of_torch(torch.special.ndtri)(x / 2) / math.sqrt(2),
    "tgamma": np.vectorize(_gamma, otypes=[np.float64]),
    "sinpi": _sin_pi,
    "cospi": _cos_pi,
    "saturate": lambda x: np.clip(np.nan_to_num(x, nan=0.0), 0.0, 1.0),
    "fdim": lambda x, y: np.where(np.isnan(x) | np.isnan(y), np.nan, np.maximum(x - y, 0.0)),
    "finite": np.isfinite,
    "isfinite": np.isfinite,
    "nearbyint": np.rint,
    "llrint": np.rint,
    "round": _round_half_away,
    "llround": _round_half_away,
    "scalbn": np.ldexp,
}
