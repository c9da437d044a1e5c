"""Writes the tables that come from results, versions and code into the pages.

``python -m docs.tables`` names the pages that are stale, ``--write`` rewrites them. A table stands
between ``<!-- begin table NAME -->`` and ``<!-- end table -->``; NAME is a key of ``TABLES``.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import numerics_table, same_bits, shapes
from benchmarks.table import markdown
from docs import worked_element
from fa_verify.oracles.outputs import OUTPUTS
from fa_verify.properties.kernels.declared import DECLARATIONS

__all__ = ["TABLES", "main", "pages", "rewritten"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "nvidia-h200"
H100 = ROOT / "results" / "nvidia-h100-80gb-hbm3"
_TABLE = re.compile(r"(<!-- begin table (\S+) -->\n\n?).*?(\n?<!-- end table -->)", re.DOTALL)
_YES_NO = {"True": "yes", "False": "no"}
# The guarantee of each kernel that the README shows.
_SHORT = (
    ("sdpa-cudnn", "G5"),
    ("sdpa-efficient", "G12"),
    ("flex", "G3"),
    ("flash-attn-4", "G3"),
    ("xformers", "G12"),
)


def _findings() -> Mapping[str, Any]:
    return json.loads((RESULTS / "findings.json").read_text(encoding="utf-8"))["subjects"]


def _speeds(
    name: str, folder: Path = RESULTS
) -> dict[tuple[str, str], dict[tuple[str, str], dict[str, str]]]:
    """(problem, causal) to (pass, attention) to a row of the file."""
    with (folder / name).open(encoding="utf-8", newline="") as file:
        found: dict[Any, Any] = {}
        for row in csv.DictReader(file):
            of_problem = found.setdefault((row["problem"], row["causal"]), {})
            of_problem[row["pass"], row["name"]] = row
    return found


def _speed(name: str) -> list[str]:
    """Milliseconds; cuDNN's time over ours, and TF."""

    def ms(row: Mapping[str, str]) -> str:
        return f"{float(row['median_ms']):.3f}"

    def cell(of: Mapping[Any, Any], pass_: str, attention: str) -> str:
        ours, other = of[pass_, attention], of[pass_, "cuDNN"]
        ratio = float(other["median_ms"]) / float(ours["median_ms"])
        # Spaces that do not break: a cell is one line.
        return f"{ms(ours)}\N{NO-BREAK SPACE}({ratio:.2f};\N{NO-BREAK SPACE}{ours['TF']})"

    rows = [
        (
            problem, _YES_NO[causal],
            cell(of, "forward", "ours"), ms(of["forward", "cuDNN"]),
            cell(of, "backward", "ours"), cell(of, "backward", "ours, one pass"),
            ms(of["backward", "cuDNN"]),
        )
        for (problem, causal), of in _speeds(name).items()
    ]  # fmt: skip
    backward = ("backward, deterministic", "backward, deterministic=False", "cuDNN")
    return markdown(("B x N x H x D", "causal", "forward", "cuDNN", *backward), rows)


def _ratios(name: str) -> list[str]:
    """The least and the largest ratio over the problems, against each other attention."""
    speeds = _speeds(name).values()
    others = ("cuDNN", "FlexAttention", "SDPA flash")
    others = tuple(x for x in others if any(("forward", x) in of for of in speeds))
    rows = []
    for title, pass_, attention in (
        ("forward", "forward", "ours"),
        ("backward, deterministic", "backward", "ours"),
        ("backward, `deterministic=False`", "backward", "ours, one pass"),
    ):
        cells = []
        for other in others:
            found = [
                float(of[pass_, other]["median_ms"]) / float(of[pass_, attention]["median_ms"])
                for of in speeds
            ]
            cells.append(f"{min(found):.2f} to {max(found):.2f}")
        rows.append((title, *cells))
    return markdown(("speed relative to", *others), rows)


