"""Operators for mutants of the harness: slips in checks, bounds, generators and bookkeeping.

The operators of arithmetic and conditions are those of the kernels.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.mutation.catalogue.operators import (
    Change,
    Operator,
    Source,
    arithmetic,
    compare,
    condition,
    drop_argument,
    drop_operand,
    drop_sign,
    infinity,
    off_by_one,
)

__all__ = ["HARNESS_OPERATORS"]

# Functions, and the indices of arguments that can stand in for the result.
_FUNCTIONS = {
    "where": (1, 2), "minimum": (0, 1), "maximum": (0, 1), "min": (0, 1), "max": (0, 1),
    "fmax": (0, 1), "abs": (0,), "sqrt": (0,), "log": (0,), "exp": (0,), "expm1": (0,),
    "log1p": (0,), "set": (0,), "sorted": (0,), "reversed": (0,), "ceil": (0,), "frozenset": (0,),
    "cdiv": (0,), "dict": (0,), "tuple": (0,), "int": (0,), "float": (0,),
}  # fmt: skip
# Methods whose object can stand in for the result.
_METHODS = (
    "abs", "abs_", "clamp", "clamp_", "square", "sqrt", "exp", "exp_", "log", "masked_fill",
    "masked_fill_", "nan_to_num", "to", "flip", "mul_", "add_", "div_", "sub_", "sign", "detach",
    "contiguous", "clone", "copy", "expand", "expand_as", "repeat_interleave", "mT", "strip",
    "split", "unsqueeze", "squeeze", "astype", "double", "float", "logical_not", "requires_grad_",
)  # fmt: skip
_EXCHANGED = {
    a: b
    for pair in (
        ("any", "all"), ("amax", "amin"), ("min", "max"), ("minimum", "maximum"), ("sum", "amax"),
        ("argmax", "argmin"), ("isnan", "isinf"), ("isfinite", "isnan"), ("union", "intersection"),
        ("floor", "ceil"), ("append", "extend"), ("repeat", "repeat_interleave"),
    )
    for a, b in (pair, pair[::-1])
}  # fmt: skip
# Groups of interchangeable words, alone or within a name.
_CONFUSABLE = [
    ("q", "k"), ("k", "v"), ("m", "n"), ("M", "N"), ("D", "Dv"), ("H", "Hk"), ("B", "H"),
    ("b", "h"), ("rows", "keys"), ("row", "key"), ("first", "second"), ("first", "last"),
    ("low", "high"), ("got", "want"), ("before", "after"), ("then", "now"), ("start", "stop"),
    ("left", "right"), ("lower", "upper"), ("M", "rows"), ("N", "keys"), ("dk", "dv"),
    ("out", "lse"), ("bound", "terms"), ("error", "bound"), ("judged", "refused"),
    ("here", "there"), ("inputs", "outputs"), ("u", "eta"), ("mean", "limit"), ("M", "D"),
    ("one", "part"),
]  # fmt: skip
_PARTNERS: dict[str, list[str]] = {}
for _a, _b in _CONFUSABLE:
    _PARTNERS.setdefault(_a, []).append(_b)
    _PARTNERS.setdefault(_b, []).append(_a)


def drop_term(source: Source, node: ast.AST, _names: set[str]) -> Iterator[Change]:
    """Drops an operand of a condition or a negation; exchanges ``and`` and ``or``."""
    if isinstance(node, ast.BoolOp):
        word = " and " if isinstance(node.op, ast.And) else " or "
        other = " or " if isinstance(node.op, ast.And) else " and "
        parts = [f"({source.of(x)})" for x in node.values]
        for i in range(len(parts)):
            yield source.span(node), f"({word.join(parts[:i] + parts[i + 1 :])})"
        yield source.span(node), f"({other.join(parts)})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
        yield source.span(node), f"({source.of(node.operand)})"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitXor):
        yield source.span(node), f"({source.of(node.right)})"
    if isinstance(node, ast.Compare) and isinstance(
        node.ops[0], ast.In | ast.Is | ast.NotIn | ast.IsNot
    ):
        yield source.span(node), f"(not {source.of(node)})"


def drop_function(source: Source, node: ast.AST, _names: set[str]) -> Iterator[Change]:
    """Replaces a call by one of its arguments: a select, a maximum, a square root."""
    if not isinstance(node, ast.Call):
        return
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    is_method = isinstance(node.func, ast.Attribute) and not isinstance(node.func.value, ast.Name)
    if is_method or any(isinstance(x, ast.Starred) for x in node.args):
        return
    for place in _FUNCTIONS.get(name, ()):
        if place < len(node.args):
            yield source.span(node), f"({source.of(node.args[place])})"


def drop_method(source: Source, node: ast.AST, _names: set[str]) -> Iterator[Change]:
    """Replaces a method call by the object it is called on."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        library = isinstance(node.func.value, ast.Name) and node.func.value.id in _LIBRARIES
        if node.func.attr in _METHODS and not library:
            yield source.span(node), f"{source.of(node.func.value)}"
    if isinstance(node, ast.Attribute) and node.attr == "mT":
        yield source.span(node), source.of(node.value)


