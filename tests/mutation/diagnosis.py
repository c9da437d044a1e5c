"""Measures how often a diagnosis names the fault of a mutant.

python -m tests.mutation.diagnosis [--only LIST] [--jobs J] [--write]

The mutants run in Triton's interpreter. A diagnosis begins with the first problem of the fixed list
(``judging/trials.py``) whose values a check rejects; a run of the suite minimises it before. The
names that are right for a fault were written down before it was diagnosed: in accepted_names.toml,
or, for faults on record, in the entries of the dictionary that cite them. The dictionary was made
from the faults on record, and they measure nothing else than that it is complete.

Mechanical mutants are drawn by a hash of their keys, so that an edit of one function leaves the
samples of all others as they are.

A mutant that raises, reads out of bounds or passes the problems has no diagnosis. ``--write`` keeps
the outcomes in results/cpu/diagnosis.json, from which docs/diagnosis.md has its table.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.table import markdown
from fa_verify.forks import in_forks
from tests.mutation.catalogue.copies import PACKAGE, sources_of
from tests.mutation.catalogue.faults import FAULTS
from tests.mutation.catalogue.independent import INDEPENDENT
from tests.mutation.catalogue.mutant import Mutant
from tests.mutation.catalogue.named_faults import RECORDED
from tests.mutation.catalogue.operators import mechanical
from tests.mutation.catalogue.subtle import SUBTLE
from tests.mutation.harness.sites import rate_interval
from tests.mutation.judging.interpreting import interpret

if TYPE_CHECKING:
    from fa_verify.properties.kernels.subject import Subject
    from fa_verify.properties.running.trial import PlannedRun
    from tests.mutation.judging.trials import Step

__all__ = ["ACCEPTED", "LISTS", "RESULTS", "Outcome", "judged", "table"]

ACCEPTED = Path(__file__).with_name("accepted_names.toml")
RESULTS = Path(__file__).parents[2] / "results" / "cpu" / "diagnosis.json"
# Lists of faults, and their titles.
LISTS = {
    "on record": "faults on record, from which the dictionary was made",
    "independent": "independent mutants",
    "subtle": "subtle faults",
    "tiles": "one in 4 mutants of masks, tiles and softmax",
    "mechanical": "one in 32 mutants of what else a call runs",
    "eager": "subjects in plain PyTorch",
    "causes": "attention in float64 of the tests of causes",
}
# Functions of masks, scores, tiles and the softmax, the beginnings of their mutants' keys.
_OF_TILES = (
    "common/mask.py:element_mask ", "common/tile_ranges.py:visible_tiles ",
    "common/tile_ranges.py:split_range ", "common/score_mod.py:apply_score_mods ",
    "common/score_mod.py:score_mods ", "common/softmax.py:with_sink ",
    "common/softmax.py:normalised ", "portable/forward.py:attend ", "portable/dq.py:_accumulate ",
    "portable/dkdv.py:_accumulate ",
)  # fmt: skip
# Files whose other functions a call of attention runs, the beginnings of their mutants' keys.
_OF_CALLS = (
    "common/", "portable/forward.py", "portable/dq.py", "portable/dq_postprocess.py",
    "portable/dkdv.py", "portable/bwd_preprocess.py", "portable/combine.py",
    "portable/classify_blocks.py", "portable/block_lists.py", "launch/portable.py",
    "launch/named_arguments.py",
    "launch/sizes.py", "launch/sinks.py", "schedule/block_sparse.py",
)  # fmt: skip
# Faults whose diagnosis led to an entry or a rule, or was tried before: they measure nothing.
_SEEN = (
    "out scaled",
    "lse of empty rows is 0",
    "v of the first batch entry for all",
    "last row not written",
    "reads past the end",
    "unguarded",
    "dq: range of key tiles for a query tile of BLOCK_N rows",
    "dq: the scale goes into dS before it is rounded",
    "common/mask.py:element_mask exchange_name 2",
    "common/tile_ranges.py:visible_tiles exchange_name 2",
    "common/tile_ranges.py:visible_tiles exchange_name 33",
)
# Checks of values. Others find faults of memory, of calls in a row, or of other results.
_VALUES = ("T3", "G1", "G2", "G3", "rms", "bias", "limit", "identities", "mask", "counts")


class Outcome(NamedTuple):
    """A fault, and what its diagnosis says.

    Args:
        source: A key of ``LISTS``.
        name: The name or the key of the fault.
        how: "diagnosed", or why not: "raised", "addresses", "survived", a check of something else.
        names: The names, the first one first.
        accepted: The names that are right; none if the dictionary has no entry for the fault.
        complete: Whether the search ended in time.
        seconds: Time of the diagnosis.
    """

    source: str
    name: str
    how: str
    names: tuple[str, ...]
    accepted: tuple[str, ...]
    complete: bool
    seconds: float


def judged(outcome: Outcome) -> str:
    """Returns "first", "one of three", "none" or "wrong"."""
    if not outcome.names:
        return "none"
    if outcome.names[0] in outcome.accepted:
        return "first"
    return "one of three" if {*outcome.names} & {*outcome.accepted} else "wrong"


def drawn(key: str, one_in: int) -> bool:
    """Whether the mutant of a key is in a sample, which does not depend on other mutants."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % one_in == 0