def _memory() -> list[str]:
    attentions = ("ours", "ours, one pass", "cuDNN", "FlexAttention", "SDPA flash", "eager")

    def peak(row: Mapping[str, str]) -> str:
        return row["peak_MiB"] or row["median_ms"]

    rows = [
        (
            problem,
            _YES_NO[causal],
            *(peak(of["both", x]) for x in attentions),
        )
        for (problem, causal), of in _speeds("speed.csv").items()
    ]
    return markdown(("B x N x H x D, MiB", "causal", *attentions), rows)


def _short() -> list[str]:
    rows = []
    for name, guarantee in _SHORT:
        subject = _findings()[name]
        finding = subject["guarantees"][guarantee]["findings"][0]
        first, _, rest = finding["message"].partition("\n")
        worst = re.search(r"got (\S+), want (\S+),", rest)
        assert worst is not None
        got, want = (f"{float(x):.4g}" for x in worst.groups())
        what = first.partition(": ")[2].replace(f" of {name}", "").partition(", and")[0]
        problem = finding["problem"].replace('"version":1,', "").replace(',"device":"cuda"', "")
        rows.append((subject["about"], what, got, want, f"`{problem}`"))
    return markdown(("kernel", "finding", "`got`", "`want`", "smallest problem"), rows)


# The lowest versions with which ``fa-verify check`` was run.
_TRIED = {
    "torch": "2.11.0, on a GPU", "triton": "3.6.0, on a GPU", "numpy": "1.24.4",
    "hypothesis": "6.139.3", "pytest": "8.0.2", "pytest-xdist": "3.3.1", "pytest-timeout": "2.1.0",
}  # fmt: skip


def _floors() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["triton"]]
    floors = [re.match(r"([a-z-]+)>=([\d.]+)", line) for line in required]
    rows = [(f"`{x[1]}`", x[2], _TRIED[x[1]]) for x in floors if x]
    return markdown(("package", "required", "lowest tried"), rows)


def _versions() -> list[str]:
    files = {}
    for name in ("cpu", "cuda"):
        text = (ROOT / "constraints" / f"{name}.txt").read_text(encoding="utf-8")
        files[name] = dict(re.findall(r"^([a-z-]+)==(\S+)$", text, re.MULTILINE))
    packages = [x for x in files["cpu"] if x in files["cuda"]]
    rows = [(f"`{x}`", files["cpu"][x], files["cuda"][x]) for x in packages]
    return markdown(("package", "`constraints/cpu.txt`", "`constraints/cuda.txt`"), rows)


def _mutants() -> list[str]:
    from tests.mutation.catalogue.faults import FAULTS
    from tests.mutation.catalogue.independent import INDEPENDENT
    from tests.mutation.catalogue.subtle import SUBTLE
    from tests.mutation.harness.mutants import HARNESS

    rows = (
        ("faults on record", len(FAULTS), "`tests/mutation/catalogue/faults.py`"),
        ("independent mutants", len(INDEPENDENT), "`tests/mutation/catalogue/independent.py`"),
        ("subtle faults", len(SUBTLE), "`tests/mutation/catalogue/subtle.py`"),
        ("harness mutants written by hand", len(HARNESS), "`tests/mutation/harness/mutants.py`"),
    )
    return markdown(("mutants", "number", "file"), rows)


def _diagnosis() -> list[str]:
    from tests.mutation.diagnosis import RESULTS as OUTCOMES
    from tests.mutation.diagnosis import Outcome, table

    records = json.loads(OUTCOMES.read_text(encoding="utf-8"))
    return table([Outcome(**x) for x in records])


def _limits() -> Mapping[str, Any]:
    """The detection limits that a GPU measured; without them, those that a CPU measured."""
    places = (RESULTS, ROOT / "results" / "cpu")
    found = next(x for x in (place / "power.json" for place in places) if x.exists())
    return json.loads(found.read_text(encoding="utf-8"))


