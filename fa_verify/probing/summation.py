"""The order in which a kernel adds: a tree, found by swamping as in FPRev.

Terms are 1 but for one huge number and its negative. A term that is added to the huge number is
lost, and the result counts the others. So it tells how many terms lie below the node that joins the
two. Source: FPRev (arXiv:2411.00442).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fa_verify.oracles.problem import Problem
from fa_verify.probing.experiments import Experiment, Observation, experiment, observe
from fa_verify.probing.rounding import tensors
from fa_verify.probing.trying import attempt
from fa_verify.properties.kernels.subject import Subject

__all__ = ["AXES", "Sum", "Tree", "leaves", "order_of", "tree_of"]

# A term, or the trees whose values are added at once.
Tree = int | tuple["Tree", ...]
Pair = tuple[int, int]
# The output, the axis of its terms, and the experiment that shows them.
AXES = {"out": "keys", "dv": "rows", "dk": "rows", "dq": "keys"}
# Pairs that are asked again for a tree, which must predict them.
_CHECKED = 64


class UnclearError(Exception):
    """The counts are those of no tree; the message says which."""


@dataclass(frozen=True)
class Sum:
    """The order of one sum.

    Args:
        output: "out", "dv", "dk" or "dq".
        dtype: Dtype of the inputs.
        tree: The tree; () if it is undecided.
        why: Why it is undecided.
        replay: An experiment of the tree, one line of JSON.
    """

    output: str
    dtype: str
    tree: Tree
    why: str
    replay: str

    @property
    def axis(self) -> str:
        """The axis of the terms, "keys" or "rows"."""
        return AXES[self.output]

    def to_json(self) -> str:
        """Return one line of JSON, the tree as nested lists of terms."""
        record: dict[str, Any] = {"sum": self.output, "along": self.axis, "dtype": self.dtype}
        record |= {"tree": self.tree} if self.tree != () else {"undecided": self.why}
        return json.dumps(record, separators=(",", ":"))


def leaves(tree: Tree) -> list[int]:
    """Return the terms of a tree, from left to right."""
    if isinstance(tree, int):
        return [tree]
    return [leaf for part in tree for leaf in leaves(part)]


def tree_of(n: int, counts: Callable[[Sequence[Pair]], Sequence[int]]) -> Tree:
    """Return the tree of n terms.

    Args:
        n: Number of terms.
        counts: Function from pairs of terms to the numbers of terms below the nodes that join them.

    Raises:
        UnclearError: The numbers are those of no tree.
    """
    known: dict[Pair, int] = {}
    while True:
        missing: list[Pair] = []
        found = _grown(list(range(n)), known, missing)
        if not missing:
            break
        known |= dict(zip(missing, counts(missing), strict=True))
    assert found is not None
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(n, (_CHECKED, 2), generator=generator).tolist()
    asked = [(min(i, j), max(i, j)) for i, j in drawn if i != j]
    for pair, count in zip(asked, counts(asked), strict=True):
        if _joined(found, *pair) != count:
            raise UnclearError(f"terms {pair} are joined below {count}, which no tree explains")
    return found


def _grown(terms: list[int], known: dict[Pair, int], missing: list[Pair]) -> Tree | None:
    """Return the tree of a subtree's terms, or None and the pairs that have to be asked."""
    first = terms[0]
    pairs = [(first, other) for other in terms[1:]]
    if asked := [pair for pair in pairs if pair not in known]:
        missing += asked
        return None
    tree: Tree | None = first
    count = 1
    for size in sorted({known[pair] for pair in pairs}):
        group = [pair[1] for pair in pairs if known[pair] == size]
        count += len(group)
        if count != size:
            raise UnclearError(f"{count} terms are joined with term {first}, and {size} counted")
        parts = _parts(group, size, known, missing)
        tree = None if tree is None or parts is None else (tree, *parts)
    return tree


def _parts(
    group: list[int], size: int, known: dict[Pair, int], missing: list[Pair]
) -> list[Tree] | None:
    """Return the subtrees of the terms that one node joins, which has ``size`` terms in all."""
    parts: list[Tree] | None = []
    while group:
        pairs = [(group[0], other) for other in group[1:]]
        if asked := [pair for pair in pairs if pair not in known]:
            missing += asked
            return None
        part = [group[0], *(pair[1] for pair in pairs if known[pair] < size)]
        tree = _grown(part, known, missing)
        parts = None if tree is None or parts is None else [*parts, tree]
        group = [term for term in group if term not in part]
    return parts


