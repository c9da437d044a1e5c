"""Faults of what is asked: the problems that are drawn, and their values, one edit each."""

from __future__ import annotations

from fa_verify.diagnosis.mutant import Mutant, faults_of

__all__ = ["PROBLEMS"]

PROBLEMS: tuple[Mutant, ...] = (
    *faults_of(
        "properties/problems/strategies.py",
        "test_strategies",
        ("heads are not in the budget", "if B * Hk * G <= max_pairs", "if B * Hk <= max_pairs"),
        (
            "Dv is drawn where it has to be D",
            "    if not domain.dv_ne_d:\n        return D, D\n",
            "",
        ),
        (
            "q, k, v, dout have one layout",
            "layouts[code // base**place % base]",
            "layouts[code % base]",
        ),
        (
            "one-hot dout is never drawn",
            'dout=_chosen("dout", dout, tuple(DOUT), first=4)',
            'dout=_chosen("dout", dout, tuple(DOUT)[:-1], first=4)',
        ),
        (
            "padding keys are not dirty",
            "padded = any(rows[b] < M or keys[b] < N for b in range(B))",
            "padded = any(rows[b] < M for b in range(B))",
        ),
        ("there are ten seeds", "draw(st.integers(0, 2**31 - 1))", "draw(st.integers(0, 9))"),
        (
            "equal sizes are as frequent as distinct ones",
            "[(B, Hk, G)] * (10 if distinct else 1)",
            "[(B, Hk, G)] * (1 if distinct else 10)",
        ),
        ("no batch is ever empty", "domain.zero_sizes and not domain.forced,\n", "False,\n"),
    ),
    *faults_of(
        "properties/problems/seqlens.py",
        "test_strategies",
        (
            "tile edges are as rare as the rest",
            "edge = length > 1 and (length + 1) % tile <= 2",
            "edge = False",
        ),
        (
            "a tile more than the budget is drawn",
            "return domain.tile * (domain.max_cost // tile_count(domain, other))",
            "return domain.tile * (1 + domain.max_cost // tile_count(domain, other))",
        ),
        (
            "surplus rows are left to chance",
            "        n_high = min(n_high, M - 1)\n",
            "        n_high = min(n_high, M)\n",
        ),
        ("no sequence is empty", "zero = domain.zero_sizes and not domain.forced", "zero = False"),
        (
            "sequences are empty where none may be",
            "zero = domain.zero_sizes and not domain.forced",
            "zero = not domain.forced",
        ),
        ("lengths need not be multiples", "if length % multiple == 0:", "if length >= multiple:"),
        (
            "most problems are one tile",
            "Regime(12, tile + 1, most, tile + 1, most)",
            "Regime(1, tile + 1, most, tile + 1, most)",
        ),
    ),
    *faults_of(
        "properties/problems/drawn_masks.py",
        "test_strategies",
        (
            "forced padding is left to chance",
            "columns = min(columns, N - 1) if domain.padding else columns",
            "columns = min(columns, N)",
        ),
        (
            "no entry is without keys",
            "[min(size, max(0, edges",
            "[min(size, max(1, edges",
        ),
        (
            "no window is causal",
            "positions += [(True, True)] * 3",
            "positions += [(True, False)] * 3",
        ),
        (
            "hidden keys are left to chance",
            "    elif domain.hidden:\n",
            "    elif domain.hidden and columns > 16:\n",
        ),
        ("an empty row is left to chance", "% (rows - columns)", "% (rows - columns + 1)"),
        (
            "lengths of queries are never drawn",
            '("k", "both", "both") if domain.forced else ("k", "both", "both", "q")',
            '("k",)',
        ),
    ),
    *faults_of(
        "properties/subjects/supported.py",
        "test_supported",
        (
            "what is done to scores is drawn of everyone",
            "if forced and word in subject.score_mods else (none,)",
            "if forced else (none,)",
        ),
        (
            "what is done to scores is not forced",
            "() if word in forced else",
            "() if None in forced else",
        ),
        (
            "what is done to scores is forced on what cannot do it",
            "if not {*forced} <= {*subject.score_mods}:",
            "if False:",
        ),
        (
            "the device is not looked at",
            "    if device not in subject.devices:",
            "    if not subject.devices:",
        ),
        (
            "padding is forced on what has none",
            "    if padding and not lengths:",
            "    if padding and not subject.masks:",
        ),
        (
            "the alignments are exchanged",
            'bottom_right = subject.causal_alignment == "bottom-right"',
            'bottom_right = subject.causal_alignment == "top-left"',
        ),
        (
            "an alignment gives empty rows",
            "not subject.zero_sizes and not (positions and bottom_right)",
            "not subject.zero_sizes and not positions",
        ),
        (
            "empty tensors are always drawn",
            '"zero_sizes": subject.zero_sizes,',
            '"zero_sizes": True,',
        ),
        (
            "any dirt is drawn",
            '"dirties": subject.dirty or tuple(PADDING_VALUES),',
            '"dirties": tuple(PADDING_VALUES),',
        ),
        ("the declared length is no limit", "min(most, subject.max_seqlen or most)", "most"),
        ("groups of heads are always drawn", '"gqa": subject.gqa,', '"gqa": True,'),
        (
            "dtypes of a configuration are ignored",
            'if dtype in replaced.get("dtypes", subject.dtypes)',
            "if dtype in subject.dtypes",
        ),
        (
            "what nobody asked for is not drawn",
            "_some(head_dims, dims) or dims",
            "_some(head_dims, dims) or head_dims",
        ),
    ),
    *faults_of(
        "properties/inputs/input_families.py",
        "test_input_families",
        (
            "there may be no outlier",
            "return torch.where(is_there.view(shape), 30.0, values)",
            "return values",
        ),
        ("only q is massive", "k = torch.where(is_channel, k * _MASSIVE, k)", "k = 1 * k"),
        (
            "v is near an eighth of the largest number",
            "torch.finfo(TORCH_DTYPES[problem.dtype]).max / 4",
            "torch.finfo(TORCH_DTYPES[problem.dtype]).max / 8",
        ),
        (
            "near_max is out of range",
            "        limit /= 4 * max(problem.N, problem.Dv, problem.G * problem.M)\n",
            "        limit /= 1\n",
        ),
        ("the mean of v is 5", "_LARGE_MEAN = 50.0", "_LARGE_MEAN = 5.0"),
        (
            "the smallest values are normal",
            "FLOOR[problem.dtype] * 2.0**-4))\n\n\ndef tiny_k",
            "FLOOR[problem.dtype] * 2.0**4))\n\n\ndef tiny_k",
        ),
    ),
    *faults_of(
        "properties/inputs/score_families.py",
        "test_score_families",
        ("the maximum always rises by 1", "_STEPS[seed % len(_STEPS)]", "1.0"),
        (
            "the highest lse is a tenth of what is promised",
            "_shifted(problem, 9.9e4)",
            "_shifted(problem, 9.9e3)",
        ),
        (
            "the hidden needle is visible",
            "(m < rows), target + 1, target)",
            "(m < rows), target, target)",
        ),
        (
            "the last visible key is aligned to the top left",
            "position = m + keys - rows\n",
            "position = m + 0 * keys\n",
        ),
        (
            "the maximum falls",
            "levels = tile * of_entries(problem, steps)",
            "levels = -tile * of_entries(problem, steps)",
        ),
        (
            "the lower level is nearer",
            "low.to(torch.float64) * -8.0",
            "low.to(torch.float64) * -4.0",
        ),
        (
            "no key is doubled in its tile",
            "places(problem, problem.N) // 2 % 7",
            "places(problem, problem.N) % 7",
        ),
        ("P does not underflow", '"fp16": (8.0, 20.0)', '"fp16": (0.0, 5.0)'),
        ("ties are apart by a tenth", "unit * _TIE_SCORE * coarse", "unit * _TIE_SCORE * 0.1"),
    ),
    *faults_of(
        "properties/inputs/dout_families.py",
        "test_input_families",
        ("the 1 may stand in padding", "% rows.clamp(min=1).view(B, 1)", "% M"),
        ("tiny is not", "2.0**-17)", "2.0**-7)"),
    ),
    *faults_of(
        "properties/inputs/families.py",
        "test_families",
        (
            "the families of scores are left out",
            "(*VALUE_FAMILIES, *SCORE_FAMILIES)",
            "VALUE_FAMILIES",
        ),
    ),
    *faults_of(
        "properties/inputs/padding_values.py",
        "test_padding_values",
        (
            "large padding is positive",
            "[:, 1::2] = -value",
            "[:, 1::2] = value",
        ),
        (
            "dirt of one tensor is in all",
            "if tensor == dirtied else 0.0",
            "if dirtied in TENSORS else 0.0",
        ),
        ("clean padding is noise", '"zero": _zero,', '"zero": _noise,'),
        ("infinities are the largest numbers", '"inf": _inf', '"inf": _largest'),
    ),
    *faults_of(
        "properties/inputs/tensors.py",
        "test_padding_values test_families",
        (
            "padding of dlse is clean",
            "        cast = torch.where(padding, stands, cast)\n    wide",
            "    wide",
            "test_lse_gradient",
        ),
        ("values beyond the dtype are infinite", "    values = values.clamp(-limit, limit)\n", ""),
        (
            "the first padding row is valid",
            "torch.arange(size, device=device).view(-1, 1) >= valid",
            "torch.arange(size, device=device).view(-1, 1) > valid",
        ),
        (
            "dout is padded like keys",
            "(rows, keys, keys, rows), strict=True",
            "(rows, keys, keys, keys), strict=True",
        ),
        ("dirt cannot be chosen", "problem.dirty if dirty is None else dirty)", "problem.dirty)"),
        ("what lies around cannot be chosen", "layout, around))", "layout))", "test_families"),
        (
            "padding of one entry alone is none",
            "all(length == size for length in lengths)",
            "any(length == size for length in lengths)",
        ),
    ),
    *faults_of(
        "properties/inputs/layouts.py",
        "test_layouts",
        ("offset is aligned", ' + (layout == "offset")', ""),
        (
            "heads that differ are expanded",
            "        if not bool(same.all()):",
            "        if not bool(same.any()):",
        ),
        ("strided columns are adjacent", "4 * columns, 2)", "4 * columns, 1)"),
        ("zeros lie around", "form.lead + margin,), around)", "form.lead + margin,), 0.0)"),
        (
            "nothing lies after the last element",
            "form.size - form.lead + margin,)",
            "form.size - form.lead,)",
        ),
        (
            "packed is the first of three",
            "heads * columns, _PACKED * elements)",
            "0, _PACKED * elements)",
        ),
    ),
    *faults_of(
        "properties/problems/batched.py",
        "test_batched",
        (
            "a stack costs no more than its first",
            "max_cost // max(1, ",
            "max_cost * 1 // (1 + 0 * ",
        ),
        ("every mask can be stacked", "not first.mask.uniform or ", ""),
        ("empty problems are stacked", " or 0 in (first.B, first.M, first.N):", ":"),
        ("few problems are stacked", "(1, 2, *(most,) * 14)", "(1, 2)"),
        ("all have the seed of the first", "(x & 2**31 - 1 for", "(first.seed + 0 * x for"),
        (
            "keys are as long as queries",
            '"stack/seqlens_k", first.mask.seqlens_k, first.N)',
            '"stack/seqlens_k", first.mask.seqlens_k, min(first.M, first.N))',
        ),
        (
            "all have the lengths of the first",
            "return (*given, *(length for lengths in drawn for length in lengths))",
            "return given * count",
        ),
    ),
    *faults_of(
        "properties/inputs/sampling.py",
        "test_batched",
        (
            "numbers of seeds alternate between the entries",
            "values.repeat_interleave(problem.B // len(values))",
            "values.repeat(problem.B // len(values))",
        ),
        (
            "only the first seed is drawn from",
            "stream.uniform(problem.all_seeds",
            "stream.uniform(problem.all_seeds[0]",
        ),
    ),
    *faults_of(
        "properties/inputs/padding_values.py",
        "test_batched",
        (
            "signs alternate through a stack",
            "values.view(len(problem.all_seeds), -1)[:, 1::2]",
            "values.view(1, -1)[:, 1::2]",
        ),
    ),
)
