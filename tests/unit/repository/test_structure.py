"""The project's rules of structure: imports, exports, names, tolerances, allocations."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Folders that fa_verify links to, and the names under which they are imported.
LINKED = {
    "oracles": "fa_verify.oracles",
    "properties": "fa_verify.properties",
    "tests/conformance": "fa_verify.conformance",
}
# Folders that each folder may import; subfolders without a line belong to their parent.
ORACLES = (
    "oracles", "oracles/calls", "oracles/formats", "oracles/masks", "oracles/reference",
    "oracles/bounds",
)  # fmt: skip
PROPERTIES = tuple(
    f"properties/{name}"
    for name in (
        *("inputs", "problems", "kernels", "running", "kinds", "guarantees", "search"),
        "regression",
    )
)
PRODUCT = (
    "fa_verify",
    "fa_verify/adapters",
    "fa_verify/diagnosis",
    "fa_verify/probing",
    "fa_verify/pytest_plugin",
    "fa_verify/reporting",
)
SIMULATOR = ("fa_verify/simulator/interpreter", "fa_verify/simulator/gluon")
ARROWS = {
    "fa_kernels/runtime": (),
    "fa_kernels/kernels/common": (),
    "fa_kernels/kernels/hopper": ("fa_kernels/kernels/common",),
    "fa_kernels/kernels/portable": ("fa_kernels/kernels/common",),
    "fa_kernels/schedule": ("fa_kernels", "fa_kernels/kernels/portable", "fa_kernels/runtime"),
    "fa_kernels/validation": ("fa_kernels", "fa_kernels/schedule", "fa_kernels/runtime"),
    "fa_kernels/launch": (
        "fa_kernels",
        "fa_kernels/kernels/common",
        "fa_kernels/kernels/hopper",
        "fa_kernels/kernels/portable",
        "fa_kernels/runtime",
        "fa_kernels/validation",
    ),
    "fa_kernels": (
        "fa_kernels/kernels/portable",
        "fa_kernels/launch",
        "fa_kernels/runtime",
        "fa_kernels/schedule",
        "fa_kernels/validation",
    ),
    "oracles": ("oracles/formats", "oracles/masks"),
    "oracles/masks": ("oracles",),
    # A call is a value. The truth about it is computed from tensors, by the folders below.
    "oracles/calls": ("oracles", "oracles/formats", "oracles/masks"),
    "oracles/formats": (),
    "oracles/reference": ("oracles", "oracles/formats", "oracles/masks"),
    "oracles/bounds": ("oracles", "oracles/formats", "oracles/masks", "oracles/reference"),
    # The second writing shares nothing with the first.
    "oracles/bounds/in_numpy": (
        "oracles",
        "oracles/formats",
        "oracles/masks",
        "oracles/reference",
    ),
    "properties": (),
    "properties/inputs": ORACLES,
    "properties/problems": (*ORACLES, "properties/inputs"),
    "properties/kernels": (*ORACLES, "properties/inputs", "properties/problems"),
    "properties/running": (*ORACLES, "properties/inputs", "properties/kernels"),
    # Kinds do not judge: they import no check.
    "properties/kinds": (
        *ORACLES,
        "properties/running",
        "properties/inputs",
        "properties/problems",
        "properties/kernels",
    ),
    "properties/guarantees": (
        *ORACLES,
        "properties/running",
        "properties/inputs",
        "properties/kinds",
        "properties/kernels",
    ),
    "properties/search": (*ORACLES, *PROPERTIES),
    "properties/regression": (
        *ORACLES,
        "properties/guarantees",
        "properties/running",
    ),
    "fa_verify/simulator": (),
    "fa_verify/simulator/interpreter": (),
    "fa_verify/simulator/gluon": (),
    "fa_verify/adapters": (*ORACLES, *PROPERTIES, "fa_kernels"),
    "fa_verify/diagnosis": (*ORACLES, *PROPERTIES),
    # Its command prepares the process as the plugin does, and takes the names of the registry.
    "fa_verify/probing": (
        *ORACLES,
        *PROPERTIES,
        "fa_verify/simulator/interpreter",
        "fa_verify",
        "fa_verify/adapters",
        "fa_verify/pytest_plugin",
    ),
    # fa_verify compares the forms of a mask with the tiles that kernels visit.
    "fa_verify": (
        *ORACLES,
        *PROPERTIES,
        *SIMULATOR,
        "fa_verify/adapters",
        "fa_verify/probing",
        "fa_kernels",
        "fa_kernels/kernels/common",
        "fa_kernels/schedule",
    ),
    "fa_verify/reporting": (*ORACLES, *PROPERTIES, "fa_verify"),
    "fa_verify/pytest_plugin": (*ORACLES, *PROPERTIES, *SIMULATOR, *PRODUCT),
    "tests/conformance": (*ORACLES, *PROPERTIES, *SIMULATOR, *PRODUCT),
    "benchmarks": (*ORACLES, *PROPERTIES, *SIMULATOR, *PRODUCT, "fa_kernels"),
    "tests": None,
}
PACKAGES = ("oracles", "properties", "fa_verify/simulator", "fa_kernels", "benchmarks")
NAMES_WITHOUT_AN_IDEA = {"utils", "util", "common", "helpers", "helper", "misc"}
# Only derived bounds decide in these folders.
JUDGES = ("properties", "tests/conformance")
COMPARISONS = {"allclose", "assert_allclose", "assert_close", "isclose", "approx"}
# A module that measures strategies on samples of a fixed size, which profiles must not change.
MEASURES_STRATEGIES = "tests/unit/properties/problems/sampling.py"


def modules(*folders: str) -> list[str]:
    """Paths of all modules below the folders, relative to the root; links are not followed."""
    found = []
    for folder in folders:
        for place, inner, files in os.walk(ROOT / folder):
            inner[:] = [name for name in inner if not (Path(place) / name).is_symlink()]
            found += [Path(place, name) for name in files if name.endswith(".py")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


@cache
def module_names() -> dict[str, str]:
    """Paths of modules by their import names."""
    names = {}
    for path in modules("fa_kernels", *LINKED, "fa_verify", "tests", "benchmarks"):
        name = path.removesuffix(".py").removesuffix("/__init__")
        for folder, linked in LINKED.items():
            if name == folder or name.startswith(f"{folder}/"):
                name = linked + name.removeprefix(folder)
        names[name.replace("/", ".")] = path
    return names


def folder_of(path: str) -> str:
    """The folder of a module that has a line in ARROWS."""
    folder = Path(path).parent
    while folder.as_posix() not in ARROWS:
        folder = folder.parent
    return folder.as_posix()


@cache
def parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), path)


def is_a_docstring(tree: ast.Module) -> bool:
    """Whether the module is empty except for a docstring."""
    return len(tree.body) <= 1 and all(isinstance(node, ast.Expr) for node in tree.body)


def imported(path: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, also in functions and by name, except under TYPE_CHECKING."""
    tree = parsed(path)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and name_of(node.test) == "TYPE_CHECKING"
        for inner in node.body
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if whole in module_names() else str(node.module)
        elif isinstance(node, ast.Call) and name_of(node.func) in ("import_module", "__import__"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def name_of(node: ast.expr) -> str:
    """The last part of a dotted name, empty for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def exported(tree: ast.Module) -> list[str] | None:
    """The module's ``__all__``, or None."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [name_of(x) for x in node.targets] == ["__all__"]:
            return ast.literal_eval(node.value)
    return None


def bound(tree: ast.Module) -> set[str]:
    """The names that a module's top level binds, including those under TYPE_CHECKING."""
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
    """Names in the exported tables, which are reached by a key of the table."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(name_of(target) in names for target in targets):
                found |= {x.id for x in ast.walk(node.value) if isinstance(x, ast.Name)}
    return found


def public_definitions(tree: ast.Module) -> set[str]:
    """The functions and classes of the top level without a leading underscore.

    ``main`` is left out, because ``python -m`` runs it and nothing imports it.
    """
    definitions = (x for x in tree.body if isinstance(x, ast.FunctionDef | ast.ClassDef))
    return {x.name for x in definitions if not x.name.startswith("_") and x.name != "main"}


@pytest.mark.parametrize("folder", ARROWS)
def test_imports_follow_the_arrows(folder):
    allowed = ARROWS[folder]
    if allowed is None:
        return
    wrong = [
        f"{path}:{line} imports {name}"
        for path in modules(folder)
        if folder_of(path) == folder
        for line, name in imported(path)
        if name in module_names() and folder_of(module_names()[name]) not in (folder, *allowed)
    ]
    assert wrong == []


def test_imports_have_no_cycles():
    """Imports inside functions count; imports under TYPE_CHECKING do not."""
    edges = {
        path: {module_names()[name] for _, name in imported(path) if name in module_names()}
        for path in module_names().values()
    }
    finished: set[str] = set()

    def visit(path: str, before: tuple[str, ...] = ()) -> None:
        assert path not in before, " -> ".join((*before[before.index(path) :], path))
        if path in finished:
            return
        for other in sorted(edges[path]):
            visit(other, (*before, path))
        finished.add(path)

    for path in edges:
        visit(path)


def test_the_suite_is_imported_by_one_name():
    folders = {name.split("/")[0] for name in LINKED} - {"tests"}
    wrong = [
        f"{path}:{line} imports {name}"
        for path in modules("fa_kernels", *LINKED, "fa_verify", "tests", "benchmarks")
        for line, name in imported(path)
        if name.split(".")[0] in folders or name.startswith("tests.conformance")
    ]
    assert wrong == []


def test_the_suite_needs_nothing_of_its_tests():
    wrong = [
        f"{path}:{line} imports {name}"
        for path in modules("fa_kernels", *LINKED, "fa_verify")
        for line, name in imported(path)
        if name.split(".")[0] == "tests"
    ]
    assert wrong == []


@pytest.mark.parametrize("link", LINKED)
def test_a_link_leads_to_its_folder(link):
    place = ROOT / LINKED[link].replace(".", "/")
    assert place.is_symlink()
    assert place.resolve() == ROOT / link


def test_every_package_says_what_is_in_it():
    silent = [
        path
        for path in modules("fa_kernels", *LINKED, "fa_verify")
        if path.endswith("__init__.py") and not ast.get_docstring(parsed(path))
    ]
    assert silent == []


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
def test_no_module_has_a_name_without_meaning(folder):
    assert [x for x in modules(folder) if Path(x).stem in NAMES_WITHOUT_AN_IDEA] == []


def calls(path: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call))


def test_modules_that_judge_hold_no_tolerances():
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
        if path != "fa_kernels/runtime/allocation.py" and allocates(call)
    ]
    assert wrong == []


def allocates(call: ast.Call) -> bool:
    """Whether the call allocates a tensor, which a test must be able to surround or to poison."""
    name = name_of(call.func)
    if name.startswith("new_") or name.endswith("_like"):
        return True
    of_torch = isinstance(call.func, ast.Attribute) and name_of(call.func.value) == "torch"
    return of_torch and name in ("empty", "zeros", "ones", "full", "empty_strided")
