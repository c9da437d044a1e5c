"""Mutation operators over the syntax trees of kernels, launchers and tile ranges.

An operator takes one node of a function's body and proposes other text for it; all other text is
kept. A mutant's key names the file, the function, the operator and the number of the proposal:
``portable/dq.py:_accumulate compare 3``.

A comment at a changed line, or right above it, tells why mutants of the line survive:
``# equivalent: why``.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from tests.mutation.catalogue.mutant import Edit, Mutant

__all__ = ["HOPPER_SITES", "OPERATORS", "SITES", "draw", "mechanical"]

# Files whose functions and methods are mutated.
SITES = (
    "fa_kernels/kernels/portable/forward.py",
    "fa_kernels/kernels/portable/forward_fp8.py",
    "fa_kernels/kernels/portable/kvcache.py",
    "fa_kernels/kernels/portable/combine.py",
    "fa_kernels/kernels/portable/combine_bwd.py",
    "fa_kernels/kernels/portable/bwd_preprocess.py",
    "fa_kernels/kernels/portable/dkdv.py",
    "fa_kernels/kernels/portable/dq.py",
    "fa_kernels/kernels/portable/dq_postprocess.py",
    "fa_kernels/kernels/portable/dbias.py",
    "fa_kernels/kernels/common/addressing.py",
    "fa_kernels/kernels/common/block_info.py",
    "fa_kernels/kernels/common/mask.py",
    "fa_kernels/kernels/common/score_mod.py",
    "fa_kernels/kernels/common/seqlen_info.py",
    "fa_kernels/kernels/common/softmax.py",
    "fa_kernels/kernels/common/tile_ranges.py",
    "fa_kernels/kernels/portable/classify_blocks.py",
    "fa_kernels/kernels/portable/block_lists.py",
    "fa_kernels/kernels/portable/lpt_order.py",
    "fa_kernels/kernels/portable/pool.py",
    "fa_kernels/launch/named_arguments.py",
    "fa_kernels/launch/portable.py",
    "fa_kernels/launch/sinks.py",
    "fa_kernels/schedule/block_sparse.py",
    "fa_kernels/validation/block_mask.py",
    "fa_kernels/validation/score_mods.py",
    "fa_kernels/runtime/device.py",
    "fa_kernels/validation/cu_seqlens.py",
    "fa_kernels/varlen.py",
    "fa_kernels/operators.py",
    "fa_kernels/pooling.py",
    "fa_kernels/launch/combine.py",
    "fa_kernels/launch/fp8.py",
    "fa_kernels/fp8.py",
    "fa_kernels/merging.py",
    "fa_kernels/decoding.py",
    "fa_kernels/launch/call_cache.py",
    "fa_kernels/launch/sizes.py",
    "fa_kernels/validation/opaque_handles.py",
)
# Kernels that compile for Hopper only; the emulation runs their mutants.
HOPPER_SITES = (
    "fa_kernels/kernels/common/dq_layout.py",
    "fa_kernels/kernels/hopper/pipeline.py",
    "fa_kernels/kernels/hopper/forward.py",
    "fa_kernels/kernels/hopper/backward.py",
    "fa_kernels/kernels/hopper/dq.py",
)

_COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="),
}  # fmt: skip
_BINARY = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"), ast.BitAnd: ("&", "|"),
}  # fmt: skip
# Groups of names that can be mistaken for one another.
_CONFUSABLE = [
    pair.split()
    for pair in (
        "M N", "D Dv", "H Hk", "G H", "b h", "b h_k", "bh bh_k", "start_m start_n", "offs_m offs_n",
        "offs_d offs_dv", "offs_m offs_tile", "offs_n offs_tile", "m_block n_block", "lo full_lo",
        "full_hi hi", "any_lo all_lo", "any_hi all_hi", "first last", "before after",
        "seqlen_here seqlen_there", "seqlen_q seqlen_k", "window_left window_right",
        "BLOCK_M BLOCK_N", "BLOCK_D BLOCK_DV", "BLOCK_HERE BLOCK_THERE", "keys values",
        "queries douts", "k_t v_t", "dk dv", "lse2 delta", "lse lse2", "m_i m_new", "m_new m_pivot",
        "out dout", "M M_padded", "scores dp", "p ds", "rows columns",
        "q dout", "sm_scale qk_scale", "lse delta", "dq dk", "offs_m rows", "valid live",
        "place_q place_k", "rows_q rows_k", "place b",
        "pool_rows pool_keys", "rows_each keys_each", "row_blocks key_blocks", "row_span key_span",
        "end_m end_n", "offs_tile_m offs_tile_n",
        *(f"stride_{x}{a} stride_{x}{b}" for x in "qo" for a, b in ("bh", "hm", "md")),
        *(f"stride_{x}{a} stride_{x}{b}" for x in "kv" for a, b in ("bh", "hn", "nd")),
    )
]  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A file's text, with the place of every line."""

    file: str
    text: str

    @cached_property
    def _starts(self) -> list[int]:
        """The offset of each line."""
        return [0, *accumulate(map(len, self.text.splitlines(keepends=True)))]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The start and end offsets of a node's text."""
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def of(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end]


