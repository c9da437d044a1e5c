"""The order of a sum: found from counts of terms, described and drawn."""

from __future__ import annotations

import functools
import json
from xml.etree import ElementTree

import pytest
import torch

from fa_verify.oracles.problem import Problem
from fa_verify.probing.picture import blocks, in_words, svg, text
from fa_verify.probing.summation import Sum, UnclearError, leaves, order_of, tree_of
from fa_verify.properties.kernels.subject import Subject


def chain(parts):
    """Add parts one after the other."""
    return functools.reduce(lambda total, part: (total, part), parts)


def pairwise(first, end):
    middle = (first + end) // 2
    return first if end - first == 1 else (pairwise(first, middle), pairwise(middle, end))


def fused(n, width):
    """Add ``width`` terms at once to the sum so far."""
    return functools.reduce(
        lambda total, start: (total, *range(start, start + width)), range(width, n, width),
        tuple(range(width)),
    )  # fmt: skip


def tiles(n, width, backwards=False):
    starts = range(0, n, width)
    return chain([chain(range(x, x + width)) for x in (starts[::-1] if backwards else starts)])


def summed(tree, terms):
    """The sum of a tree in float64: terms that are added at once lose what lies below 2**-53."""
    if isinstance(tree, int):
        return terms[tree]
    parts = torch.stack([summed(part, terms) for part in tree])
    last = 2.0 ** (torch.frexp(parts.abs().amax(0))[1] - 53).double()
    return ((parts / last).trunc() * last).sum(0)


def counts_of(tree):
    """Count by swamping, as the experiment does with a kernel."""
    n = len(leaves(tree))

    def counts(pairs):
        terms = torch.ones(n, len(pairs), dtype=torch.float64)
        for column, (i, j) in enumerate(pairs):
            terms[i, column], terms[j, column] = 2.0**80, -(2.0**80)
        return [n - int(x) for x in summed(tree, terms).tolist()]

    return counts


def shape(tree):
    """A tree without the order of its parts: a + b is b + a."""
    return tree if isinstance(tree, int) else frozenset(shape(part) for part in tree)


TREES = {
    "one by one": (chain(range(32)), "32 keys one by one, in order"),
    "tiles": (tiles(32, 8), "4 blocks of 8 keys, in order; each of 8 keys one by one, in order"),
    "backwards": (
        tiles(32, 8, True), "4 blocks of 8 keys, backwards; each of 8 keys one by one, in order"
    ),
    "at once": (tuple(range(32)), "32 keys at once"),
    "fused": (fused(32, 8), "4 blocks of 8 keys, in order; each of 8 keys at once"),
    "two terms": ((0, 1), "2 keys one by one, in order"),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_a_tree_is_found_and_described(name):
    tree, words = TREES[name]
    found = tree_of(len(leaves(tree)), counts_of(tree))
    assert shape(found) == shape(tree)
    assert in_words(found, "keys") == words


def test_pairwise_sums_are_found():
    tree = pairwise(0, 32)
    assert shape(tree_of(32, counts_of(tree))) == shape(tree)


def test_few_counts_are_asked_for_a_chain_of_tiles():
    asked = []

    def counts(pairs):
        asked.extend(pairs)
        return counts_of(tiles(64, 16))(pairs)

    tree_of(64, counts)
    assert len(asked) < 64 * 63 / 4


def test_counts_of_no_tree_are_refused():
    counts = counts_of(tiles(32, 8))

    with pytest.raises(UnclearError, match="32 terms are joined with term 0, and 7 counted"):
        tree_of(32, lambda pairs: [7 for _ in pairs])
    # Not asked by the search; a random pair that is asked again contradicts the tree.
    with pytest.raises(UnclearError):
        tree_of(32, lambda pairs: [32 if i > 8 else x for (i, _), x in zip(
            pairs, counts(pairs), strict=True)])  # fmt: skip


def test_an_operand_that_overflows_leaves_the_order_undecided():
    """k times the scale leaves fp16, so that the result is NaN."""

    def kernel(q, k, v, *, mask, sm_scale):
        return torch.softmax(q.float() @ (k * sm_scale).float().mT, -1).to(q.dtype) @ v

    problem = Problem(M=8, N=8, D=8, Dv=8, dtype="fp16", sm_scale=16.0)
    found = order_of(Subject.of(kernel, "kernel"), problem, "dq")
    assert found.tree == ()
    assert "leave nan of 8" in found.why


def test_pictures_show_every_block():
    which = Sum("out", "bf16", tiles(256, 64), "", "")
    lines = text(which)
    assert lines[0].startswith("out along the keys, bf16: 4 blocks of 64 keys, in order")
    assert lines[2] == "    1 |" + 16 * " " + 16 * "#" + 32 * " " + "|"
    root = ElementTree.fromstring(svg(which))
    # A vertical line for every part of a node, and a horizontal one for every node.
    drawn = [x for x in root.iter() if x.tag.endswith("line")]
    assert len(drawn) == 3 * 255
    assert json.loads(which.to_json())["tree"] == json.loads(json.dumps(which.tree))
    assert len(blocks(which.tree)) == 4


def test_an_undecided_order_says_why():
    which = Sum("dq", "fp16", (), "it raised", "")
    assert text(which) == ["dq along the keys, fp16: undecided, it raised"]
    assert json.loads(which.to_json())["undecided"] == "it raised"
    assert "undecided" in svg(which)
