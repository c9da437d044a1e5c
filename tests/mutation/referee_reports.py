"""Faults of what is said in the end: search, counts, shrinking, verdict, one edit each."""

from __future__ import annotations

from fa_verify.diagnosis.mutant import Mutant, faults_of

__all__ = ["REPORTS"]

REPORTS: tuple[Mutant, ...] = (
    *faults_of(
        "properties/search/search.py",
        "test_search",
        (
            "the averages of errors are no part of the verdict",
            'if name != "G1" or not inside]',
            'if name == "G1" and not inside]',
            "test_statistics",
        ),
        (
            "the claim alone is checked",
            "findings = findings or [x for check in self._standing() for x in check(trial)]",
            "pass",
        ),
        (
            "what is out of range counts as judged",
            "            self.out_of_range += 1\n",
            "            self.judged += 1\n",
        ),
        (
            "a refusal counts as judged",
            "            self.refusals[reason] += 1\n",
            "            self.judged += 1\n",
        ),
        ("refusals are not written down", "            self.tally.refused(problem, reason)\n", ""),
        (
            "what was judged is not written down",
            "            self.tally.judged(self.subject, one, of_one)\n",
            "            pass\n",
        ),
        (
            "an exception is a refusal",
            "alone or [Finding.of_exception(error, self.subject, problem)]",
            "[]",
        ),
        (
            "twice the bound needs no check",
            "inside = max(self.peaks.values()) <= 1",
            "inside = max(self.peaks.values()) <= 1e3",
        ),
        (
            "a declaration does not bound the simplest problem",
            "[] if runner.subject.excludes(problem) else",
            "[] if False else",
        ),
        (
            "a refused second run hides the first",
            '            self.refusals[f"in a second run: {refusal}"] += 1\n',
            "            return []\n",
        ),
        (
            "every draw is the same",
            "        hypothesis.seed(seed)(holds)\n",
            "        hypothesis.seed(0)(holds)\n",
        ),
        (
            "peaks of the problem before stay",
            "    def _findings(self, problem: Problem, claim: Check) -> "
            "list[Finding]:\n        self.peaks = {}\n",
            "    def _findings(self, problem: Problem, claim: Check) -> list[Finding]:\n",
        ),
        (
            "shrinking has no end",
            "time.monotonic() - first > SHRINK_SECONDS",
            "time.monotonic() - first > 1000 * SHRINK_SECONDS",
        ),
        (
            "a stack counts as one problem",
            "for i, of_one in enumerate(of_problems):",
            "for i, of_one in enumerate(of_problems[:1]):",
            "test_batched",
        ),
        (
            "a stack is out of range as a whole",
            "            if problem.seeds:\n                return self._judge_parts",
            "            if False:\n                return self._judge_parts",
            "test_batched",
        ),
        (
            "the second half of a stack is not judged",
            "((0, count // 2), (count // 2, count))",
            "((0, count // 2), (0, count // 2))",
            "test_batched",
        ),
        (
            "a stack is found instead of its problem",
            "return self._alone(problem, of_problems, claim) or findings",
            "return findings",
            "test_batched",
        ),
        (
            "a stack that fails as a whole passes",
            "return self._alone(problem, of_problems, claim) or findings",
            "return self._alone(problem, of_problems, claim)",
            "test_batched",
        ),
        (
            "a stack whose problems are refused alone passes",
            "suppress(NotImplementedError, SubjectError)",
            "suppress(SubjectError)",
            "test_batched",
        ),
        (
            "a stack raises as a whole",
            "for i in range(len(problem.seeds)))",
            "for i in range(0))",
            "test_batched",
        ),
        (
            "a stack has one worst",
            "worst_of_parts(len(trial.problem.all_seeds), ",
            "worst_of_parts(1, ",
            "test_batched",
        ),
        (
            "findings do not name the kernel",
            "dataclasses.replace(x, kernel=source)",
            'dataclasses.replace(x, kernel="")',
        ),
        ("draws are not steered by the worst", "        if steer:\n", "        if not steer:\n"),
        (
            "the watchdog is closed before the check",
            "with self.watching(problem):\n                return",
            "with self.watching(problem):\n                pass\n            if "
            "True:\n                return",
        ),
    ),
    *faults_of(
        "properties/execution/tally.py",
        "test_tally",
        ("the best is kept", "ratio > self.worst[key][0]", "ratio < self.worst[key][0]"),
        (
            "several tiles one way are several both ways",
            "problem.M > block_m and problem.N > block_n",
            "(problem.M > block_m or problem.N > block_n)",
        ),
        (
            "refusals of another process are lost",
            "            self.unsupported.setdefault(reason, set()).update(digests)\n",
            "            self.unsupported.setdefault(reason, set())\n",
        ),
        (
            "TF32 is fp32",
            'label = "tf32" if dtype == "fp32" and numerics.dots == "tf32" else dtype',
            "label = dtype",
        ),
        (
            "problems that differ in the seed are one",
            "hashlib.blake2b(problem.encode(), digest_size=8)",
            "hashlib.blake2b(problem.partition(',\"seed\"')[0].encode(), digest_size=8)",
        ),
        (
            "the worst of another process is lost",
            "            self._keep(key, ratio, problem)\n",
            "            self._keep(key, 0.0, problem)\n",
        ),
        (
            "out of range of another process is lost",
            '        self.out_of_range.update(record["out_of_range"])\n',
            "",
        ),
        ("the worst problem is the first", "{max(found)[1]}", "{min(found)[1]}"),
        (
            "the share of refusals is of the judged",
            "100 * refused / max(1, refused + len(self.problems))",
            "100 * refused / max(1, len(self.problems))",
        ),
    ),
    *faults_of(
        "properties/search/minimize.py",
        "test_minimize",
        (
            "any guarantee will do",
            "if found and found[0].guarantee == findings[0].guarantee:",
            "if found:",
        ),
        (
            "what passes is simpler",
            "if found and found[0].guarantee == findings[0].guarantee:",
            "if all(x.guarantee == findings[0].guarantee for x in found):",
        ),
        ("problems are tried twice", "        tried.add(candidate)\n", ""),
        (
            "there is no end",
            "while time.monotonic() < deadline:",
            "while time.monotonic() < 1000 * deadline:",
        ),
        ("sizes go to 1 or stay", "        while step:\n", "        while step and step > size:\n"),
        (
            "a smaller size starts from the problem before",
            "findings, candidates = found, reductions(candidate)",
            "findings, candidates = found, reductions(problem)",
        ),
        ("the first batch entry alone is kept", "yield from ((b,) for b in entries)", "yield (0,)"),
        (
            "a sequence becomes empty",
            "max(min(1, length), length - gone)",
            "max(0, length - gone)",
        ),
    ),
    *faults_of(
        "properties/search/minimize.py",
        "test_minimize",
        ("sizes do not count", "return sum(sizes) + sum(dims), ", "return 0, "),
        (
            "the window's reach does not count",
            "sum(parts), reach, left_out",
            "sum(parts), left_out",
        ),
        ("what lengths leave out counts backwards", "reach, left_out\n", "reach, -left_out\n"),
    ),
    *faults_of(
        "properties/execution/tally.py",
        "test_tally",
        ("what was handed over stays", "            part.clear()\n", "            pass\n"),
    ),
    *faults_of(
        "properties/execution/atomic_write.py",
        "test_corpus",
        (
            "a file is written in place",
            "        os.replace(name, path)\n",
            "        path.write_text(text)\n",
        ),
        (
            "a file is in place before it is on disk",
            "            os.fsync(file.fileno())\n        os.chmod(name, 0o644)\n"
            "        os.replace(name, path)\n",
            "        os.chmod(name, 0o644)\n        os.replace(name, path)\n",
        ),
        ("files are their owner's alone", "        os.chmod(name, 0o644)\n", ""),
        ("a file that is cut off stays", "        Path(name).unlink(missing_ok=True)\n", ""),
    ),
    *faults_of(
        "properties/search/corpus.py",
        "test_corpus",
        (
            "the larger problem is kept",
            "complexity(entry.problem) < complexity(there.problem):",
            "complexity(entry.problem) > complexity(there.problem):",
        ),
        (
            "what fails no more gives way",
            "            and (there.problem == entry.problem or still_fails(there.problem))\n",
            "",
        ),
        (
            "what cannot be read gives way",
            "    while os.path.lexists(path):",
            "    while _own(path):",
        ),
        (
            "what a person wrote gives way",
            "there if there.why == _in_a_line(there.message) else None",
            "there",
        ),
        (
            "entries of another cause give way",
            "            and _identity(there) == _identity(entry)\n",
            "",
        ),
        ("nobody is told of a file", "        note(path)\n", ""),
        (
            "a file is told of when it is written",
            "        note(path)\n        if there is None or complexity(entry.problem) < "
            "complexity(there.problem):\n            write_atomically(path, entry.to_json())\n",
            "        write_atomically(path, entry.to_json())\n        note(path)\n",
        ),
        ("a link to nowhere is a free name", "os.path.lexists(path)", "os.path.exists(path)"),
        (
            "the kind of tile is no cause",
            'finding.output.split(" of ")[0], finding.tile)',
            'finding.output.split(" of ")[0], "")',
        ),
        ("the shape of scratch is a cause", '.split(" of ")[0]', ""),
        (
            "the line of an exception is no cause",
            'line = f"{where[1]}:{where[2]}" if where else ""',
            'line = ""',
        ),
        (
            "a mask that is not registered is damage",
            "        raise NotReplayableError(str(error)) from None",
            "        raise",
        ),
        ("nesting ends the process", "except RecursionError:", "except ZeroDivisionError:"),
        (
            "names leave the folder",
            'r"[^a-z0-9_]+"',
            'r"[^a-z0-9_./]+"',
        ),
    ),
    *faults_of(
        "properties/comparison/compare.py",
        "test_compare",
        (
            "padding is like the rest",
            "special = (self.padding, self.single,",
            "special = (False, self.single,",
        ),
        (
            "one tile is like many",
            "single=problem.M <= block_m and problem.N <= block_n,",
            "single=problem.M < block_m and problem.N < block_n,",
        ),
    ),
    *faults_of(
        "fa_verify/verification.py",
        "test_verification",
        (
            "nothing judged is a verdict",
            "return self.judged > 0 and not self.findings",
            "return not self.findings",
        ),
        (
            "findings are no verdict",
            "return self.judged > 0 and not self.findings",
            "return self.judged > 0",
        ),
        (
            "given problems are held to the named guarantees alone",
            "checks = {**{name: GUARANTEES[name] for name in guarantees}, **STANDING}",
            "checks = {name: GUARANTEES[name] for name in guarantees}",
            "test_statistics test_verification",
        ),
        ("G4 is checked without padding", '    "G4": {"padding": True},\n', ""),
        ("violations are swallowed", "                yield from violation.findings\n", ""),
        (
            "out of range counts as judged",
            "judged=len(tally.problems)",
            "judged=len(tally.problems) + len(tally.unsupported)",
        ),
        (
            "the seed does not matter",
            'seed=f"{seed}/{name}/{dtype}/{config}"',
            'seed=f"{name}/{dtype}/{config}"',
        ),
        (
            "an unknown guarantee is passed over",
            "if unknown or not guarantees:",
            "if not guarantees:",
        ),
        (
            "what is not checked is not said",
            "                unchecked[name] = str(reason)\n",
            "                pass\n",
        ),
        (
            "a configuration's dtypes are ignored",
            'for dtype in replaced.get("dtypes", subject.dtypes)',
            "for dtype in subject.dtypes",
        ),
    ),
)