# The reason for which mutants of a line survive.
_EQUIVALENT = re.compile(r"# equivalent: (.+)")
# A change: the span of the text to replace, and the new text.
Change = tuple[tuple[int, int], str]
# An operator takes a file, a node of a function in it, and the names that the function uses.
Operator = Callable[[Source, ast.AST, set[str]], Iterator[Change]]


def _symbol(source: Source, left: ast.AST, right: ast.AST, old: str, new: str) -> Change:
    """Replaces the operator's symbol between two operands."""
    start, end = source.span(left)[1], source.span(right)[0]
    at = start + source.text[start:end].index(old)
    return (at, at + len(old)), new


def compare(source: Source, node: ast.AST, _names: set[str]) -> Iterator[Change]:
    """Exchanges < and <=, > and >=, == and !=."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        yield _symbol(source, node.left, node.comparators[0], *_COMPARISONS[type(node.ops[0])])


def arithmetic(source: Source, node: ast.AST, _names: set[str]) -> Iterator[Change]:
    """Exchanges plus and minus, times and divide, and ``and`` and ``or``."""
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        yield _symbol(source, node.left, node.right, *_BINARY[type(node.op)])


def drop_operand(source: Source, node: ast.AST, _names: set[str]) -> Iterator[Change]:
    """Replaces an operation by one operand, as if a rescale or an offset were forgotten."""
    if isinstance(node, ast.BinOp):
        yield source.span(node), f"({source.of(node.left)})"
        if isinstance(node.op, ast.Mult | ast.Add | ast.BitAnd):
            yield source.span(node), f"({source.of(node.right)})"


def off_by_one(source: Source, node: ast.AST, _names: set[str]) -> Iterator[Change]:
    """Adds one to an integer."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield source.span(node), str(node.value + 1)


def infinity(source: Source, node: ast.AST, _names: set[str]) -> Iterator[Change]:
    """Exchanges 0.0 and -inf."""
    if isinstance(node, ast.Constant) and type(node.value) is float and node.value == 0:
        yield source.span(node), '(-float("inf"))'
    if isinstance(node, ast.UnaryOp | ast.Call) and source.of(node).lstrip("-") == 'float("inf")':
        yield source.span(node), "0.0"


