"""Mutants of the harness that no operator makes: faults of reasoning, one edit each.

Examples: a bound lacks a term, errors cancel in a sum, a check compares a run with itself, a sample
depends on its result, noise counts as a change. ``caught_by`` names the files of tests/unit that
have to kill each mutant, the quickest first.
"""

from __future__ import annotations

from tests.mutation.catalogue.mutant import Mutant, faults_of

__all__ = ["HARNESS"]

_BOUNDS = (
    *faults_of(
        "oracles/bounds/backward.py",
        "test_bounds_agree test_error_model",
        (
            "the reach of dq cancels",
            "dq_reach=grads.abs_ds @ x.abs_k",
            "dq_reach=grads.ds @ x.k",
            "test_error_model",
        ),
        (
            "dk is added of exact dS",
            "dk_products=(grads.reach.mT @ x.abs_q)",
            "dk_products=(grads.abs_ds.mT @ x.abs_q)",
        ),
        (
            "dq is added without error",
            "per_product = c.g((numerics.block_n + 2) * tiles) * (1 + c.u_cast)",
            "per_product = 0 * tiles",
        ),
        (
            "a gradient of lse is added to delta",
            "        delta -= dlse\n",
            "        delta += dlse\n",
        ),
    ),
    *faults_of(
        "oracles/bounds/bias.py",
        "test_bias",
        (
            "the bias has the dtype of q",
            "constants(bias_dtype, Numerics())",
            "constants(in_dtype, Numerics())",
        ),
    ),
    *faults_of(
        "oracles/bounds/constants.py",
        "test_bounds_agree test_error_model",
        (
            "two roundings are one",
            "math.expm1(rounds * math.log1p(u_p)), rounds * eta_p",
            "u_p, rounds * eta_p",
        ),
    ),
    *faults_of(
        "oracles/bounds/error_model.py",
        "test_error_model test_bounds_agree",
        (
            "heads stored apart are added exactly",
            "added = c.u_in * apart * _by_group(value.abs() + bound, apart).sum(1)",
            "added = torch.zeros_like(_by_group(bound, apart).sum(1))",
        ),
        (
            "terms of lse are 1",
            "terms_lse=1 + scores.m.abs() + scores.log_l.abs()",
            "terms_lse=torch.ones_like(scores.m)",
        ),
        ("the range is that of the last chunk", "torch.stack(peaks).amax(0)", "peaks[-1]"),
    ),
    *faults_of(
        "oracles/bounds/forward.py",
        "test_alibi",
        ("terms cancel", "sum(map(torch.abs, x.added), parts)", "s.abs()"),
        (
            "the reach of a score is scaled",
            "s, reach, p, error, changes",
            "s, reach * sm_scale, p, error, changes",
            "test_error_model",
        ),
    ),
    *faults_of(
        "oracles/bounds/in_numpy/bias.py",
        "test_bias",
        (
            "every pair is one of the first entry",
            "(b, h, m, n), bias.shape",
            "(0, h, m, n), bias.shape",
        ),
    ),
    *faults_of(
        "oracles/bounds/in_numpy/pooled.py",
        "test_pooled_oracles",
        (
            "visible pairs are counted",
            "sum(probs) / len(probs)",
            "sum(probs) / max(1, sum(p > 0 for p in probs))",
        ),
    ),
    *faults_of(
        "oracles/bounds/pooled.py",
        "test_pooled_oracles",
        ("additions of the truth alone err", "additions * largest", "additions * p_of"),
        (
            "the declared numerics are forgotten",
            "c = constants(in_dtype, numerics)",
            "c = constants(in_dtype, Numerics())",
        ),
    ),
)
_REFERENCES = (
    *faults_of(
        "oracles/reference/numpy_reference.py",
        "test_numpy_reference",
        (
            "hidden dS is multiplied instead of selected",
            "dscores_mn = np.where(seen_mn, probs_mn * (dprobs_mn - delta_m[:, None]), 0.0)",
            "dscores_mn = probs_mn * (dout_me @ v_ne.T - delta_m[:, None])",
        ),
    ),
    *faults_of(
        "oracles/reference/pooled.py",
        "test_pooled_oracles",
        (
            "padding counts in the mean",
            "found.append((ends - starts).clamp(0, each))",
            "found.append((length - starts + 0 * ends).clamp(0, each))",
        ),
    ),
    *faults_of(
        "oracles/reference/softcap.py",
        "test_softcap",
        ("the slope cancels", "y.sign() * (1 - 2 * e / (1 + e))", "y.tanh()"),
    ),
    *faults_of(
        "oracles/reference/torch_reference.py",
        "test_lse_gradient",
        (
            "a gradient of lse is that of the first rows",
            "dlse[:, :, here].to(torch.float64)",
            "dlse[:, :, : here.stop - here.start].to(torch.float64)",
        ),
    ),
)
_CHECKS = (
    *faults_of(
        "properties/guarantees/agreement.py",
        "test_agreement",
        (
            "a run is compared with itself",
            "second, part = again[name], (where or {}).get(name)",
            "second, part = got, (where or {}).get(name)",
        ),
        (
            "one promise is enough for all outputs",
            "        if name in promised:\n",
            "        if promised:\n",
        ),
    ),
    *faults_of(
        "properties/guarantees/added_gradients.py",
        "test_bias",
        ("NaN passes", "bad = ratio > 1", "bad = (got - want).abs() > limit"),
    ),
    *faults_of(
        "properties/guarantees/closed_form.py",
        "test_closed_form",
        ("one key more is a rounding", "~(got == want)\n", "~((got - want).abs() <= 1)\n"),
        ("out below 1 is 1", "live & ~(out == 1)", "live & (out > 1)"),
    ),
    *faults_of(
        "properties/running/ratios.py",
        "test_compare test_agreement",
        (
            "NaN is no error",
            "nan_to_num_(torch.inf, torch.inf)",
            "nan_to_num_(0.0, torch.inf)",
        ),
        (
            "the largest of an output is its mean",
            "ratio.amax(1) if",
            "ratio.mean(1) if",
            "test_compare",
        ),
        (
            "bounds are finite if none is NaN",
            "math.isfinite(joined.amax())",
            "not math.isnan(joined.amax())",
            "test_compare",
        ),
    ),
    *faults_of(
        "properties/guarantees/identities.py",
        "test_identities",
        ("no sum alone is too large", "most * identity.spread", "64 * most * identity.spread"),
    ),
    *faults_of(
        "properties/guarantees/invariance.py",
        "test_invariance test_guarantees",
        (
            "a dout of ones is held to another's bound",
            "dataclasses.replace(trial, inputs=inputs, got=got, want=want, judgement=judgement)",
            "dataclasses.replace(trial, inputs=inputs, want=want)",
        ),
        (
            "findings on state are swallowed",
            "findings = agree(trial, again, G13",
            "findings = agree(trial, trial.got, G13",
        ),
        (
            "no call comes between",
            "            run_subject(trial.subject, neighbour, inputs)\n",
            "            make(neighbour)\n",
        ),
        (
            "the first refusal ends the check",
            "_refused(trial, neighbour, str(refusal))\n            continue",
            "_refused(trial, neighbour, str(refusal))\n            return []",
        ),
        (
            "calls that differ are not judged",
            "for found in accuracy(called) or logic(called)",
            "for found in ()",
        ),
        (
            "a subject that refuses what it computed is excused",
            "raise SubjectError(f",
            "raise RefusedError(f",
        ),
    ),
    *faults_of(
        "properties/guarantees/masking.py",
        "test_masking test_guarantees",
        (
            "dout of empty rows is 0",
            "torch.where(blind.unsqueeze(3), torch.nan, inputs",
            "torch.where(blind.unsqueeze(3), 0.0, inputs",
        ),
    ),
    *faults_of(
        "oracles/bounds/sinks.py",
        "test_sinks",
        ("dsinks are those of the first entry", ".sum((0, 2))", ".sum(2)[0]"),
        ("the exponent of P is exact", "exponent_error=error.", "exponent_error=0 * error."),
    ),
    *faults_of(
        "properties/guarantees/pooled.py",
        "test_pooled_checks",
        (
            "another run is the first",
            "first, again = _run(trial, pool), _run(trial, pool, inputs)",
            "first = again = _run(trial, pool)",
        ),
        (
            "a first run outside of the bound is passed over",
            "was_outside ^ is_outside",
            "is_outside & ~was_outside",
        ),
    ),
    *faults_of(
        "properties/guarantees/limits.py",
        "test_limits",
        (
            "sums are not weighted",
            "(want * error).sum(3),",
            "error.sum(3),",
        ),
        (
            "a tile is a row",
            '"output": whole, "tile": tiles,',
            '"output": whole, "tile": sums,',
        ),
        (
            "values of one sign are judged",
            '    "normal", "times8",',
            '    "large_mean_v", "normal", "times8",',
        ),
        (
            "a forward out of its bound is read",
            "given = forward_read(trial)",
            "given = Returned(got.out, got.lse)",
        ),
        (
            "rows of an output are not counted",
            "(others[0] + of_rows[0],",
            "(others[0],",
        ),
    ),
    *faults_of(
        "properties/guarantees/statistics.py",
        "test_statistics",
        (
            "a row is its first column",
            "rows = errors.z.square().mean(1)",
            "rows = errors.z[:, :1].square().mean(1)",
        ),
        ("NaN is no excess", "    if mean <= limit:\n", "    if not mean > limit:\n"),
    ),
)
_RUNS = (
    *faults_of(
        "properties/running/trial.py",
        "test_trial test_search test_guarantees",
        (
            "an infinite bound passes",
            "if not math.isfinite(judgement.largest_lse_bound):",
            "if math.isnan(judgement.largest_lse_bound):",
        ),
        (
            "the numerics of a configuration are ignored",
            "numerics=subject.numerics_of(problem),\n            softcap",
            "numerics=subject.numerics,\n            softcap",
        ),
        (
            "a refusal is an error",
            "        except NotImplementedError as error:\n"
            "            raise _refusal(error) from error\n",
            "",
        ),
    ),
    *faults_of(
        "properties/running/settings.py",
        "test_search",
        (
            "a changed setting stays",
            'from {was} to {now}")\n                restore(was)\n',
            'from {was} to {now}")\n',
        ),
        (
            "the state of a generator is not compared",
            "if not torch.equal(was, now):",
            "if not torch.equal(now, now):",
        ),
    ),
    *faults_of(
        "properties/kernels/refusals.py",
        "test_search",
        (
            "a call that a machine cannot run is an error",
            "class CannotRunError(RefusedError):",
            "class CannotRunError(NotImplementedError):",
        ),
    ),
    *faults_of(
        "properties/kernels/declared_values.py",
        "test_declared_values",
        (
            "a value that no call had is not named",
            "if Value(word, value) not in drawn:",
            "if Value(word, value) in drawn:",
        ),
        (
            "the longest sequence has no example",
            'if word == "max_seqlen" else _empty(subject, device)',
            'if word == "" else _empty(subject, device)',
        ),
    ),
    *faults_of(
        "properties/kernels/vocabulary.py",
        "test_subject",
        (
            "alignment is as declared where lengths differ",
            "return rows == keys",
            "return problem.M == problem.N",
        ),
    ),
    *faults_of(
        "properties/kernels/subject.py",
        "test_subject",
        (
            "base 2 is converted in the dtype of lse",
            "(lse.to(torch.float64) * math.log(2)).to(lse.dtype)",
            "lse * math.log(2)",
        ),
        (
            "a configuration has no atomics",
            '.get("atomic", self.numerics.atomic)',
            '.get("dots", self.numerics.atomic)',
        ),
        (
            "the default scale is passed",
            '"mask": problem.mask, "sm_scale": problem.scale,',
            '"mask": problem.mask, "sm_scale": problem.D**-0.5,',
        ),
    ),
    *faults_of(
        "fa_verify/simulator/interpreter/rounding.py",
        "test_interpreter",
        (
            "ties go up",
            "rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16",
            "rounded = (bits + np.uint32(0x8000)) >> 16",
        ),
        (
            "float64 is rounded twice",
            "values = to_odd_fp32(values.astype(np.float64))",
            "values = values.astype(np.float32)",
        ),
    ),
    *faults_of(
        "fa_verify/simulator/interpreter/repair.py",
        "test_interpreter",
        (
            "masked-off lanes are 0",
            "np.array(_POISON.get(element.name, _WILD)).astype(dtype)",
            "np.array(0).astype(dtype)",
        ),
    ),
    *faults_of(
        "fa_verify/simulator/interpreter/addresses.py",
        "test_interpreter_addresses",
        (
            "an earlier launch's tensors count",
            "launch = _Launch([*zip(",
            "launch = launch if launch.extents else _Launch([*zip(",
        ),
    ),
)
_PROBLEMS = (
    *faults_of(
        "properties/problems/strategies.py",
        "test_strategies",
        ("there are ten seeds", "draw(st.integers(0, 2**31 - 1))", "draw(st.integers(0, 9))"),
    ),
    *faults_of(
        "properties/inputs/tensors.py",
        "test_alibi",
        (
            "nothing odd lies between slopes",
            "torch.stack([values, _cast(others",
            "torch.stack([values, _cast(torch.zeros_like(others)",
        ),
    ),
    *faults_of(
        "properties/problems/batched.py",
        "test_batched",
        (
            "all have the lengths of the first",
            "return (*given, *(length for lengths in drawn for length in lengths))",
            "return given * count",
        ),
    ),
)
_VERDICTS = (
    *faults_of(
        "properties/search/search.py",
        "test_search",
        (
            "the averages of errors are no part of the verdict",
            "if not (claim.bounded and inside) and",
            "if claim.bounded and not inside and",
            "test_statistics",
        ),
        (
            "twice the bound needs no check",
            "inside = max(self.peaks.values(), default=0.0) <= 1\n",
            "inside = max(self.peaks.values(), default=0.0) <= 1e3\n",
        ),
        (
            "every draw is the same",
            "        hypothesis.seed(seed)(holds)\n",
            "        hypothesis.seed(0)(holds)\n",
        ),
        (
            "a refused second run hides the first",
            '            self._refuse(problem, refusal, f"in a second run: {refusal}")\n',
            "            return []\n",
        ),
    ),
    *faults_of(
        "properties/running/tally.py",
        "test_tally",
        (
            "problems that differ in the seed are one",
            "hashlib.blake2b(problem.encode(), digest_size=8)",
            "hashlib.blake2b(problem.partition(',\"seed\"')[0].encode(), digest_size=8)",
        ),
    ),
    *faults_of(
        "properties/search/minimize.py",
        "test_minimize",
        (
            "what passes is simpler",
            "if not found or found[0].guarantee != findings[0].guarantee:",
            "if not all(x.guarantee == findings[0].guarantee for x in found):",
        ),
        (
            "a smaller size starts from the problem before",
            "findings, candidates = found, candidates_of(candidate)",
            "findings, candidates = found, candidates_of(problem)",
        ),
    ),
    *faults_of(
        "fa_verify/verification.py",
        "test_statistics test_verification",
        (
            "given problems are held to the named guarantees alone",
            "if x.kind == problem.kind), *standing_of(problem.kind))",
            "if x.kind == problem.kind),)",
        ),
    ),
)
_GATE = (
    *faults_of(
        "properties/regression/bootstrap.py",
        "test_bootstrap",
        (
            "percentiles without their tails",
            "found.append((again.mean(axis=1)[varied] - mean)",
            "found.append((again.mean(axis=1)[varied] - mean) * 0.5",
        ),
        ("the level is twice as wide", "[level, 1 - level]", "[4 * level, 1 - 4 * level]"),
    ),
    *faults_of(
        "properties/regression/drift.py",
        "test_drift",
        (
            "the ratio is upside down",
            "_log_ratio(now.errors[output][1], then.errors[output][1])",
            "_log_ratio(then.errors[output][1], now.errors[output][1])",
        ),
    ),
    *faults_of(
        "properties/regression/speed_ratio.py",
        "test_speed_ratio",
        ("then and now are exchanged", "for rounds in (now, then)", "for rounds in (then, now)"),
    ),
    *faults_of(
        "properties/regression/measurement.py",
        "test_measurement",
        ("NaN is no error", "math.inf if math.isnan(x) else x", "0.0 if math.isnan(x) else x"),
    ),
    *faults_of(
        "properties/regression/compiled_kernels.py",
        "test_compiled_kernels",
        ("the last variant counts", "taken.most(found.get(name))", "taken"),
    ),
)

HARNESS: tuple[Mutant, ...] = (
    *_BOUNDS,
    *_REFERENCES,
    *_CHECKS,
    *_RUNS,
    *_PROBLEMS,
    *_VERDICTS,
    *_GATE,
)