def _percent(sizes: Iterable[float]) -> str:
    """The least size in percent; a dash without one."""
    least = min(sizes, default=None)
    return "-" if least is None else f"{float(f'{100 * least:.2g}'):g}"


def _power_run() -> list[str]:
    run = _limits()
    device = "the CPU" if run["subject"] == "benchmarks.emulated" else run["device"]
    return [
        f"Measured on {device}: `{run['subject']}`, {run['seeds']} seeds, at most {run['rows']} "
        f"rows, head_dim {run['head_dim']}. Of {run['problems']:,} problems, "
        f"{run['false_alarms']} raised a false alarm."
    ]


def _power_long() -> list[str]:
    """A line for each family, dtype and length: the least limits of dq and of out, by fault."""
    (path,) = (ROOT / "results").glob("*/power-long.json")
    run = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for family, of_dtypes in run["limits"].items():
        for dtype, of_lengths in of_dtypes.items():
            for N, faults in of_lengths.items():
                cells = (
                    [f"{_percent(x['dq'].values())}, {_percent(x['out'].values())}"
                     for x in faults.values()]
                    if faults is not None else ["out of range", "", "", ""]
                )  # fmt: skip
                rows.append((family, f"{int(N):,}", dtype, *cells))
    kinds = ("everything", "one tile", "one row", "one element")
    head = ("dq, out in %", "N", "dtype", *kinds)
    return [
        f"Measured on {run['device']}: `{run['subject']}`, {run['seeds']} seeds, at most "
        f"{run['rows']} rows. Of {run['problems']:,} problems, {run['false_alarms']} raised a "
        "false alarm.", "", *markdown(head, rows),
    ]  # fmt: skip


def _power(output: str) -> list[str]:
    """A line for each fault and dtype; columns of each N are checks, the last all others."""
    of_dtypes = _limits()["limits"]["normal"]
    lengths = [*next(iter(of_dtypes.values()))]
    given = () if output == "out" else ("backward",)
    columns = ("bound", *given, "limit", "statistics")
    head = [
        f"N = {int(N):,}: {columns[0]}" if not place else column
        for N in lengths
        for place, column in enumerate(columns)
    ]
    rows = []
    for fault in next(iter(of_dtypes.values()))[lengths[0]]:
        for dtype, of_lengths in of_dtypes.items():
            cells = []
            for N in lengths:
                sizes = dict(of_lengths[N][fault][output])
                cells += [_percent([sizes.pop(x)] if x in sizes else ()) for x in columns[:-1]]
                cells.append(_percent(sizes.values()))
            rows.append((fault, dtype, *cells))
    return markdown(("fault, %", "dtype", *head), rows)


def _power_families() -> list[str]:
    """A line for each family and dtype: the least limit of dq of any check, by fault."""
    limits = _limits()["limits"]
    rows = []
    faults: Sequence[str] = ()
    for family, of_dtypes in limits.items():
        for dtype, of_lengths in of_dtypes.items():
            N, table = [*of_lengths.items()][-1]
            if table is None:
                rows.append((family, dtype, "out of range", *[""] * (len(faults) - 1)))
                continue
            faults = [*table]
            rows.append((family, dtype, *(_percent(x["dq"].values()) for x in table.values())))
    return markdown((f"family, N = {int(N):,}, %", "dtype", *faults), rows)


def _same_bits(device: str) -> list[str]:
    """The words of ``same_bits`` that kernels hold on a device."""
    path = ROOT / "results" / device / "same_bits.json"
    return same_bits.table(json.loads(path.read_text(encoding="utf-8")))


def _shapes() -> list[str]:
    """Other shapes beside peers."""
    path = H100 / "shapes.json"
    return shapes.table(json.loads(path.read_text(encoding="utf-8")))


