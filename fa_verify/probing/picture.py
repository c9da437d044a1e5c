"""Pictures of the order of a sum: words, text for a terminal, SVG."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

from fa_verify.probing.summation import Sum, Tree, leaves

__all__ = ["blocks", "in_words", "svg", "text"]

_COLUMNS = 64
_MOST_LINES = 16
_PAIR = 2


def blocks(tree: Tree) -> list[Tree]:
    """Return the parts of a chain, in the order in which they are added.

    At each node the part of most terms is the sum so far, and the others are added to it at once.
    The chain ends where they have fewer terms than those that are added later. The first two parts
    of a chain have no order, as a + b is b + a: they are put in the order of the others.
    """
    chain: list[Tree] = []
    while not isinstance(tree, int):
        sizes = [len(leaves(part)) for part in tree]
        heavy = sizes.index(max(sizes))
        others = tuple(part for index, part in enumerate(tree) if index != heavy)
        added = others[0] if len(others) == 1 else others
        width = len(leaves(added))
        if chain and (len(leaves(chain[-1])) != width or sum(sizes) <= width):
            break
        chain.append(added)
        tree = tree[heavy]
    found = [tree, *reversed(chain)]
    firsts = [min(leaves(part)) for part in found]
    falls = len(found) > _PAIR and firsts[1] > firsts[_PAIR]
    if len(found) >= _PAIR and (firsts[0] < firsts[1]) == falls:
        found[:_PAIR] = reversed(found[:_PAIR])
    return found


def in_words(tree: Tree, axis: str) -> str:
    """Describe an order in words, from the outermost chain to the innermost."""
    said = []
    while not isinstance(tree, int):
        parts = blocks(tree)
        counts = [len(leaves(part)) for part in parts]
        firsts = [min(leaves(part)) for part in parts]
        ascending = all(a < b for a, b in pairwise(firsts))
        descending = all(a > b for a, b in pairwise(firsts))
        way = "in order" if ascending else "backwards" if descending else "out of order"
        at_once = all(isinstance(part, int) for part in tree)
        if at_once and len(tree) > 2:
            said.append(f"{len(tree)} {axis} at once")
            break
        if max(counts) == 1:
            said.append(f"{len(parts)} {axis} one by one, {way}")
            break
        same = len({*counts}) == 1
        sizes = f"{counts[0]}" if same else " + ".join(map(str, counts[:4]))
        more = " + ..." if not same and len(counts) > 4 else ""
        said.append(
            f"{len(parts)} blocks of {sizes} {axis}, {way}"
            if same
            else f"{sizes}{more} {axis}, {way}"
        )
        tree = parts[0] if same else max(parts, key=lambda part: len(leaves(part)))
    return "; each of ".join(said) or f"one of the {axis}"


def text(which: Sum) -> list[str]:
    """Return lines for a terminal: one for each step of the outermost chain."""
    if which.tree == ():
        return [f"{which.output} along the {which.axis}, {which.dtype}: undecided, {which.why}"]
    head = (
        f"{which.output} along the {which.axis}, {which.dtype}: {in_words(which.tree, which.axis)}"
    )
    n = len(leaves(which.tree))
    width = min(n, _COLUMNS)
    parts = blocks(which.tree)
    lines = [head]
    if max(len(leaves(part)) for part in parts) == 1:
        return lines
    for number, part in enumerate(parts[:_MOST_LINES]):
        cells = [" "] * width
        for leaf in leaves(part):
            cells[leaf * width // n] = "#"
        lines.append(f"  {number:3} |{''.join(cells)}|")
    if len(parts) > _MOST_LINES:
        lines.append(f"  ... {len(parts) - _MOST_LINES} more")
    return lines


def svg(which: Sum) -> str:
    """Return the tree as a picture: terms at the bottom, the final sum at the top."""
    order = sorted(leaves(which.tree)) if which.tree != () else []
    step, height = 6, 300
    width = step * (len(order) + 2)
    root = ElementTree.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height + 40}",
        width=str(width), height=str(height + 40),
    )  # fmt: skip
    title = ElementTree.SubElement(root, "title")
    title.text = text(which)[0]
    label = ElementTree.SubElement(
        root, "text", {"x": "4", "y": "14", "font-size": "12", "font-family": "sans-serif"}
    )
    label.text = title.text
    if which.tree != ():
        place = {leaf: (index + 1.5) * step for index, leaf in enumerate(order)}
        _draw(root, which.tree, place, _depth(which.tree), height)
    return ElementTree.tostring(root, encoding="unicode")


def _depth(tree: Tree) -> int:
    return 0 if isinstance(tree, int) else 1 + max(_depth(part) for part in tree)


def _draw(
    root: ElementTree.Element, tree: Tree, place: dict[int, float], deepest: int, height: int
) -> tuple[float, float]:
    """Draw a subtree, and return the place of its node."""
    level = _depth(tree)
    y = 30 + height * (1 - level / max(1, deepest))
    if isinstance(tree, int):
        return place[tree], y
    nodes = [_draw(root, part, place, deepest, height) for part in tree]
    for x, below in nodes:
        _line(root, x, below, x, y)
    _line(root, min(x for x, _ in nodes), y, max(x for x, _ in nodes), y)
    return sum(x for x, _ in nodes) / len(nodes), y


def _line(root: ElementTree.Element, x1: float, y1: float, x2: float, y2: float) -> None:
    places = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    ElementTree.SubElement(
        root, "line", {name: f"{x:.1f}" for name, x in places.items()} | {"stroke": "#333"}
    )