def _mutants() -> Iterator[tuple[str, Mutant]]:
    """Yields (list, mutant)."""
    made = mechanical(sources_of(PACKAGE))
    others = [x for x in made if x.key.startswith(_OF_CALLS) and not x.key.startswith(_OF_TILES)]
    lists: dict[str, Sequence[Mutant]] = {
        "independent": INDEPENDENT, "subtle": SUBTLE, "on record": FAULTS,
        "tiles": [x for x in made if x.key.startswith(_OF_TILES) and drawn(x.key, 4)],
        "mechanical": [x for x in others if drawn(x.key, 32)],
    }  # fmt: skip
    for source, mutants in lists.items():
        kept = (x for x in mutants if x.key or not x.equivalent)
        kept = (x for x in kept if (x.key or x.name) not in _SEEN)
        yield from ((source, x) for x in kept)


def _accepted(source: str, mutant: Mutant, listed: dict[str, dict[str, list[str]]]) -> list[str]:
    if source == "on record":
        return [name for name, parts in RECORDED.items() if any(x in mutant.name for x in parts)]
    return listed[source].get(mutant.key or mutant.name, [])


def _of_mutant(
    sources: dict[str, str],
    mutant: Mutant,
    pool: Sequence[Step],
    planned: Sequence[PlannedRun],
    most: float,
) -> tuple[str, tuple[str, ...], bool, float]:
    """Returns how a mutant was found, the names, whether the search ended, and its seconds."""
    from tests.mutation.judging.verdict import killed_by, subject_of

    started = time.process_time()
    with tempfile.TemporaryDirectory(prefix="diagnosis-") as folder:
        kills = killed_by(
            sources, mutant, pool, planned, Path(folder) / "killed",
            lambda: time.process_time() - started < most,
        )  # fmt: skip
        kill = next(kills, None)
        if kill is None or kill.check not in _VALUES:
            return "survived" if kill is None else kill.check, (), True, 0.0
        subject = subject_of(sources, mutant, Path(folder) / "diagnosed")
        return _diagnosed(subject, pool[kill.step].problem)


def _diagnosed(subject: Subject, problem: object) -> tuple[str, tuple[str, ...], bool, float]:
    from fa_verify.diagnosis.explain import diagnose

    found = diagnose(subject, problem)
    names = tuple(x.name for x in found.explanations)
    how = "diagnosed" if found.tried else "no wrong value"
    return how, names, found.complete, found.seconds