def _beside_flash_attn_4(name: str) -> list[str]:
    """Milliseconds; the times of cuDNN and flash-attn-4 over ours."""
    theirs = ("cuDNN", "flash-attn-4")
    modes = (
        ("forward", "ours", theirs),
        ("backward", "ours", (*theirs, "flash-attn-4, deterministic")),
        ("backward", "ours, one pass", theirs),
    )

    def cell(of: Mapping[Any, Any], pass_: str, name: str, peers: Sequence[str]) -> str:
        ms = {x: float(of[pass_, x]["median_ms"]) for x in (name, *peers)}
        ratios = (f"{ms[x] / ms[name]:.2f}" for x in peers)
        return f"{ms[name]:.3f} ({'; '.join(ratios)})".replace(" ", "\N{NO-BREAK SPACE}")

    rows = [
        (problem, _YES_NO[causal], *(cell(of, *mode) for mode in modes))
        for (problem, causal), of in _speeds(f"{name}.csv").items()
    ]
    backward = ("backward, deterministic", "backward, `deterministic=False`")
    return markdown(("B x N x H x D", "causal", "forward", *backward), rows)


def _numerics() -> Mapping[str, Any]:
    """The numerics that a GPU measured; without them, those that a CPU measured."""
    files = (ROOT / "results").glob("*/numerics.json")
    known = (RESULTS.name, "cpu")
    found = min(files, key=lambda x: (x.parent.name == known[1], x.parent.name != known[0]))
    return json.loads(found.read_text(encoding="utf-8"))


def _options() -> list[str]:
    import pytest

    from fa_verify.pytest_plugin.options import add_options

    group = pytest.Parser(_ispytest=True).getgroup("attention")
    add_options(group)
    rows = []
    for option in group.options:
        attributes = option.attrs()
        if attributes["help"] == argparse.SUPPRESS:
            continue
        value = f"={attributes['metavar']}" if attributes.get("metavar") else ""
        rows.append((f"`{option.names()[0]}{value}`", attributes["help"]))
    return markdown(("option", "effect"), rows)


def _cell(text: str) -> str:
    """A docstring's text as one cell of a table."""
    return " ".join(text.replace("``", "`").replace("|", r"\|").split())


def _fields(of: type) -> list[str]:
    """A line for each field of a dataclass: its meaning, from the docstring, and its default."""
    _, _, described = (inspect.getdoc(of) or "").partition("\nArgs:\n")
    meanings = dict(
        re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", described.partition("\n\n")[0], re.MULTILINE)
    )
    rows = []
    for item in dataclasses.fields(of):
        # The mask is the one field with a factory, its class.
        factory = item.default_factory is not dataclasses.MISSING
        default = {"type": item.type} if factory else item.default
        shown = json.dumps(default, separators=(",", ":"))
        rows.append((f"`{item.name}`", _cell(meanings[item.name]), f"`{shown}`"))
    return markdown(("field", "meaning", "default"), rows)


def _problem_fields() -> list[str]:
    from fa_verify.oracles.problem import Problem

    return _fields(Problem)


def _mask_fields() -> list[str]:
    from fa_verify.oracles.masks.mask import Mask

    return _fields(Mask)


def _problem_names() -> list[str]:
    """A line for each layout and each family of values, from the docstrings."""
    from fa_verify.oracles.problem import LAYOUTS
    from fa_verify.properties.inputs import families
    from fa_verify.properties.inputs.bias_families import BIAS_FAMILIES
    from fa_verify.properties.inputs.layouts import lay_out

    tables: Mapping[str, Mapping[str, Callable[..., Any]]] = {
        "inputs": families.INPUTS,
        "dout": families.DOUT,
        "dlse": families.DLSE,
        "dirty": families.PADDING_VALUES,
        "alibi": families.ALIBI,
        "bias": {family.__name__: family for family in BIAS_FAMILIES},
        "sinks": families.SINKS,
    }
    layouts = dict(re.findall(r"^ +(\w+) {2,}(\w.*)$", lay_out.__doc__ or "", re.MULTILINE))
    rows = [("`layouts`", f"`{name}`", _cell(layouts[name])) for name in LAYOUTS]
    rows += [
        (f"`{field}`", f"`{name}`", _cell(family.__doc__.partition("\n")[0]))
        for field, of_field in tables.items()
        for name, family in of_field.items()
        if family.__doc__
    ]
    return markdown(("field", "name", "meaning"), rows)