_LIBRARIES = ("torch", "np", "math", "st", "json", "os", "stream", "re", "dataclasses")


def exchange_call(source: Source, node: ast.AST, _names: set[str]) -> Iterator[Change]:
    """Exchanges related functions: all and any, the least and the largest."""
    if not isinstance(node, ast.Call):
        return
    _start, end = source.span(node.func)
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if name in _EXCHANGED:
        yield (end - len(name), end), _EXCHANGED[name]


def drop_statement(source: Source, node: ast.AST, _names: set[str]) -> Iterator[Change]:
    """Drops a statement that later code may depend on; turns ``+=`` into ``=``."""
    if isinstance(node, ast.AugAssign):
        start, end = source.span(node.target)[1], source.span(node.value)[0]
        yield (start, end), " = "
    # A plain assignment is kept: without it, the read of the name raises.
    is_stored = isinstance(node, ast.Assign) and isinstance(
        node.targets[0], ast.Attribute | ast.Subscript
    )
    if is_stored or isinstance(node, ast.Expr | ast.AugAssign | ast.Raise | ast.Continue):
        yield source.span(node), "pass"


def drop_element(source: Source, node: ast.AST, _names: set[str]) -> Iterator[Change]:
    """Drops an element of a list, tuple or dictionary, or an end of a slice."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set) and len(node.elts) > 1:
        left, right = {ast.List: "[]", ast.Tuple: "()", ast.Set: "{}"}[type(node)]
        has_brackets = source.span(node)[0] < source.span(node.elts[0])[0]
        if has_brackets and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            for i in range(len(node.elts)):
                kept = [source.of(x) for j, x in enumerate(node.elts) if j != i]
                yield source.span(node), f"{left}{', '.join(kept)},{right}"
    if isinstance(node, ast.Dict) and len(node.keys) > 1:
        items = [
            f"{source.of(key)}: {source.of(value)}" if key else f"**{source.of(value)}"
            for key, value in zip(node.keys, node.values, strict=True)
        ]
        for i in range(len(items)):
            yield source.span(node), "{" + ", ".join(items[:i] + items[i + 1 :]) + "}"
    if isinstance(node, ast.Slice) and (node.lower or node.upper) and node.step is None:
        if node.lower and node.upper:
            yield source.span(node), f"{source.of(node.lower)} :"
            yield source.span(node), f": {source.of(node.upper)}"
        else:
            yield source.span(node), ":"


def fewer(source: Source, node: ast.AST, _names: set[str]) -> Iterator[Change]:
    """Runs a loop for the first element only, or for all but the last."""
    if isinstance(node, ast.For):
        span, text = source.span(node.iter), source.of(node.iter)
        yield span, f"[*({text})][:1]"
        yield span, f"[*({text})][:-1]"
    for loop in getattr(node, "generators", ())[:1]:
        span, text = source.span(loop.iter), source.of(loop.iter)
        yield span, f"[*({text})][:1]"
        yield span, f"[*({text})][:-1]"


def exchange_value(source: Source, node: ast.AST, _names: set[str]) -> Iterator[Change]:
    """Doubles or halves a number; exchanges True and False."""
    if isinstance(node, ast.Constant) and type(node.value) is float and node.value != 0:
        yield source.span(node), repr(2 * node.value)
        yield source.span(node), repr(node.value / 2)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield source.span(node), str(not node.value)


def exchange_word(source: Source, node: ast.AST, names: set[str]) -> Iterator[Change]:
    """Exchanges a name for a related name of the function, or a field for a related field."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        for other in _others(node.id):
            if other in names:
                yield source.span(node), other
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        end = source.span(node)[1]
        for other in _others(node.attr):
            yield (end - len(node.attr), end), other


def _others(name: str) -> Iterator[str]:
    """Names that can be mistaken for ``name``."""
    words = name.split("_")
    for i, word in enumerate(words):
        for other in _PARTNERS.get(word, ()):
            yield "_".join([*words[:i], other, *words[i + 1 :]])


HARNESS_OPERATORS: tuple[Operator, ...] = (
    compare, arithmetic, drop_operand, off_by_one, infinity, drop_sign, drop_argument, condition,
    drop_term, drop_function, drop_method, exchange_call, drop_statement, drop_element,
    fewer, exchange_value, exchange_word,
)  # fmt: skip