def _of_pytorch(listed: dict[str, dict[str, list[str]]]) -> Iterator[Outcome]:
    """Yields the outcomes of the faults in plain PyTorch, with the problems of their tests."""
    from fa_verify.properties.kernels.subject import Subject
    from tests.unit.properties.guarantees.test_minimal_problems import BROKEN
    from tests.unit.properties.kernels.broken_subjects import Eager
    from tests.unit.properties.search.test_causes import PLANTED, runner_of

    subjects = []
    for fault, _, drawn, problems in BROKEN.values():
        eager = Eager(fault)
        eager.configs = {name: {} for name in ("default", *drawn.get("configs", ()))}
        subjects.append(("eager", fault, Subject.of(eager, "broken"), problems[0]))
    for fault, (problem, *_) in PLANTED.items():
        subjects.append(("causes", fault, runner_of(fault).subject, problem))
    for source, fault, subject, problem in subjects:
        if fault not in _SEEN:
            accepted = tuple(listed[source].get(fault, ()))
            how, *rest = _diagnosed(subject, problem)
            names, complete, seconds = rest
            yield Outcome(source, fault, how, names, accepted, complete, seconds)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns the counts of each list as a Markdown table, with 95 % intervals of Wilson."""
    groups = {title: [x for x in outcomes if x.source == key] for key, title in LISTS.items()}
    groups["all but those on record"] = [x for x in outcomes if x.source != "on record"]
    rows = []
    for title, of in groups.items():
        diagnosed = [x for x in of if x.how == "diagnosed"]
        for known in (True, False):
            counts = Counter(judged(x) for x in diagnosed if bool(x.accepted) is known)
            n = counts.total()
            if not n:
                continue
            among = counts["first"] + counts["one of three"]
            right = (_share(counts["first"], n), _share(among, n)) if known else ("-", "-")
            none = str(counts["none"]) if known else _share(counts["none"], n)
            has = "yes" if known else "no"
            rows.append((title, has, n, *right, none, _share(counts["wrong"], n)))
    head = "faults", "has an entry", "n", "first right", "one of three", "none named", "wrong"
    return markdown(head, rows)


def _share(count: int, of: int) -> str:
    low, high = rate_interval(count, of)
    return f"{count} ({low:.0%} to {high:.0%})"


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print the outcomes and the table; returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation.diagnosis",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", metavar="LIST", help="faults of this list")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="CPU time of a mutant that nothing kills"
    )
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    interpret()
    from tests.mutation.judging.trials import ORDINARY, STEPS
    from tests.mutation.judging.verdict import asked, warmed

    listed = tomllib.loads(ACCEPTED.read_text(encoding="utf-8"))
    pool = [*STEPS, *ORDINARY]
    planned = asked(pool)
    warmed(planned)
    sources = sources_of(PACKAGE)
    recorded = [Outcome(**x) for x in json.loads(RESULTS.read_text(encoding="utf-8"))]
    mutants = [x for x in _mutants() if options.only in ("", x[0])]
    works = [partial(_of_mutant, sources, x, pool, planned, options.seconds) for _, x in mutants]
    outcomes: list[Outcome] = []
    # Outcomes of the other lists stay.
    kept = [x for x in recorded if x.source != options.only] if options.only else []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        _print(outcome)
        if options.write:
            records = [x._asdict() for x in sorted([*kept, *outcomes])]
            RESULTS.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")

    for outcome in _of_pytorch(listed):
        if options.only in ("", outcome.source):
            note(outcome)
    for ended in in_forks(works, jobs=options.jobs, seconds=20 * options.seconds):
        source, mutant = mutants[ended.number]
        how, names, complete, seconds = ended.value or (ended.how, (), True, 0.0)
        key, accepted = mutant.key or mutant.name, tuple(_accepted(source, mutant, listed))
        note(Outcome(source, key, how, names, accepted, complete, seconds))
    print(*table(outcomes), sep="\n")
    return 0


def _print(x: Outcome) -> None:
    said = f"{judged(x)}: {', '.join(x.names) or '-'}" if x.how == "diagnosed" else x.how
    late = "" if x.complete else " (out of time)"
    print(f"{x.source}: {x.name}: {said}{late}; {x.seconds:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