# Files of ``tests/conformance`` that ask all claims of a kind or of a group.
_OF_KINDS = {
    "merge": "test_merging.py", "ring": "test_merging.py", "cache": "test_caches.py",
    "quantised": "test_quantised.py", "pooled": "test_pooled.py",
}  # fmt: skip
# The faults that a run finds before it compares outputs.
_OF_EVERY_CALL = ("exception", "form", "inputs")


def _marked() -> dict[str, set[str]]:
    """The files of ``tests/conformance`` with a test that is marked to ask, by key."""
    from fa_verify.oracles import guarantee

    found: dict[str, set[str]] = {}
    for path in (ROOT / "tests" / "conformance").glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"^@pytest\.mark\.asks\((\w+)\)$", text, re.MULTILINE):
            found.setdefault(getattr(guarantee, name).key, set()).add(path.name)
    return found


def _named_by_kind(claims: Iterable[Any]) -> str:
    """The names of checks by the kind of their calls; a dash without a check."""
    by_kind: dict[str, list[str]] = {}
    for claim in claims:
        name = f"{claim.name} (every call)" if claim.standing else claim.name
        by_kind.setdefault(claim.kind, []).append(name)
    plural = {"merge": "merges", "ring": "rings", "cache": "caches"}
    named = (f"{plural.get(kind, kind)}: {', '.join(names)}" for kind, names in by_kind.items())
    return "; ".join(named) or "-"


def _guarantees() -> list[str]:
    """A line for each guarantee: its statement, and the checks and tests that ask for it."""
    from fa_verify.oracles.guarantee import GUARANTEES
    from fa_verify.properties.guarantees.claims import CLAIMS

    rows, marked = [], _marked()
    for key, guarantee in GUARANTEES.items():
        mine = [claim for claim in CLAIMS if claim.guarantee is guarantee]
        by_verify = [x for x in mine if x.group in ("call", "pooled") or x.standing]
        files = {
            *marked.get(key, ()),
            *("test_claims.py" for claim in mine if claim.drawn),
            *("test_same_bits.py" for claim in mine if claim.promise),
            *("test_combinations.py" for claim in mine if claim.bounded),
            *(_OF_KINDS[x] for claim in mine for x in (claim.kind, claim.group) if x in _OF_KINDS),
        }
        every = "every call" if key in _OF_EVERY_CALL else ""
        rows.append(
            (
                f"`{key}`: {guarantee.heading}", _cell(guarantee.statement),
                every or _named_by_kind(by_verify),
                _named_by_kind(claim for claim in mine if claim not in by_verify),
                ", ".join(f"`{file}`" for file in sorted(files)) or "all",
            )
        )  # fmt: skip
    head = ("guarantee", "statement", "`verify` asks", "a full run adds", "in `tests/conformance`")
    return markdown(head, rows)


def _worked_quantities() -> list[str]:
    """The numbers that the terms of the worked element are made of, in a row."""
    numbers = worked_element.quantities()
    return markdown([*numbers], [[f"{x:.3g}" for x in numbers.values()]])


def _worked(whole: str, terms: Mapping[str, float]) -> list[str]:
    """The terms of one bound with their values and shares, and their sum."""
    total = sum(terms.values())
    rows = [(name, f"{x:.2e}", f"{100 * x / total:.1f} %") for name, x in terms.items()]
    return markdown(("term", "value", "share"), [*rows, (whole, f"{total:.2e}", "")])


def _worked_sources() -> list[str]:
    """By how much each bound is smaller without the errors of one kind of rounding."""
    rows = [
        (source, *(f"{100 * share:.1f} %" for share in shares.values()))
        for source, shares in worked_element.sources()
    ]
    return markdown(("without", *OUTPUTS), rows)


