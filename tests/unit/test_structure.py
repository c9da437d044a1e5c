"""The project's own rules: who imports whom, what a module exports, where tolerances come from."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What each may import of the others.
ARROWS = {
    "oracles": set(),
    "properties": {"oracles"},
    "fa_kernels": set(),
    "benchmarks": {"oracles", "properties", "fa_kernels"},
    "tests": {"oracles", "properties", "fa_kernels", "benchmarks"},
}
PACKAGES = ("oracles", "properties", "fa_kernels", "benchmarks")
NAMES_WITHOUT_AN_IDEA = {"utils", "util", "common", "helpers", "helper", "misc"}
# Nothing but derived bounds decides here.
JUDGES = ("properties", "tests/conformance")
COMPARISONS = {"allclose", "assert_allclose", "assert_close", "isclose", "approx"}
# Measures the strategies, on samples of a fixed size: no profile is to change them.
MEASURES_STRATEGIES = "tests/unit/drawing.py"


def modules(*folders: str) -> list[str]:
    """Paths of all modules below the folders, relative to the root."""
    return sorted(
        str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py")
    )


@cache
def parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), path)


def is_a_docstring(tree: ast.Module) -> bool:
    """Whether the module says what its package is, and holds nothing."""
    return len(tree.body) <= 1 and all(isinstance(node, ast.Expr) for node in tree.body)


def imported(path: str) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of every import, wherever it stands, also by name."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            own = Path(path).parts[0]
            yield node.lineno, own if node.level else (node.module or "").split(".")[0]
        elif isinstance(node, ast.Call) and name_of(node.func) in ("import_module", "__import__"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value.split(".")[0]


def name_of(node: ast.expr) -> str:
    """The last part of a dotted name, empty for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def exported(tree: ast.Module) -> list[str] | None:
    """The module's ``__all__``, None where there is none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [name_of(x) for x in node.targets] == ["__all__"]:
            return ast.literal_eval(node.value)
    return None


def bound(tree: ast.Module) -> set[str]:
    """The names that a module's top level binds, those for type checkers alone included."""
    names: set[str] = set()
    typing = [x for node in tree.body if isinstance(node, ast.If) for x in node.body]
    for node in [*tree.body, *typing]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)
            }
    return names


def tabled(tree: ast.Module, names: list[str]) -> set[str]:
    """What stands in the tables among ``names``: it is reached there, under the table's key."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(name_of(target) in names for target in targets):
                found |= {x.id for x in ast.walk(node.value) if isinstance(x, ast.Name)}
    return found


def public_definitions(tree: ast.Module) -> set[str]:
    """The functions and classes of the top level without a leading underscore.

    ``main`` is left out: it is what ``python -m`` runs, not what anybody imports.
    """
    definitions = (x for x in tree.body if isinstance(x, ast.FunctionDef | ast.ClassDef))
    return {x.name for x in definitions if not x.name.startswith("_") and x.name != "main"}


@pytest.mark.parametrize("folder", ARROWS)
def test_imports_follow_the_arrows(folder):
    forbidden = set(ARROWS) - ARROWS[folder] - {folder}
    wrong = [
        f"{path}:{line} imports {package}"
        for path in modules(folder)
        for line, package in imported(path)
        if package in forbidden
    ]
    assert wrong == []


@pytest.mark.parametrize("path", modules(*PACKAGES))
def test_a_module_exports_its_public_definitions_and_nothing_that_it_lacks(path):
    tree = parsed(path)
    if is_a_docstring(tree):
        return
    names = exported(tree)
    assert names is not None, "no __all__"
    assert sorted(set(names)) == sorted(names), "twice in __all__"
    assert set(names) - bound(tree) == set(), "in __all__, but not in the module"
    hidden = public_definitions(tree) - set(names) - tabled(tree, names)
    assert hidden == set(), "public, but not in __all__"


@pytest.mark.parametrize("folder", ARROWS)
def test_no_module_is_named_for_no_idea(folder):
    named = {path: {*Path(path).parts[:-1], Path(path).stem} for path in modules(folder)}
    assert [path for path, parts in named.items() if parts & NAMES_WITHOUT_AN_IDEA] == []


def calls(path: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call))


def test_what_judges_holds_no_tolerance_of_its_own():
    wrong = [
        f"{path}:{call.lineno} {name_of(call.func)}"
        for path in modules(*JUDGES)
        for call in calls(path)
        if name_of(call.func) in COMPARISONS
        or {"atol", "rtol"} & {keyword.arg for keyword in call.keywords}
    ]
    assert wrong == []


def test_profiles_choose_the_breadth_of_tests():
    wrong = [
        f"{path}:{call.lineno}"
        for path in modules("tests")
        for call in calls(path)
        if path != MEASURES_STRATEGIES and "max_examples" in {x.arg for x in call.keywords}
    ]
    assert wrong == []


def test_nothing_is_assumed_away():
    wrong = [
        f"{path}:{call.lineno}"
        for path in modules("properties", "tests")
        for call in calls(path)
        if name_of(call.func) == "assume"
    ]
    assert wrong == []


def test_fa_kernels_allocates_in_one_place():
    wrong = [
        f"{path}:{call.lineno} {name_of(call.func)}"
        for path in modules("fa_kernels")
        for call in calls(path)
        if path != "fa_kernels/allocation.py" and allocates(call)
    ]
    assert wrong == []


def allocates(call: ast.Call) -> bool:
    """Whether the call makes a tensor of torch that a test could want to surround or to poison."""
    name = name_of(call.func)
    if name.startswith("new_") or name.endswith("_like"):
        return True
    of_torch = isinstance(call.func, ast.Attribute) and name_of(call.func.value) == "torch"
    return of_torch and name in ("empty", "zeros", "ones", "full", "empty_strided")