def drop_sign(source: Source, node: ast.AST, _names: set[str]) -> Iterator[Change]:
    """Drops a minus sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield source.span(node), source.of(node.operand)


def drop_call(source: Source, node: ast.AST, _names: set[str]) -> Iterator[Change]:
    """Replaces a select, minimum, maximum, transpose, cast or rounding up by an argument."""
    if not isinstance(node, ast.Call):
        return
    # Gluon (gl) has the functions of Triton's language (tl).
    name = re.sub(r"^gl\.", "tl.", source.of(node.func))
    arguments = [source.of(argument) for argument in node.args]
    if name == "tl.where":
        yield from ((source.span(node), f"({x})") for x in arguments[1:])
    elif name in ("min", "max", "tl.minimum", "tl.maximum"):
        yield from ((source.span(node), f"({x})") for x in arguments)
    elif name in ("tl.trans", "tl.cast", "tl.exp2", "tl.log", "tl.multiple_of"):
        yield source.span(node), f"({arguments[0]})"
    elif name in ("tl.cdiv", "triton.cdiv"):
        yield source.span(node), f"({arguments[0]} // {arguments[1]})"
    elif isinstance(node.func, ast.Attribute) and node.func.attr == "to":
        yield source.span(node), f"({source.of(node.func.value)})"


def drop_argument(source: Source, node: ast.AST, _names: set[str]) -> Iterator[Change]:
    """Drops a keyword argument; ``other`` of a load is dropped with its mask."""
    if not isinstance(node, ast.Call):
        return
    for keyword in node.keywords:
        if keyword.arg is None:
            continue
        gone = {keyword.arg, "other"} if keyword.arg == "mask" else {keyword.arg}
        kept = [source.of(x) for x in node.args]
        kept += [source.of(x) for x in node.keywords if x.arg not in gone]
        yield source.span(node), f"{source.of(node.func)}({', '.join(kept)})"


def swap_dot(source: Source, node: ast.AST, _names: set[str]) -> Iterator[Change]:
    """Exchanges the operands of a dot, or drops its accumulator."""
    if not isinstance(node, ast.Call) or source.of(node.func) != "tl.dot":
        return
    arguments = [source.of(x) for x in node.args]
    keywords = [source.of(x) for x in node.keywords]
    swapped = [arguments[1], arguments[0], *arguments[2:], *keywords]
    yield source.span(node), f"tl.dot({', '.join(swapped)})"
    if len(arguments) > 2:
        yield source.span(node), f"tl.dot({', '.join([*arguments[:2], *keywords])})"


def exchange_name(source: Source, node: ast.AST, names: set[str]) -> Iterator[Change]:
    """Replaces a variable by a related variable of the function."""
    if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
        return
    for pair in _CONFUSABLE:
        if node.id in pair:
            other = pair[1 - pair.index(node.id)]
            if other in names:
                yield source.span(node), other


def exchange_field(source: Source, node: ast.AST, _names: set[str]) -> Iterator[Change]:
    """Replaces a field by a related one, or the tensor in front of it: q.stride() by k.stride()."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        for a, b in (("q", "k"), ("k", "v"), ("v", "dout"), ("dout", "q"), ("forward", "dq"),
                     ("dkdv", "dq"), ("dq", "dkdv"), ("seqlens_q", "seqlens_k"),
                     ("window_left", "window_right"), ("block_m", "block_n")):  # fmt: skip
            if node.value.id == a and node.attr in ("stride", "shape", "dtype"):
                yield source.span(node.value), b
            if node.attr == a:
                yield source.span(node), f"{node.value.id}.{b}"


def condition(source: Source, node: ast.AST, _names: set[str]) -> Iterator[Change]:
    """Makes the condition of an ``if`` always true, and always false."""
    if isinstance(node, ast.If | ast.IfExp):
        yield source.span(node.test), "True"
        yield source.span(node.test), "False"


OPERATORS = (
    compare, arithmetic, drop_operand, off_by_one, infinity, drop_sign, drop_call, drop_argument,
    swap_dot, exchange_name, exchange_field, condition,
)  # fmt: skip


def draw(made: Sequence[Mutant], number: int, seed: int) -> list[Mutant]:
    """A stratified draw: each file, and in it each operator, has its share. In the order of made.

    Args:
        made: Mechanical mutants.
        number: The size of the draw; all mutants if there are fewer.
        seed: Seed of the draw.
    """
    number = min(number, len(made))
    # Every k-th of the sorted mutants, for a k that need not be a whole number.
    order = sorted(range(len(made)), key=lambda i: (made[i].edits[0].file, made[i].origin, i))
    start = random.Random(seed).random()
    return [
        made[i] for i in sorted(order[int((j + start) * len(made) / number)] for j in range(number))
    ]