def _declarations(part: str) -> list[str]:
    """A line for each declaration of a part: its meaning, which stands beside its field."""
    return markdown(
        ("word", "meaning"),
        [
            (f"`{word}`", known.meaning)
            for word, known in DECLARATIONS.items()
            if known.part == part
        ],
    )


def _quantised_numerics() -> list[str]:
    """A line for each word of ``quantised_numerics``."""
    from fa_verify.oracles.declaration import declarations_of
    from fa_verify.oracles.quantised_numerics import QuantisedNumerics

    rows = [(f"`{word}`", known.meaning) for word, known in declarations_of(QuantisedNumerics)]
    return markdown(("word", "meaning"), rows)


def _quantised_faults() -> list[str]:
    """A line for each planted fault of a kernel of codes, with its origin."""
    from tests.altered.quantised import FAULTS

    rows = [(name, of, origin) for name, (of, _, origin) in FAULTS.items()]
    return markdown(("fault", "in the kernel", "seen in"), rows)


TABLES: Mapping[str, Callable[[], list[str]]] = {
    "quantised-numerics": _quantised_numerics,
    "quantised-faults": _quantised_faults,
    "guarantees": _guarantees,
    "speed-bf16": lambda: _speed("speed.csv"),
    "speed-fp16": lambda: _speed("speed-fp16.csv"),
    "ratios-bf16": lambda: _ratios("speed.csv"),
    "ratios-fp16": lambda: _ratios("speed-fp16.csv"),
    "memory": _memory,
    "findings-short": _short,
    "versions": _versions,
    "mutants": _mutants,
    "diagnosis": _diagnosis,
    "power-run": _power_run,
    "power-dq": lambda: _power("dq"),
    "power-out": lambda: _power("out"),
    "power-families": _power_families,
    "power-long": _power_long,
    **{
        f"numerics-{name}": lambda table=table: table(_numerics())
        for name, table in numerics_table.TABLES.items()
    },
    "same-bits": lambda: _same_bits("cpu"),
    "same-bits-gpu": lambda: _same_bits(H100.name),
    **{
        name: lambda name=name: _beside_flash_attn_4(name)
        for name in ("speed-flash-attn-4", "speed-flash-attn-4-fp16")
    },
    "shapes": _shapes,
    "worked-quantities": _worked_quantities,
    "worked-score": lambda: _worked("$E$", worked_element.score_terms()),
    "worked-out": lambda: _worked(r"$B_{out}$", worked_element.out_terms()),
    "worked-lse": lambda: _worked(r"$B_{lse}$", worked_element.lse_terms()),
    "worked-sources": _worked_sources,
    "options": _options,
    "floors": _floors,
    "problem-fields": _problem_fields,
    "mask-fields": _mask_fields,
    "problem-names": _problem_names,
    **{
        f"declarations-{part}": functools.partial(_declarations, part)
        for part in dict.fromkeys(known.part for known in DECLARATIONS.values())
    },
}


def pages() -> list[Path]:
    """The README and every page of the documentation."""
    return [ROOT / "README.md", *sorted(Path(__file__).parent.rglob("*.md"))]


def rewritten(text: str) -> str:
    """The text of a page with its tables as they are now."""

    def table(match: re.Match[str]) -> str:
        return "\n".join(
            (f"<!-- begin table {match[2]} -->\n", *TABLES[match[2]](), "\n<!-- end table -->")
        )

    return _TABLE.sub(table, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 where nothing is stale, or everything was written."""
    parser = argparse.ArgumentParser(prog="python -m docs.tables", description=__doc__)
    parser.add_argument("--write", action="store_true", help="rewrite the pages that are stale")
    options = parser.parse_args(arguments)
    stale = False
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = rewritten(text)
        if new != text:
            stale = True
            if options.write:
                page.write_text(new, encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: {'written' if options.write else 'stale'}")
    return int(stale and not options.write)


if __name__ == "__main__":
    sys.exit(main())