def _joined(tree: Tree, i: int, j: int) -> int:
    """Return the number of terms below the node that joins two terms."""
    assert not isinstance(tree, int)
    for part in tree:
        inside = leaves(part)
        if i in inside and j in inside:
            return _joined(part, i, j)
    return len(leaves(tree))


@experiment("order")
def _order(subject: Subject, which: Experiment) -> Observation:
    """Count the terms that survive a huge pair; the numbers are the output and pairs of terms.

    Each pair has a column of the operand that is summed with equal weights.
    """
    output = list(AXES)[which.numbers[0]]
    flat = which.numbers[1:]
    pairs = [*zip(flat[::2], flat[1::2], strict=True)]
    problem = which.problem
    columns = problem.Dv if output in ("out", "dv") else problem.D
    n = problem.N if AXES[output] == "keys" else problem.M
    problem = dataclasses.replace(problem, B=-(-len(pairs) // columns))
    B, M, N, Dv = problem.B, problem.M, problem.N, problem.Dv
    huge, unit = (2.0**15, 2.0**-17) if problem.dtype == "fp16" else (2.0**60, 1.0)
    terms = torch.full((B, 1, n, columns), unit, dtype=torch.float64)
    for number, (i, j) in enumerate(pairs):
        entry, column = divmod(number, columns)
        terms[entry, 0, i, column], terms[entry, 0, j, column] = huge, -huge
    weight = 1 / N
    if output == "out":
        inputs = tensors(problem, v=terms)
    elif output == "dv":
        inputs = tensors(problem, dout=terms)
    else:
        weight *= problem.scale
        v, dout = torch.zeros(B, 1, N, Dv), torch.zeros(B, 1, M, Dv)
        dout[..., 0] = 1
        if output == "dk":
            v[:, :, 0, 0], v[:, :, 1, 0] = 1, -1
            inputs = tensors(problem, q=terms, v=v, dout=dout)
        else:
            # dS is the same for all keys but for its sign, as its sum is 0.
            sign = 1.0 - 2 * (torch.arange(N) % 2)
            v[..., 0] = sign
            inputs = tensors(problem, k=terms * sign.view(-1, 1), v=v, dout=dout)
    tried = attempt(subject, problem, inputs, backward=output != "out")
    if tried.got is None:
        return Observation(None, {}, {}, tried.error)
    result = getattr(tried.got, output)
    row = 0 if AXES[output] == "rows" else -1
    got = result[:, 0, row].double().cpu().flatten()[: len(pairs)] / (weight * unit)
    return Observation(n - got, {}, {})


def order_of(subject: Subject, problem: Problem, output: str) -> Sum:
    """Find the order of a sum.

    Args:
        subject: The kernel without its declarations.
        problem: Sizes and dtype; the summed axis has its length. The scale is a power of two.
        output: "out", "dv", "dk" or "dq".
    """
    number = list(AXES).index(output)
    n = problem.N if AXES[output] == "keys" else problem.M
    first = Experiment("order", problem, (number, 0, n - 1))

    def counts(pairs: Sequence[Pair]) -> list[int]:
        numbers = tuple(x for pair in pairs for x in pair)
        seen = observe(subject, Experiment("order", problem, (number, *numbers)))
        if seen.got is None:
            raise UnclearError(seen.error)
        whole = seen.got.round()
        # NaN, as from a prescaled operand that overflows, is no count either.
        counted = ((seen.got - whole).abs() <= 2.0**-3) & (whole >= 2) & (whole <= n)
        if not bool(counted.all()):
            bad = int((~counted).nonzero()[0])
            raise UnclearError(f"terms {pairs[bad]} leave {n - seen.got[bad].item():.6g} of {n}")
        return [int(x) for x in whole.tolist()]

    try:
        return Sum(output, problem.dtype, tree_of(n, counts), "", first.to_json())
    except UnclearError as error:
        return Sum(output, problem.dtype, (), str(error), first.to_json())
