"""Faults of how a subject is run, and of the interpreter that it runs in, one edit each."""

from __future__ import annotations

from fa_verify.diagnosis.mutant import Mutant, faults_of

__all__ = ["RUNS"]

RUNS: tuple[Mutant, ...] = (
    *faults_of(
        "properties/subjects/subject.py",
        "test_subject",
        (
            "a subject is not told of a softcap",
            "        if problem.softcap is not None:\n            mods",
            "        if False:\n            mods",
        ),
        ("only M is a multiple", "M % multiple == 0 == N % multiple", "M % multiple == 0"),
        ("only D is supported", "{problem.D, problem.Dv} <= set(dims)", "problem.D in dims"),
        (
            "a comparison rests on itself",
            "_PROMISED_WITH.get(guarantee, guarantee) not in",
            "guarantee not in",
        ),
        (
            "a configuration has no atomics",
            '.get("atomic", self.numerics.atomic)',
            '.get("dots", self.numerics.atomic)',
        ),
        (
            "what is summed by atomics is promised too",
            "for name in OUTPUTS if name not in atomic)",
            "for name in OUTPUTS)",
        ),
        (
            "base 2 is converted in the dtype of lse",
            "(lse.to(torch.float64) * math.log(2)).to(lse.dtype)",
            "lse * math.log(2)",
        ),
        (
            "every lse of that value is an empty row's",
            "empty & (lse == float(self.empty_lse))",
            "lse == float(self.empty_lse)",
        ),
        ("every lse of an empty row is right", "empty & (lse == float(self.empty_lse))", "empty"),
        (
            "a configuration has no numerics",
            "dataclasses.replace(self.numerics, **replaced)",
            "self.numerics",
        ),
        (
            "three values are a pair",
            "if pair and len(result) != 2:",
            "if pair and len(result) < 2:",
        ),
        (
            "alignment is as declared where lengths differ",
            'alignment == "bottom-right" or not positional or rows == keys',
            'alignment == "bottom-right" or not positional or M == N',
        ),
        (
            "an excluded problem is run",
            "        if reason is not None:",
            "        if reason is None:",
        ),
        (
            "the default scale is passed",
            "mask=problem.mask, sm_scale=problem.scale, **config",
            "mask=problem.mask, sm_scale=problem.D**-0.5, **config",
        ),
    ),
    *faults_of(
        "properties/execution/trial.py",
        "test_trial test_search test_guarantees",
        (
            "a loss on lse alone is one on out too",
            '[problem.dout == "zero" :]',
            "[:]",
            "test_lse_gradient",
        ),
        (
            "an lse without a gradient passes",
            "if lse is None or not lse.requires_grad:",
            "if False:",
            "test_lse_gradient",
        ),
        (
            "a forward alone is given inputs that ask for gradients",
            "requires_grad_(subject.backward)",
            "requires_grad_(True)",
        ),
        ("a library's line is named", "(own or frames)[-1]", "frames[-1]"),
        (
            "the interpreter's words stand for the kernel's",
            "error = error.__cause__\n    text",
            "pass\n        break\n    text",
            "test_interpreter_addresses",
        ),
        (
            "allocations are not poisoned",
            "    fill.fill_uninitialized_memory = True\n",
            "    fill.fill_uninitialized_memory = False\n",
        ),
        (
            "any dtype will do",
            "if tuple(got.shape) != shape or got.dtype != dtype:",
            "if tuple(got.shape) != shape:",
        ),
        (
            "any shape will do",
            "if tuple(got.shape) != shape or got.dtype != dtype:",
            "if got.dtype != dtype:",
        ),
        (
            "lse of float64 is float32",
            "dtype = torch.float64 if dtype == torch.float64 else torch.float32",
            "dtype = torch.float32",
        ),
        (
            "what is out of range is judged",
            "    if judgement.out_of_range is not None:\n        return None\n",
            "",
        ),
        (
            "nothing is in range",
            "    if judgement.out_of_range is not None:\n",
            "    if judgement.out_of_range is None:\n",
        ),
        (
            "an infinite bound passes",
            "    if not bool(torch.stack([bound.isfinite().all()",
            "    if not bool(torch.stack([~bound.isnan().all()",
        ),
        (
            "a bound of NaN in out alone fails",
            "for bound in judgement.bound]).all())",
            "for bound in judgement.bound[:1]]).all())",
        ),
        (
            "the numerics of a configuration are ignored",
            "        numerics=subject.numerics_of(problem),\n        softcap",
            "        numerics=subject.numerics,\n        softcap",
        ),
        ("a refusal is an error", "    except NotImplementedError:\n        raise\n", ""),
        (
            "no guards on a CPU",
            'GuardBands() if self.problem.device == "cpu" else nullcontext()',
            "nullcontext()",
        ),
        (
            "an output without gradient passes",
            "        if not out.requires_grad:\n",
            "        if not out.requires_grad and out.is_cuda:\n",
        ),
        (
            "gradients may be missing",
            "        if gradient is None:\n",
            "        if gradient is None and x.is_cuda:\n",
        ),
        ("the mode of torch stays", "        torch.set_deterministic_debug_mode(mode)\n", ""),
    ),
    *faults_of(
        "properties/execution/guard_bands.py",
        "test_guard_bands",
        ("empty_like is not seen", "    _aten.empty_like.default,\n", ""),
        ("zeros are not seen", "    _aten.zeros.default,\n", ""),
        ("new tensors are not poisoned", "            own.fill_(math.nan)\n", "            pass\n"),
        (
            "only the band after a tensor is looked at",
            "((before, True), (after, False))",
            "((after, False),)",
        ),
        (
            "the furthest byte is told",
            "written[-1 if is_before else 0]",
            "written[0 if is_before else -1]",
        ),
        ("values of ones are lost", "            tensor.copy_(like)\n", "            pass\n"),
        (
            "tensors share a band",
            "        self._allocations.append((tensor, band))\n",
            "        self._allocations = [(tensor, band)]\n",
        ),
        ("bands are narrower than a wide load", "_GUARD_BYTES = 1024", "_GUARD_BYTES = 8"),
    ),
    *faults_of(
        "simulator/interpreter/rounding.py",
        "test_interpreter",
        (
            "ties go up",
            "rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16",
            "rounded = (bits + np.uint32(0x8000)) >> 16",
        ),
        (
            "bf16 truncates",
            "rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16",
            "rounded = bits >> 16",
        ),
        (
            "float64 is rounded twice",
            "values = to_odd_fp32(values.astype(np.float64))",
            "values = values.astype(np.float32)",
        ),
        (
            "toward zero is to nearest",
            "truncated: Array = bits - beyond",
            "truncated: Array = bits - beyond * 0",
        ),
        ("TF32 keeps a bit too many", "np.uint32(0xFFFFE000)", "np.uint32(0xFFFFF000)"),
        ("an addend is dropped", "(lost != 0) & ((total", "(lost > np.inf) & ((total"),
        (
            "sums are of the wider type",
            "data = nearest_bf16(widen_bf16(lower) + widen_bf16(upper))",
            "data = nearest_bf16(widen_bf16(lower)) + 0 * upper",
        ),
        (
            "NaN may become infinite",
            "np.where(np.isnan(values), (bits >> 16) | 0x0040, rounded)",
            "rounded",
        ),
    ),
    *faults_of(
        "simulator/interpreter/addresses.py",
        "test_interpreter_addresses",
        (
            "a lane's own size is forgotten",
            "outside = addresses + size > ends",
            "outside = addresses > ends",
        ),
        ("an element at the end is outside", "addresses + size > ends", "addresses + size >= ends"),
        ("masked lanes are checked", "np.broadcast_to(mask, pointers.data.shape)", "..."),
        ("pointers made of integers are checked", "if self.casts_pointers:", "if False:"),
        ("nothing is checked", "if outside.any():", "if False:"),
        ("one lane that is right is enough", "if outside.any():", "if outside.all():"),
        (
            "only contiguous tensors have an end",
            "1 + sum((size - 1) * stride for",
            "1 + sum(size - 1 for",
        ),
        ("a tensor ends one element late", "elements = 1 + sum(", "elements = 2 + sum("),
        ("bytes are elements", "start + elements * value.element_size()", "start + elements"),
        (
            "tuples are not looked into",
            "isinstance(value, tuple | list)",
            "isinstance(value, list)",
        ),
        ("parts within a part cut it short", "max(merged[-1][1], end)", "end"),
        ("stores are not checked", 'launch.check("writes", pointers, mask.data)', "pass"),
        ("loads are not checked", 'launch.check("reads", pointers, mask.data)', "pass"),
        (
            "atomic additions are not checked",
            'launch.check("updates", pointers, mask.data)',
            "pass",
        ),
        ("swaps are not checked", 'launch.check("updates", pointers, True)', "pass"),
        (
            "an earlier launch's tensors count",
            "launch = _Launch([*zip(",
            "launch = launch if launch.extents else _Launch([*zip(",
        ),
    ),
    *faults_of(
        "simulator/interpreter/launches.py",
        "test_interpreter",
        ("a launch has no room for its frames", "co_stacksize=_ROOM", "co_stacksize=64"),
    ),
    *faults_of(
        "simulator/interpreter/repair.py",
        "test_interpreter",
        (
            "masked-off lanes are 0",
            "np.array(_POISON.get(element.name, _WILD)).astype(dtype)",
            "np.array(0).astype(dtype)",
        ),
        (
            "TF32 keeps all digits",
            "elif a.data.dtype == np.float32 and input_precision == tf32:",
            "elif a.data.dtype == np.float32 and input_precision is None:",
        ),
        (
            "TF32 truncates one operand",
            "a, b = (handle_of(truncate_to_tf32(x.data), tl.float32) for x in (a, b))",
            "a = handle_of(truncate_to_tf32(a.data), tl.float32)",
        ),
        (
            "bf16 dots multiply bits",
            "a, b = (handle_of(widen_bf16(x.data), tl.float32) for x in (a, b))",
            "pass",
        ),
        ("another value of 0 is none", "other_given = other is not None", "other_given = False"),
        (
            "bits are added atomically",
            "if op == add and _is_bf16(val):",
            "if op == add and not _is_bf16(val):",
        ),
        (
            "the index of a maximum is that of bits",
            "if not _is_bf16(input.handle):\n            return original_min_max",
            "if True:\n            return original_min_max",
        ),
        (
            "bf16 constants truncate",
            "nearest_bf16(np.array([value], dtype=np.float64))",
            "(np.array([value], dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)",
        ),
        (
            "toward zero is ignored",
            "        if rounding_mode != toward_zero:\n",
            "        if rounding_mode is not None:\n",
        ),
    ),
)