def mechanical(
    sources: Mapping[str, str],
    sites: Sequence[str] = SITES,
    operators: Sequence[Operator] = OPERATORS,
    *,
    constants: bool = False,
) -> list[Mutant]:
    """Every mutant that the operators make of some files, in the order of the text.

    Args:
        sources: Path from the root of the repository to text.
        sites: Paths of the files.
        operators: Functions that take a node and yield changes.
        constants: Also mutate assignments of modules and classes.
    """
    return [
        mutant
        for file in sites
        for mutant in _of_file(Source(file, sources[file]), operators, constants)
    ]


def _of_file(source: Source, operators: Sequence[Operator], constants: bool) -> Iterator[Mutant]:
    counts: Counter[str] = Counter()
    texts: set[str] = set()
    file = "/".join(source.file.split("/")[-2:])
    body = ast.parse(source.text).body
    scopes = [(name, _body(of), {x.arg for x in of.args.args}) for name, of in _functions(body)]
    if constants:
        scopes.insert(0, ("constants", list(_assigned(body)), set()))
    for name, statements, arguments in scopes:
        nodes = [x for statement in statements for x in _walked(statement)]
        names = arguments | {x.id for x in nodes if isinstance(x, ast.Name)}
        placed = [x for x in nodes if hasattr(x, "lineno")]
        for node in sorted(placed, key=lambda x: (x.lineno, x.col_offset)):
            for operator in operators:
                for span, new in operator(source, node, names):
                    counted = f"{file}:{name} {operator.__name__}"
                    # Duplicates are numbered too, so that one operator's numbers do not depend on
                    # another operator.
                    counts[counted] += 1
                    text = source.text[: span[0]] + new + source.text[span[1] :]
                    if text not in texts and new.strip("()") != source.text[slice(*span)]:
                        texts.add(text)
                        yield _mutant(source, f"{counted} {counts[counted]}", span, new)


def _functions(body: list[ast.stmt]) -> Iterator[tuple[str, ast.FunctionDef]]:
    """(name, function) of a module's functions and, as ``Class.method``, of its methods."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            yield statement.name, statement
        elif isinstance(statement, ast.ClassDef):
            for name, function in _functions(statement.body):
                yield f"{statement.name}.{name}", function


def _assigned(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The assignments of modules and classes, except to dunder names."""
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from _assigned(statement.body)
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        is_special = isinstance(targets[0], ast.Name) and targets[0].id.startswith("__")
        value = getattr(statement, "value", None)
        if isinstance(statement, ast.Assign | ast.AnnAssign) and value and not is_special:
            yield ast.Expr(value)


def _walked(node: ast.AST) -> Iterator[ast.AST]:
    """A node and its descendants, except layouts: Gluon rejects a wrong one or it has no effect."""
    yield node
    for child in ast.iter_child_nodes(node):
        callee = child.func if isinstance(child, ast.Call) else None
        if not (isinstance(callee, ast.Attribute) and callee.attr.endswith("Layout")):
            yield from _walked(child)


def _body(function: ast.FunctionDef) -> list[ast.stmt]:
    """The statements after the docstring."""
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def _mutant(source: Source, key: str, span: tuple[int, int], new: str) -> Mutant:
    """The mutant of a change, named by its key and by the old and new lines."""
    text = source.text
    start = text.rfind("\n", 0, span[0]) + 1
    end = text.index("\n", span[1])
    changed = text[start : span[0]] + new + text[span[1] : end]
    name = f"{key}: {_short(text[start:end])} -> {_short(changed)}"
    edit = _unique(source, start, end, changed)
    above = text[:start].splitlines()[-1:]
    comments = [*(x for x in above if x.lstrip().startswith("#")), *text[start:end].splitlines()]
    reasons = [found[1] for x in comments if (found := _EQUIVALENT.search(x))]
    return Mutant(name, (edit,), key.split()[1], equivalent="; ".join(reasons), key=key)


def _short(lines: str) -> str:
    """Lines joined into one, single-spaced."""
    return re.sub(r"\s+", " ", lines).strip()


def _unique(source: Source, start: int, end: int, changed: str) -> Edit:
    """The edit, extended by whole lines before the change until its text is unique."""
    text = source.text
    first = start
    while text.count(text[first:end]) > 1:
        first = text.rindex("\n", 0, first - 1) + 1
    return Edit(source.file, text[first:end], text[first:start] + changed)
