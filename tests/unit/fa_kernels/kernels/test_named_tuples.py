"""NamedTuples that kernels pass to each other: Triton can read every field."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

tl = pytest.importorskip("triton.language")

import fa_kernels.kernels  # noqa: E402

FOLDER = Path(fa_kernels.kernels.__file__).parent


def fields() -> dict[str, list[str]]:
    """The fields of every NamedTuple of the kernels."""
    found = {}
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases):
                annotated = [x for x in node.body if isinstance(x, ast.AnnAssign)]
                name = f"{path.relative_to(FOLDER).as_posix()}:{node.name}"
                found[name] = [ast.unparse(x.target) for x in annotated]
    return found


def test_no_field_has_the_name_of_an_attribute_of_tritons_tuple():
    """A kernel sees a NamedTuple as a ``tl.tuple``, whose own attributes hide fields."""
    made = tl.tuple([])
    taken = {*vars(made), *dir(type(made))}
    assert {"values", "type"} <= taken
    named = fields()
    assert len(named) > 30
    hidden = {name: taken & set(of) for name, of in named.items() if taken & set(of)}
    assert hidden == {}
