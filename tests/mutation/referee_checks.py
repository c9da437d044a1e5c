"""Faults of the checks: they see too little, or compare with themselves, one edit each."""

from __future__ import annotations

from fa_verify.diagnosis.mutant import Mutant, faults_of

__all__ = ["CHECKS"]

CHECKS: tuple[Mutant, ...] = (
    *faults_of(
        "properties/comparison/compare.py",
        "test_compare test_agreement",
        (
            "NaN is no error",
            "return torch.where(ratio.isnan(), torch.inf, ratio)",
            "return torch.where(ratio.isnan(), 0.0, ratio)",
        ),
        ("an error below is none", "error = (got - want).abs()", "error = got - want"),
        (
            "equal infinities differ",
            "torch.where(got == want, 0.0, error / bound)",
            "error / bound",
        ),
        ("NaN agrees with any number", "(a.isnan() & b.isnan())", "(a.isnan() | b.isnan())"),
        (
            "NaN does not agree with NaN",
            "return (a == b) | (a.isnan() & b.isnan())",
            "return a == b",
        ),
        (
            "a finding is at the worst of all elements",
            "torch.where(bad, badness.to(torch.float64), -torch.inf).flatten()",
            "badness.to(torch.float64).flatten()",
        ),
        (
            "a finding cannot be replayed",
            "{self.places}\\n{replay}",
            "{self.places}",
            "test_guarantees",
        ),
        (
            "an exception cannot be replayed",
            "\\n  {raised}\\n{replay}",
            "\\n  {raised}",
            "test_search",
        ),
        (
            "the replay line names no kernel",
            "{kernel}--replay='",
            "--replay='",
            "test_compare",
        ),
        (
            "what was not compared counts",
            "if compared is None else int(compared.expand_as(bad).sum())",
            "if True else 0",
        ),
        (
            "the worst of a tensor is its mean",
            "ratio.reshape(parts, -1).amax(1) if",
            "ratio.reshape(parts, -1).mean(1) if",
            "test_compare",
        ),
        (
            "no tile is ragged",
            "ragged=number == count - 1 and length % width > 0,",
            "ragged=number == count and length % width > 0,",
            "test_guarantees",
        ),
        (
            "the mask's edge is that of the first entry",
            "seen[min(b, seen.shape[0] - 1), 0]",
            "seen[0, 0]",
            "test_compare",
        ),
    ),
    *faults_of(
        "properties/comparison/agreement.py",
        "test_agreement",
        (
            "rows do not restrict the bound",
            "            bad = bad & part\n",
            "            bad = bad | ~part\n",
        ),
        ("twice the bound is within it", "bad = ratio > 1\n", "bad = ratio > 2\n"),
        (
            "a second run answers for the first",
            "one if part is None else one & part",
            "part",
        ),
        (
            "a part of the output is forgotten",
            "one if part is None else one & part",
            "one",
        ),
        (
            "only the second run can be wrong",
            "torch.where(was_outside, first, second), one",
            "second, one",
        ),
        (
            "dv is left out",
            "    for place, name in enumerate(OUTPUTS):\n",
            "    for place, name in enumerate(OUTPUTS[:4]):\n",
        ),
        (
            "exact compares everywhere",
            "bad = compared & ~same_bits(got, want)",
            "bad = ~same_bits(got, want)",
        ),
        (
            "a run is compared with itself",
            "enumerate(zip(OUTPUTS, trial.got, again, strict=True))",
            "enumerate(zip(OUTPUTS, trial.got, trial.got, strict=True))",
        ),
        (
            "the promise is the other way round",
            "        if name in promised:\n",
            "        if name not in promised:\n",
        ),
        (
            "only the first element is looked at",
            "    if not bad.any():\n",
            "    if not bad.flatten()[:1].any():\n",
        ),
        ("keys are restricted like rows", "rows if name in OF_ROWS else keys", "rows"),
        ("NaN is nearest", ".abs().nan_to_num(nan=torch.inf)\n", ".abs().nan_to_num(nan=0.0)\n"),
        (
            "all outputs are compared",
            "second is None or name not in only:",
            "second is None:",
        ),
        (
            "one promise is enough for all outputs",
            "        if name in promised:\n",
            "        if promised:\n",
        ),
    ),
    *faults_of(
        "properties/checks/accuracy.py",
        "test_guarantees",
        ("the bound is the sum of terms", "trial.judgement.bound", "trial.judgement.terms"),
        ("every digit less is rounding", "LOGIC_SHARE = 1e-12", "LOGIC_SHARE = 1e-10"),
        (
            "logic is looked at where scores are large",
            "trial.judgement.max_score > LOGIC_SCORE",
            "trial.judgement.max_score < LOGIC_SCORE",
        ),
        (
            "logic is looked at in other dtypes",
            'trial.problem.dtype != "fp64" or',
            'trial.problem.dtype == "fp64" or',
        ),
        ("NaN is finite", "~got.isfinite() & want.isfinite()", "got.isinf() & want.isfinite()"),
        (
            "an empty row's lse is infinite",
            "bad = ~got.isfinite() & want.isfinite()",
            "bad = ~got.isfinite()",
        ),
        (
            "terms do not underflow",
            "LOGIC_SHARE * terms + LOGIC_UNDERFLOW",
            "LOGIC_SHARE * terms",
            "test_guarantees",
        ),
    ),
    *faults_of(
        "properties/checks/masking.py",
        "test_masking test_guarantees",
        (
            "only out of an empty row is looked at",
            "if got is not None and name in OF_ROWS:",
            'if got is not None and name == "out":',
        ),
        (
            "only lse of an empty row is looked at",
            "if got is not None and name in OF_ROWS:",
            'if got is not None and name == "lse":',
        ),
        ("empty rows are not run again", "    if not empty.any():\n", "    if empty.any():\n"),
        (
            "dout of empty rows is 0",
            "torch.where(empty.unsqueeze(3), torch.nan, inputs",
            "torch.where(empty.unsqueeze(3), 0.0, inputs",
        ),
        (
            "dlse of empty rows is left alone",
            "torch.where(empty, torch.nan, inputs.dlse)",
            "inputs.dlse",
            "test_lse_gradient",
        ),
        ("dirt is compared with the same dirt", 'make(problem, dirty="zero")', "make(problem)"),
        (
            "the first padding row is valid",
            "torch.arange(problem.M, device=problem.device) >= rows",
            "torch.arange(problem.M, device=problem.device) > rows",
        ),
        (
            "gradients of padding are not looked at",
            "        if got is None:\n            continue\n        padding =",
            "        if got is None or name in OF_KEYS:\n            continue\n        padding =",
        ),
        (
            "a hidden key keeps its k",
            "_replace(k=_extreme(inputs.k, at_key), v=",
            "_replace(v=",
        ),
        (
            "a hidden key keeps its v",
            ", v=_extreme(inputs.v, at_key))",
            ")",
        ),
        (
            "a hidden row keeps its dout",
            ", dout=_extreme(inputs.dout, at_row))",
            ")",
        ),
        (
            "a hidden row's q is always extreme",
            "_extreme(inputs.q, at_row) if problem.seed % 2 else inputs.q",
            "_extreme(inputs.q, at_row)",
        ),
        (
            "a hidden row's q is never extreme",
            "_extreme(inputs.q, at_row) if problem.seed % 2 else inputs.q",
            "inputs.q",
        ),
        ("rows that see the key are looked at", "blind_rows = ~(seen", "blind_rows = (seen"),
        (
            "keys are not looked at",
            "        keys=blind_keys, only=OF_KEYS,",
            "        keys=blind_keys & False, only=OF_KEYS,",
        ),
        (
            "any key is taken for a hidden one",
            "return (noise + hidden + partly).argmax(1)",
            "return noise.argmax(1)",
        ),
        (
            "a row that sees nothing is as good as any",
            "return (noise + hidden + partly).argmax(1)",
            "return (noise + hidden).argmax(1)",
        ),
        ("extreme values are 1", "torch.finfo(x.dtype).max * sign", "1.0 * sign"),
    ),
    *faults_of(
        "properties/checks/memory.py",
        "test_memory_checks test_guarantees",
        (
            "overruns are not reported",
            "for found in guards.overruns()]",
            "for found in guards.overruns()[:0]]",
        ),
        (
            "what nobody wrote is infinite",
            "unwritten = value.isnan() & ~want.isnan()",
            "unwritten = value.isinf() & ~want.isnan()",
        ),
        ("NaN stays around the rows", "make(problem, around=largest)", "make(problem)"),
        (
            "far is not far enough",
            "strides[axis] = -(-_REACH // steps) * sum(rooms)",
            "strides[axis] = _FAR // steps * sum(rooms)",
        ),
        (
            "far places are not aligned",
            "rooms.append(-(-near // _UNIT) * _UNIT)",
            "rooms.append(near)",
        ),
        ("the last axis is the far one", "axes[(first + number) % len(axes)]", "axes[-1]"),
        ("columns are always taken apart", "if whole_rows and len(axes) > 1", "if len(axes) < 1"),
        ("nothing is moved", "_replace(**dict(zip(TENSORS, moved, strict=True)))", "_replace()"),
        (
            "rows are taken apart where they may not be",
            'problem.seed % 2 == 1 or (layouts is not None and "strided" not in layouts)',
            "problem.seed % 2 == 1",
        ),
        ("no memory is enough", "if free < size + 2**30:", "if free > size + 2**30:"),
        ("tensors share a place", "start = end = sum(rooms[:number])", "start = end = 0"),
        ("an overrun has no side", "if found.before else", "if not found.before else"),
    ),
    *faults_of(
        "properties/checks/invariance.py",
        "test_invariance test_guarantees",
        (
            "a subject that refuses what it computed is excused",
            "raise SubjectError(f",
            "raise NotImplementedError(f",
        ),
        (
            "strides are compared with themselves",
            "make(problem, layouts=_CONTIGUOUS)",
            "make(problem)",
        ),
        (
            "the gradient of a sum is not expanded",
            "ones[:1, :1, :1, :1].expand(ones.shape)",
            "ones",
        ),
        (
            "the first slice is taken",
            "b, group = problem.seed % problem.B, problem.seed // problem.B % problem.Hk",
            "b, group = 0, 0",
        ),
        ("a slice has the lengths of the first", "sliced((b,), ", "sliced((0,), "),
        ("one repetition is enough", "_REPEATS = 3", "_REPEATS = 1"),
        (
            "no call comes between",
            "            run_subject(trial.subject, neighbour, inputs)\n",
            "            make(neighbour)\n",
        ),
        ("the dtype has no neighbour", '        {"dtype": _OTHER_DTYPE[problem.dtype]},\n', ""),
        (
            "the first refusal ends the check",
            "        except NotImplementedError:\n            continue\n",
            "        except NotImplementedError:\n            return []\n",
        ),
        (
            "gradients of the slice are not looked at",
            'into[of_keys if name in ("dk", "dv") else of_rows] = piece',
            'into[of_keys if name in ("dk", "dv") else of_rows] = piece if name == '
            '"out" else into[of_keys if name in ("dk", "dv") else of_rows]',
        ),
        (
            "a dout of ones is held to another's bound",
            "dataclasses.replace(trial, inputs=inputs, got=got, want=want, judgement=judgement)",
            "dataclasses.replace(trial, inputs=inputs, want=want)",
        ),
        (
            "findings on state are swallowed",
            '        findings = agree(trial, again, "G13 state", f"differs after a '
            'call with {changed}")\n',
            '        findings = agree(trial, trial.got, "G13 state", f"differs after '
            'a call with {changed}")\n',
        ),
    ),
    *faults_of(
        "properties/checks/statistics.py",
        "test_statistics",
        (
            "needles are as good as any bias",
            '        and problem.bias.partition("/")[0] in _FLAT_BIAS\n',
            "",
            "test_bias",
        ),
        (
            "a few keys are as good as many",
            "        and problem.alibi in _FLAT_ALIBI\n",
            "",
            "test_alibi",
        ),
        (
            "a narrow softcap changes nothing about errors",
            "        and (problem.softcap is None or problem.softcap >= _WIDEST * high)\n",
            "",
            "test_softcap",
        ),
        ("NaN is no excess", "    if mean <= limit:\n", "    if not mean > limit:\n"),
        ("NaN has no bias", "    if abs(mean) <= limit:\n", "    if not abs(mean) > limit:\n"),
        (
            "bias away from zero alone counts",
            "    if abs(mean) <= limit:\n",
            "    if mean <= limit:\n",
        ),
        ("few keys count", "counted = terms >= FEWEST", "counted = terms > 0"),
        (
            "a row is its first column",
            "rows = errors.z.square().mean(1)",
            "rows = errors.z[:, :1].square().mean(1)",
        ),
        ("dv is left out", '        ("dv", variance.rows_seen),\n', ""),
        (
            "every dtype follows the model",
            'problem.dtype in ("fp16", "bf16")\n        and',
            "bool(problem.dtype)\n        and",
        ),
        (
            "equal scores follow the model",
            "low <= problem.scale * math.sqrt(problem.D) <= high",
            "problem.scale * math.sqrt(problem.D) <= high",
        ),
        ("equal heads follow the model", '        and "expanded" not in problem.layouts\n', ""),
        (
            "the mean of few squares is near 1",
            "SLACK * (1 + 2 * math.sqrt(RARE / samples) + 2 * RARE / samples)",
            "SLACK",
        ),
        ("tensor cores do not drift", "+ float(errors.drift.mean())\n", "\n"),
        ("bias is toward minus infinity", "z * want.sign()", "z"),
        (
            "the worst row is the first",
            "worst = int(rows.nan_to_num(nan=torch.inf).argmax())",
            "worst = 0",
        ),
        (
            "a spread is a variance",
            "spread = getattr(variance, name)[counted].sqrt()",
            "spread = getattr(variance, name)[counted]",
        ),
    ),
    *faults_of(
        "properties/checks/identities.py",
        "test_identities",
        ("NaN holds", "bad = ~(identity.error <= limit)", "bad = identity.error > limit"),
        (
            "a softcap changes no sum",
            "[0 if problem.softcap is None else 1 :]",
            "[:]",
            "test_softcap",
        ),
        (
            "a gradient of lse changes no sum",
            " or trial.inputs.dlse is not None:",
            ":",
            "test_lse_gradient",
        ),
        (
            "rows that see nothing are summed",
            "torch.where(live, trial.inputs.dout.to(torch.float64), 0.0)",
            "trial.inputs.dout.to(torch.float64)",
        ),
        (
            "heads of few keys count",
            "torch.where(counted, of.sqrt(), torch.inf)",
            "of.sqrt()",
        ),
        (
            "held to it where the model is silent",
            "if not trial.subject.backward or not is_valid(problem) or",
            "if not trial.subject.backward or",
        ),
        ("nothing drifts", "u_in * (true.abs() * few)", "0 * (true.abs() * few)"),
        ("all keys drift", "u_in * (true.abs() * few)", "u_in * true.abs()"),
        ("no sum alone is too large", "most * identity.spread", "64 * most * identity.spread"),
        (
            "all sums together are not looked at",
            "if not found and not mean <= limit:",
            "if not found and not mean <= 64 * limit:",
        ),
    ),
    *faults_of(
        "properties/checks/closed_form.py",
        "test_closed_form",
        ("one key more is a rounding", "~(got == want)\n", "~((got - want).abs() <= 1)\n"),
        ("long rows are not counted", "_COUNTED = 65_536", "_COUNTED = 4_096"),
        (
            "all heads of a group have to see a pair",
            "*seen.shape[2:]).any(2)",
            "*seen.shape[2:]).all(2)",
        ),
        ("out below 1 is 1", "live & ~(out == 1)", "live & (out > 1)"),
        ("lse may depend on v", '(("out", _FACTOR), ("lse", 1.0))', '(("out", _FACTOR),)'),
        (
            "lengths stay in order",
            "entries, heads = range(problem.B)[::-1], _reversed",
            "entries, heads = range(problem.B), _reversed",
        ),
        (
            "the first padding row has other values",
            "return (index < lengths.unsqueeze(1))",
            "return (index <= lengths.unsqueeze(1))",
        ),
        (
            "the same keys are read every time",
            "(int(stream.integers(problem.seed,",
            "(0 * int(stream.integers(problem.seed,",
        ),
        ("NaN is seen", "((x != 0) != seen) | ~x.isfinite()", "(x != 0) != seen"),
        (
            "subnormal outputs are compared",
            "first.abs() > info.smallest_normal",
            "first.abs() >= 0",
        ),
        ("heads are not reversed", "groups.flip(0, 1)", "groups.flip(0)"),
        (
            "gradients are not permuted",
            "    for name in OUTPUTS:\n        first, second = getattr(trial.got, "
            "name), getattr(again, name)",
            "    for name in OUTPUTS[:2]:\n        first, second = "
            "getattr(trial.got, name), getattr(again, name)",
        ),
        (
            "values that overflow are scaled",
            "float(nonzero.amax()) * _FACTOR > info.max",
            "float(nonzero.amax()) > info.max",
        ),
    ),
)
