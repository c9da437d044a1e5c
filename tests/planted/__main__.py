"""Compare the causes that the suite prints of planted faults with their labels.

``python -m tests.planted [--only TEXT] [--jobs N] [--json FILE]`` runs ``fa-verify check`` on each
kernel of ``labels.toml``. A row says whether the title, the thresholds, the dtypes and the
declarations of all its causes are true.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.mutation.harness.sites import rate_interval

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
SECONDS = 240
COLUMNS = ("title", "threshold", "dtypes", "declaration")
# Conditions that a title has and no list of needs.
IN_TITLES = (
    r"only after|fails \d+ of \d+|offsets past? 2\*\*31|ragged|transposed|strides of its inputs"
)
RECORDED = ("title", "evidence", "features", "outputs", "dtypes", "declarations", "if_intended",
            "smallest", "problem", "depends_on")  # fmt: skip
FIRST_CAUSE = re.compile(r"^\d+:\d\d: a first cause|^1  \S")
Label = dict[str, Any]


def labels(only: str = "") -> list[Label]:
    """Return the labels of kernels whose name contains a text."""
    found: list[Label] = tomllib.loads((FOLDER / "labels.toml").read_text())["fault"]
    return [label for label in found if only in label["kernel"]]


def checked(label: Label) -> tuple[list[dict[str, Any]], float, str]:
    """Run the check of a kernel; return its causes, the seconds to the first one, and its end."""
    with tempfile.TemporaryDirectory() as scratch:
        record = Path(scratch) / "record.jsonl"
        words = [sys.executable, "-m", "fa_verify", "check", f"faults/{label['kernel']}"]
        words += [f"--json={record}", f"--corpus={scratch}/corpus", "--", "-n1"]
        environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
        begun = time.monotonic()
        child = subprocess.Popen(
            words + label.get("options", []), cwd=FOLDER, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        ended = threading.Timer(SECONDS, os.killpg, (child.pid, 9))
        ended.start()
        first = 0.0
        for line in child.stdout or ():
            if not first and FIRST_CAUSE.match(line):
                first = time.monotonic() - begun
        status = child.wait()
        ended.cancel()
        lines = record.read_text().splitlines() if record.exists() else []
        seconds = time.monotonic() - begun
    # The last line of a run that was ended may be a part of one.
    records = [json.loads(line) for line in lines if '"kind": "cause"' in line and line[-1] == "}"]
    causes = [recorded(record) for record in records]
    end = f"over {SECONDS} s" if status == -9 else f"status {status}"
    return causes, first or seconds, end


def recorded(record: dict[str, Any]) -> dict[str, Any]:
    """Return what is said of a cause. A death has a message, and neither dtypes nor offers."""
    if "evidence" in record:
        return {key: record[key] for key in RECORDED}
    needs = re.search(r"^  (needs .*)$", record["message"], re.MULTILINE)
    of_death = {"title": record["title"], "evidence": f"; {needs[1]}" if needs else ""}
    plain = dict.fromkeys(RECORDED, "") | dict.fromkeys(("outputs", "dtypes", "declarations"), ())
    return plain | of_death | {"depends_on": "a death"}


def conditions(cause: dict[str, Any]) -> list[str]:
    """Return the conditions that a cause prints: those that it needs, and those of its title."""
    needs = re.search(r"; needs (.*?)(?:; |$)", cause["evidence"])
    found = re.split(r", | and ", needs[1]) if needs else []
    in_title = (x.lower() for x in re.findall(IN_TITLES, cause["title"], re.IGNORECASE))
    return found + [x for x in in_title if not any(x in condition for condition in found)]


def without_number(condition: str) -> str:
    return re.sub(r"(?<=[<>=] )[\d,]+", "#", condition)


def names(printed: str, entry: str | list[str], exact: bool) -> bool:
    """Whether a printed condition is one of the alternatives of a label."""
    for word in [entry] if isinstance(entry, str) else entry:
        if word.startswith("~"):
            if re.search(word[1:], printed, re.IGNORECASE):
                return True
        elif printed == word or (not exact and without_number(printed) == without_number(word)):
            return True
    return False


def judged(cause: dict[str, Any], truth: Label) -> dict[str, bool]:
    """Return which columns of a cause are true of a fault."""
    printed, needs = conditions(cause), truth["needs"]
    true = [*needs, *truth.get("allowed", ())]
    told = {
        exact: all(any(names(x, entry, exact) for x in printed) for entry in needs)
        and all(any(names(x, entry, exact) for entry in true) for x in printed)
        for exact in (False, True)
    }
    every = "Every problem" not in cause["title"] or truth.get("every", False)
    offered, declared = cause["declarations"], truth["declaration"]
    offered = [x if isinstance(x, str) else "=".join(map(str, x)) for x in offered]
    plain = [re.sub(r"['\" ]", "", x) for x in offered]
    wanted, may = (
        [re.sub(r"['\" ]", "", x) for x in y if x]
        for y in ([declared], truth.get("may_declare", ()))
    )
    outputs = {x.split()[0] for x in cause["outputs"]} <= set(truth["outputs"] or cause["outputs"])
    return {
        "title": told[False] and every and outputs,
        "threshold": told[True] or not told[False],
        # A cause of calls before, or of chance, names the dtype in which it was seen.
        "dtypes": sorted(cause["dtypes"]) == sorted(truth["dtypes"])
        or (bool(cause["depends_on"]) and {*cause["dtypes"]} <= {*truth["dtypes"]}),
        "declaration": all(x in plain for x in wanted) and all(x in wanted + may for x in plain),
    }


def row(label: Label) -> dict[str, Any]:
    """Check a kernel; return its row of the table, and the causes as the suite records them."""
    causes, seconds, end = checked(label)
    return verdict(label, causes) | {"seconds": round(seconds), "end": end, "causes": causes}


def verdict(label: Label, causes: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare all causes of a kernel with the fault, or the better of two, that each is of."""
    faults = [label, label["second"]] if "second" in label else [label]
    verdicts, named = [], set()
    for cause in causes:
        columns = [judged(cause, fault) for fault in faults]
        best = max(range(len(faults)), key=lambda i: sum(columns[i].values()))
        named.add(best)
        verdicts.append(columns[best])
    complete = len(named) == len(faults)
    return {
        "kernel": label["kernel"],
        **{x: complete and all(columns[x] for columns in verdicts) for x in COLUMNS},
        "false": sum(not value for columns in verdicts for value in columns.values()),
        "titles": [
            f"{cause['title']} [{', '.join(conditions(cause))}]"
            + (f" if intended: {cause['if_intended']}" if cause["if_intended"] else "")
            for cause in causes
        ],
    }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table, and the share of faults of which all is true."""
    yield f"{'kernel':44}{''.join(f'{x:>12}' for x in COLUMNS)}{'seconds':>9}"
    for x in rows:
        yield (
            f"{x['kernel']:44}"
            + "".join(f"{'true' if x[column] else 'FALSE':>12}" for column in COLUMNS)
            + f"{x['seconds']:>9}  {x['end']}"
        )
        yield from (f"    {title}" for title in x["titles"])
    true = sum(all(x[column] for column in COLUMNS) for x in rows)
    low, high = rate_interval(true, len(rows))
    yield (
        f"all is true of {true} of {len(rows)} faults, {true / len(rows):.0%} "
        f"[{low:.0%}, {high:.0%}]; {sum(x['false'] for x in rows)} false sentences"
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels whose name has TEXT")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="kernels at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the rows to FILE")
    options = parser.parse_args()
    chosen = labels(options.only)
    if not chosen:
        parser.error(f"--only is {options.only!r}; needs a part of a kernel's name")
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(row, chosen):
            rows.append(result)
            print(*list(table([result]))[1:-1], sep="\n", flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
