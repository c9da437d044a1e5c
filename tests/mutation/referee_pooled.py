"""Faults of what judges pooled probabilities: references, bounds and checks, one edit each."""

from __future__ import annotations

from fa_verify.diagnosis.mutant import Mutant, faults_of

__all__ = ["POOLED"]

POOLED: tuple[Mutant, ...] = (
    *faults_of(
        "oracles/reference/pooled.py",
        "test_pooled_oracles",
        (
            "a mean is a sum",
            "        pooled /= (rows_of * keys_of).clamp(min=1)\n",
            "        pass\n",
        ),
        (
            "padding counts in the mean",
            "found.append((ends - starts).clamp(0, each))",
            "found.append((length - starts + 0 * ends).clamp(0, each))",
        ),
        ("a maximum is over keys alone", '"amax" if pool == "max" else "sum"', '"sum"'),
        (
            "a maximum over keys is a sum",
            'blocks.amax(-1) if pool == "max" else blocks.sum(-1)',
            "blocks.sum(-1)",
        ),
        (
            "chunks begin at row 0",
            "torch.arange(start, start + part.shape[2]",
            "torch.arange(0, part.shape[2]",
        ),
        (
            "heads of a group lie apart",
            ".repeat_interleave(H // Hk, dim=1)",
            ".repeat(1, H // Hk, 1, 1)",
        ),
        ("no scale", "q @ k.mT * sm_scale", "q @ k.mT"),
        (
            "hidden pairs are seen",
            "torch.where(seen, q @ k.mT * sm_scale, -math.inf)",
            "q @ k.mT * sm_scale",
        ),
        (
            "a row that sees nothing is NaN",
            "m_bhm1 = torch.where(live, scores_bhmn.amax(3, keepdim=True), 0.0)",
            "m_bhm1 = scores_bhmn.amax(3, keepdim=True)",
        ),
        ("an unknown pooling is a mean", "    if pool not in POOLS:\n", "    if False:\n"),
    ),
    *faults_of(
        "oracles/bounds/pooled.py",
        "test_pooled_oracles",
        ("the error of the LSE is left out", " + fwd.lse_bound.unsqueeze(2)", ""),
        ("the error of the score is left out", "scores.error + fwd", "fwd"),
        ("the exponential is exact", " + c.u_exp\n", "\n"),
        ("the magnitude of the LSE is left out", " + scores.lse.abs().unsqueeze(2)", ""),
        ("nothing underflows", ".add_(c.ftz).masked_fill_(x.hidden", ".masked_fill_(x.hidden"),
        ("hidden pairs err", ".masked_fill_(x.hidden, 0.0)\n    return", "\n    return"),
        ("additions are exact", " + additions * largest)", ")"),
        ("additions of the truth alone err", "additions * largest", "additions * p_of"),
        ("one axis alone is summed", "(rows_of + keys_of + 5)", "(rows_of + 5)"),
        ("one addition for each pair", "(rows_of + keys_of + 5)", "(rows_of * keys_of + 5)"),
        ("the division is exact", "(rows_of + keys_of + 5)", "(rows_of + keys_of + 1)"),
        (
            "the bound of a mean is that of a sum",
            " / (rows_of * keys_of).clamp(min=1) + c.ftz",
            " + c.ftz",
        ),
        ("a mean does not underflow", ".clamp(min=1) + c.ftz", ".clamp(min=1)"),
        ("a maximum errs by its value", "c.times * (largest - p_of)", "c.times * largest"),
        ("float64 counts once", "return c.times * (largest - p_of)", "return largest - p_of"),
        ("a mean of float64 counts once", "return c.times * mean.", "return mean."),
        ("where nothing is visible something may be", ".masked_fill_(e_of == 0, 0.0)", ""),
        (
            "the declared numerics are forgotten",
            "c = constants(in_dtype, numerics)",
            "c = constants(in_dtype, Numerics())",
        ),
    ),
    *faults_of(
        "oracles/bounds/numpy_pooled.py",
        "test_pooled_oracles",
        (
            "visible pairs are counted",
            "sum(probs) / len(probs)",
            "sum(probs) / max(1, sum(p > 0 for p in probs))",
        ),
        (
            "padding is part of a block",
            "min(first_m + size[0], place.rows)",
            "min(first_m + size[0], M)",
        ),
        (
            "keys past the lengths are part of a block",
            "min(first_n + size[1], place.keys)",
            "min(first_n + size[1], N)",
        ),
        (
            "a maximum is a mean",
            'max(probs) if pool == "max" else sum(probs)',
            'max(probs) if pool == "min" else sum(probs)',
        ),
        (
            "the error of the score is left out",
            "score_error(head, sm_scale, numerics, units)\n        + bound",
            "bound",
        ),
        ("the division is exact", "(rows - 1) + (keys - 1) + 3 + 4", "(rows - 1) + (keys - 1) + 3"),
        ("float64 counts once", "= times * value", "= value"),
        ("a maximum errs by its value", "max(largest) - max(probs)", "max(largest)"),
    ),
    *faults_of(
        "properties/checks/pooled.py",
        "test_pooled_checks",
        ("blocks are of one size", "        seed //= len(some)\n", ""),
        ("no block is larger than there are pairs", "length + 5, 2,", "length, 2,"),
        ("means alone are judged", "    for pool in POOLS:\n", "    for pool in POOLS[:1]:\n"),
        (
            "twice the bound is within it",
            "_found(trial, pool, ratio > 1,",
            "_found(trial, pool, ratio > 2,",
        ),
        ("padding is as it was", 'make(trial.problem, dirty="zero")', "make(trial.problem)"),
        (
            "strides are as they were",
            "contiguous = make(trial.problem, layouts=_CONTIGUOUS)",
            "contiguous = make(trial.problem)",
        ),
        ("the same lies around", "make(trial.problem, around=largest)", "make(trial.problem)"),
        ("a key that nobody sees is replaced", ".sum((1, 2)) * seen.any(2).any(1)", ".sum((1, 2))"),
        ("no key is replaced", "trial.inputs._replace(k=extreme)", "trial.inputs"),
        (
            "rows that see the key are compared",
            "blind[:, :, m : m + rows].all(2)",
            "blind[:, :, m : m + rows].any(2)",
        ),
        ("a head alone is not compared", "    again[of_rows] = part\n", ""),
        (
            "another run is the first",
            "first, again = _run(trial, pool), _run(trial, pool, inputs)",
            "first = again = _run(trial, pool)",
        ),
        (
            "what is written outside is not told",
            "    for found in guards.overruns():\n",
            "    for found in ():\n",
        ),
        ("what is not written is not told", "got.isnan(), zeros, (got", "got.isinf(), zeros, (got"),
        (
            "nothing is promised to the bit",
            "    if not trial.subject.promises(",
            "    if True or trial.subject.promises(",
        ),
        (
            "all is promised to the bit",
            "    if not trial.subject.promises(",
            "    if False and trial.subject.promises(",
        ),
        (
            "a first run outside of the bound is passed over",
            "was_outside ^ is_outside",
            "is_outside & ~was_outside",
        ),
        ("places are not restricted", "        bad = bad & compared\n", "        pass\n"),
        (
            "a finding ends where its block begins",
            "min((place + 1) * each, length) - 1}",
            "place * each}",
        ),
        ("logic is asked of large scores", " or trial.judgement.max_score > LOGIC_SCORE", ""),
    ),
    *faults_of(
        "properties/execution/trial.py",
        "test_pooled_checks",
        ("pooled of any form passes", '        _check_form("pooled", pooled, q, shape)\n', ""),
    ),
    *faults_of(
        "properties/subjects/subject.py",
        "test_pooled_checks",
        (
            "an excluded problem is pooled",
            "        if reason := self.excludes(problem):\n",
            "        if reason := None:\n",
        ),
        (
            "what is no tensor is pooled",
            "        if not isinstance(found, torch.Tensor):\n",
            "        if found is None:\n",
        ),
    ),
)
