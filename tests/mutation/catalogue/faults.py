"""Faults that attention kernels have shipped with, as mutants of the project's kernels.

``origin`` names the project and the issue, pull request or commit, or says "independent".
"""

from __future__ import annotations

from tests.mutation.catalogue.mutant import Edit, Mutant

__all__ = ["FAULTS"]

_FORWARD = "fa_kernels/kernels/portable/forward.py"
_PREPROCESS = "fa_kernels/kernels/portable/bwd_preprocess.py"
_DKDV = "fa_kernels/kernels/portable/dkdv.py"
_DQ = "fa_kernels/kernels/portable/dq.py"
_DQ_POSTPROCESS = "fa_kernels/kernels/portable/dq_postprocess.py"
_ADDRESSING = "fa_kernels/kernels/common/addressing.py"
_MASK = "fa_kernels/kernels/common/mask.py"
_SEQLEN_INFO = "fa_kernels/kernels/common/seqlen_info.py"
_SOFTMAX_END = "fa_kernels/kernels/common/softmax.py"
_COMBINE = "fa_kernels/kernels/portable/combine.py"
_KVCACHE = "fa_kernels/kernels/portable/kvcache.py"
_DECODING = "fa_kernels/decoding.py"
_COMBINE_BWD = "fa_kernels/kernels/portable/combine_bwd.py"
_SCORES = "fa_kernels/kernels/common/score_mod.py"
_DBIAS = "fa_kernels/kernels/portable/dbias.py"
_RANGES = "fa_kernels/kernels/common/tile_ranges.py"
_LAUNCH = "fa_kernels/launch/portable.py"
_NAMED_ARGUMENTS = "fa_kernels/launch/named_arguments.py"
_SIZES = "fa_kernels/launch/sizes.py"
_SINK_ARGS = "fa_kernels/launch/sinks.py"
_ARGUMENTS = "fa_kernels/validation/arguments.py"
_OPERATORS = "fa_kernels/operators.py"
_CALL_CACHE = "fa_kernels/launch/call_cache.py"
_SEEN = "seen = element_mask(offs_m[:, None], offs_n[None, :], mask, CONFIG.PREDICATE)"
_CAPPED = (
    "            scores, _ = apply_score_mods(\n"
    "                scores, offs_m[:, None], offs_n[None, :], mask, mods, CONFIG.SCORE_MODS\n"
    "            )\n"
)
_SEEN_T = "seen = element_mask(offs_m[None, :], offs_n[:, None], mask, PREDICATE)"


def _fault(
    name: str,
    origin: str,
    caught_by: str,
    *edits: tuple[str, str, str],
    hidden: str = "",
    equivalent: str = "",
) -> Mutant:
    """Return a mutant with edits (file, old, new)."""
    made = tuple(Edit(*edit) for edit in edits)
    return Mutant(name, made, origin, tuple(caught_by.split()), hidden, equivalent)


def _top_left(rows: str, keys: str) -> str:
    """Return the element mask without the offset between the ends of queries and keys."""
    return (
        f"seen = (({keys} - {rows} >= -mask.window_left) & ({keys} - {rows} <= mask.window_right)"
        f" & ({rows} < mask.seqlen_q) & ({keys} < mask.seqlen_k))"
    )


_MASKS = (
    _fault(
        "forward: padding keys of the tail tile are visible",
        "flashinfer#5090; fla@d7150bf9; FlagAttention@18a4f44",
        "T3 G1",
        (_FORWARD, _SEEN, f"{_SEEN} | (offs_n[None, :] >= mask.seqlen_k)"),
    ),
    _fault(
        "dq: padding keys of the tail tile are visible",
        "flash-attention@a4f148b6, @c65b5106, #443; pytorch#196678; trl#7181; cudnn-frontend#160",
        "G1 G2",
        (_DQ, _SEEN, f"{_SEEN} | (offs_n[None, :] >= mask.seqlen_k)"),
        hidden="while LSE is moderate: the tail of K is 0, so dS meets only zeros; an LSE "
        "below -88.8 makes P infinite, and inf * 0 NaN (fp16: dS overflows in its cast from "
        "-11.09 + ln|delta| down)",
    ),
    _fault(
        "dkdv: rows past M take part, with an LSE of 0",
        "cudnn-frontend#1072; tokamax#316; tilelang#2461",
        "G4 G7",
        (_PREPROCESS, 'mask=offs_m < end, other=-float("inf"))', "mask=offs_m < end, other=0.0)"),
        (_DKDV, _SEEN_T, f"{_SEEN_T} | (offs_m[None, :] >= mask.seqlen_q)"),
    ),
    _fault(
        "dq: the tail of keys is masked on the diagonal alone",
        "flash-attention@a4f148b6, @c65b5106, #443",
        "",
        (
            _DQ,
            _SEEN,
            f"{_SEEN} | (\n"
            "                (mask.window_right == 0)\n"
            "                & (\n"
            "                    start_n + CONFIG.BLOCK_N - 1\n"
            "                    <= (offs_m + mask.seqlen_k - mask.seqlen_q)[:, None]\n"
            "                )\n"
            "                & (offs_n >= mask.seqlen_k)[None, :]\n"
            "            )",
        ),
        equivalent="always, with bottom-right alignment: a valid row stands before seqlen_k, so no "
        "tile that ends before it holds the tail; and a padding row's P and delta are 0",
    ),
    _fault(
        "forward: the load of v has no mask",
        "vllm#936; flash-attention#1745, #1395; vllm#30887",
        "G4 G7",
        (
            _FORWARD,
            "offs_dv[None, :], valid[:, None],\n                CONFIG.ALIGNED, True,\n",
            "offs_dv[None, :], valid[:, None],\n                CONFIG.ALIGNED, False,\n",
        ),
    ),
    _fault(
        "forward: the mask is added, and the load of k has none",
        "flash-attention#1745, #1395; SageAttention#377",
        "G4 G7",
        (
            _FORWARD,
            'scores = tl.where(seen, scores, -float("inf"))',
            'scores = scores + tl.where(seen, 0.0, -float("inf"))',
        ),
        (
            _FORWARD,
            "offs_d[:, None], valid[None, :], CONFIG.ALIGNED,\n            True,\n",
            "offs_d[:, None], valid[None, :], CONFIG.ALIGNED,\n            False,\n",
        ),
    ),
    _fault(
        "forward: the mask's value is -1e4",
        "lattice#361, #373; TransformerLens#366",
        "T3 G1 G3 G5",
        (_FORWARD, 'tl.where(seen, scores, -float("inf"))', "tl.where(seen, scores, -1e4)"),
    ),
    *(
        _fault(
            f"{kernel}: positions are aligned to the top left",
            "flash-attention#282, #402, @9e5e8bc9; ffpa-attn#300",
            "T3 G1",
            (file, seen, _top_left(rows, keys)),
        )
        for kernel, file, seen, rows, keys in (
            ("forward", _FORWARD, _SEEN, "offs_m[:, None]", "offs_n[None, :]"),
            ("dq", _DQ, _SEEN, "offs_m[:, None]", "offs_n[None, :]"),
            ("dkdv", _DKDV, _SEEN_T, "offs_m[None, :]", "offs_n[:, None]"),
        )
    ),
    _fault(
        "forward: the diagonal stage ends where the query tile does",
        "triton#8853",
        "T3 G1",
        (
            _FORWARD,
            "    state = attend(",
            "    if PREDICATE is None:\n"
            "        last = tiles.hi\n"
            "        if window_right == 0:\n"
            "            aligned = block.start + mask.seqlen_k - mask.seqlen_q + BLOCK_M\n"
            "            last = tl.maximum(tl.minimum(last, aligned // BLOCK_N), tiles.full_hi)\n"
            "        tiles = TileRange(tiles.lo, tiles.full_lo, tiles.full_hi, last)\n"
            "    state = attend(",
        ),
        (_FORWARD, "import is_edge, split_range", "import TileRange, is_edge, split_range"),
        hidden="where block_n divides block_m and the lengths are whole tiles",
    ),
    *(
        _fault(
            f"{kernel}: always causal",
            "triton#4541, #5660, #4174, #7216",
            "T3 G1",
            (
                file,
                "seqlen.seqlen_q, seqlen.seqlen_k, window_left, window_right, b",
                "seqlen.seqlen_q, seqlen.seqlen_k, window_left, window_right * 0, b",
            ),
        )
        for kernel, file in (("dq", _DQ), ("dkdv", _DKDV))
    ),
    _fault(
        "mask: the diagonal is not visible",
        "transformers#39408, #29623; vllm#3385",
        "T3 G1 G3",
        (_MASK, "(distance <= mask.window_right)", "(distance < mask.window_right)"),
    ),
    _fault(
        "mask: the far edge of the window is not visible",
        "transformers#39408, #29623; vllm#3385",
        "T3 G1",
        (_MASK, "(distance >= -mask.window_left)", "(distance > -mask.window_left)"),
    ),
)  # fmt: skip

_SOFTMAX = (
    *(
        _fault(
            f"forward: the running maximum starts at {start}",
            "flashinfer#4267, #4401",
            "G1 G2",
            (
                _FORWARD,
                'm_i = tl.full([BLOCK_M], -float("inf"), ACC)',
                f"m_i = tl.full([BLOCK_M], {start}, ACC)",
            ),
            hidden="while a score lies above it",
        )
        for start in ("-1e4", "-5e4")
    ),
    _fault(
        "forward: a row that has seen nothing subtracts -inf from -inf",
        "xformers@63d7f30b, #722; pytorch#130014, #109517, #110213",
        "G2 G3",
        (_FORWARD, 'tl.where(m_new == -float("inf"), 0.0, m_new)', "m_new"),
    ),
    *(
        _fault(
            f"forward: the lse of an empty row is {value}",
            "flash-attention@26d7d92f, #978, #1936; pytorch#134650, #131867",
            "T3 G1 G3",
            (
                _SOFTMAX_END,
                'tl.log(l_safe)), -float("inf"))',
                f"tl.log(l_safe)), {value})",
            ),
        )
        for value in ("0.0", 'float("inf")')
    ),
    _fault(
        "forward: the output of an empty row is multiplied by 0",
        "lattice#789",
        "",
        (
            _SOFTMAX_END,
            "tl.where(live[:, None], acc / l_safe[:, None], 0.0)",
            "acc / l_safe[:, None] * live[:, None].to(acc.dtype)",
        ),
        equivalent="while padding of v is not loaded: acc of a row that sees nothing is a sum of "
        "P = 0 times finite values, so it is 0 and l_safe is 1",
    ),
    _fault(
        "forward: the output of an empty row is multiplied by 0, and v is loaded without a mask",
        "lattice#789; vllm#936",
        "G3 G4",
        (
            _SOFTMAX_END,
            "tl.where(live[:, None], acc / l_safe[:, None], 0.0)",
            "acc / l_safe[:, None] * live[:, None].to(acc.dtype)",
        ),
        (
            _FORWARD,
            "offs_dv[None, :], valid[:, None],\n                CONFIG.ALIGNED, True,\n",
            "offs_dv[None, :], valid[:, None],\n                CONFIG.ALIGNED, False,\n",
        ),
    ),
    _fault(
        "forward: acc is not rescaled",
        "MSLK#242",
        "T3 G1",
        (_FORWARD, "acc = acc * alpha[:, None]\n", "acc = acc\n"),
    ),
    _fault(
        "forward: l is not rescaled",
        "MSLK#242",
        "T3 G1",
        (_FORWARD, "l_i = l_i * alpha + tl.sum(p, 1)", "l_i = l_i + tl.sum(p, 1)"),
    ),
    _fault(
        "forward: lse is a logarithm to base 2",
        "pytorch#181645, #156012; aotriton#108; tokenspeed#571; flashinfer#2113, #2114, #4485",
        "T3 G1",
        (_SOFTMAX_END, "tl.fma(m_i, ln2, tl.log(l_safe))", "m_i + tl.log2(l_safe)"),
    ),
    _fault(
        "delta: lse is handed on as if it were to base 2",
        "pytorch#181645, #156012; attention-gym#200",
        "T3 G1",
        (_PREPROCESS, "lse * LOG2E", "lse"),
    ),
)  # fmt: skip

_GRADIENTS = (
    _fault(
        "dkdv: k is scaled in the input dtype before its dot",
        "FastVideo#1730",
        "G1 rms",
        (_DKDV, "exp2(scores * mods.qk_scale - lse2[None, :])", "exp2(scores - lse2[None, :])"),
        (
            _DKDV,
            "k, v, offs_n = keys.k, keys.v, keys.offs_n\n",
            "k = (keys.k * mods.qk_scale).to(keys.k.dtype)\n"
            "    v, offs_n = keys.v, keys.offs_n\n",
        ),
    ),
    _fault(
        "dq: q is scaled in the input dtype before its dot",
        "FastVideo#1730",
        "G1 rms",
        (
            _DQ,
            "exp2(scores * mods.qk_scale - rows.lse2[:, None])",
            "exp2(scores - rows.lse2[:, None])",
        ),
        (
            _DQ,
            "rows = _QueryTile(q, dout,",
            "rows = _QueryTile((q * qk_scale).to(q.dtype), dout,",
        ),
    ),
    *(
        _fault(
            f"{kernel}: the scale is {how}",
            "flashinfer#787; vllm#32149; fla#47; tilelang-ascend#1670",
            "T3 G1",
            (file, f"{gradient} * sm_scale.to(ACC)", gradient + scale),
        )
        for kernel, file, gradient in (("dq", _DQ, "dq"), ("dkdv", _DKDV, "dk"))
        for how, scale in (("omitted", ""), ("applied twice", " * (sm_scale * sm_scale).to(ACC)"))
    ),
    _fault(
        "arguments: the default scale is that of the padded head_dim",
        "flashinfer#787; vllm#32149; fla#47; tilelang-ascend#1670",
        "attention",
        (
            "fa_kernels/validation/arguments.py",
            "float(q.shape[3]) ** -0.5",
            "float(1 << (q.shape[3] - 1).bit_length()) ** -0.5",
        ),
    ),
    *(
        _fault(
            f"{kernel}: the dot of {dot} is in TF32",
            "triton#1671, #1821; triton_docs_tutorials#6",
            "G1",
            (file, old, old.replace("CONFIG.DOTS", '"tf32"')),
        )
        for kernel, file, dot, old in (
            ("forward", _FORWARD, "scores", "tl.dot(q, k_t, input_precision=CONFIG.DOTS"),
            ("forward", _FORWARD, "acc", "p.to(v.dtype), v, acc, input_precision=CONFIG.DOTS"),
            ("dq", _DQ, "scores", "tl.dot(rows.q, k_t, input_precision=CONFIG.DOTS"),
            ("dq", _DQ, "dp", "tl.dot(rows.dout, v_t, input_precision=CONFIG.DOTS"),
            ("dq", _DQ, "dq", "tl.trans(k_t), dq, input_precision=CONFIG.DOTS"),
            ("dkdv", _DKDV, "scores", "tl.dot(k, q_t, input_precision=CONFIG.DOTS"),
            ("dkdv", _DKDV, "dp", "tl.dot(v, tl.trans(dout), input_precision=CONFIG.DOTS"),
            ("dkdv", _DKDV, "dv", "p.to(dout.dtype), dout, dv, input_precision=CONFIG.DOTS"),
            ("dkdv", _DKDV, "dk", "tl.trans(q_t), dk, input_precision=CONFIG.DOTS"),
        )
    ),
    _fault(
        "dq: delta is the row sum of one tile",
        "published pseudocode",
        "T3 G1",
        (
            _DQ,
            "ds = p * (dp - rows.delta[:, None])",
            "ds = p * (dp - tl.sum(p * dp, 1)[:, None])",
        ),
        hidden="while a row spans one tile of visible keys",
    ),
    _fault(
        "dkdv: the heads of a group overwrite each other",
        "levanter#449; fla#889",
        "T3 G1",
        (_DKDV, "for g in range(0, G):", "for g in range(G - 1, G):"),
        hidden="without groups",
    ),
)  # fmt: skip

_ONE_PASS = (
    _fault(
        "delta: the sums of dq do not start at 0",
        "flash_attn_triton.py, which guards against it",
        "T3 G1 G2 G6 G13",
        (_PREPROCESS, "range(0, columns // 16):", "range(0, 0):"),
    ),
    _fault(
        "dkdv: in one pass padding keys of the tail tile reach dq",
        "flash-attention@a4f148b6, @c65b5106, #443; pytorch#196678; trl#7181; cudnn-frontend#160",
        "G1 G2",
        (_DKDV, "            ds = tl.where(offs_n[:, None] < mask.seqlen_k, ds, 0.0)\n", ""),
        hidden="while LSE is moderate: k of a padding key is 0, and only inf * 0 is NaN",
    ),
    _fault(
        "dq_of_sums: dq is not scaled",
        "independent: assumes the sums are scaled in registers, as without atomics",
        "T3 G1",
        (_DQ_POSTPROCESS, "dq = sums * scale_from_bits(sm_scale_bits).to(ACC)", "dq = sums"),
        hidden="where sm_scale is 1",
    ),
    _fault(
        "dkdv: in one pass the last key tile overwrites dq",
        "levanter#449; fla#889",
        "T3 G1",
        (_DKDV, 'tl.atomic_add(places, dq, sem="relaxed")', "tl.store(places, dq)"),
        hidden="while a row sees keys of one tile",
    ),
)  # fmt: skip

_MEMORY = (
    _fault(
        "launch: no forward where there are no keys",
        "flashinfer#4452, #4451, #353, #363, #440; flash-attention@a3a257c7, #2562, #2421; "
        "aiter#1442",
        "T3 G1 G2 G3",
        (
            _LAUNCH,
            "    if tiles.number:\n        with on_device(q):",
            "    if tiles.number and sizes.N:\n        with on_device(q):",
        ),
    ),
    _fault(
        "launch: no dk and dv where there are no rows",
        "flashinfer#4452, #4451, #353, #363, #440; flash-attention#2568, @db2f8069",
        "T3 G1 G2 G3",
        (
            _LAUNCH,
            'if tiles.number and "dkdv" in kernels:',
            'if tiles.number and "dkdv" in kernels and sizes.M:',
        ),
    ),
    _fault(
        "launch: the grid of delta is that of the forward",
        "triton#2020",
        "G1 G2 G6",
        (
            _LAUNCH,
            "bwd_preprocess_kernel, (tiles.number * (ROW_PADDING // PREPROCESS_ROWS),),",
            "bwd_preprocess_kernel, "
            "(cdiv(sizes.M, arguments.config.forward.block_m) * sizes.B * sizes.H,),",
        ),
    ),
    _fault(
        "tiles: the offset of a row is 32-bit",
        "flash-attention#1500, @b62d93f3, #2611, #2214, #1311; fla#1080, #965; vllm#50427",
        "G12",
        (
            _ADDRESSING,
            "(start + rows).to(tl.int64) * matrix.stride_row",
            "(start + rows) * matrix.stride_row.to(tl.int32)",
        ),
    ),
    _fault(
        "tiles: the offset of a wide-loaded tile is 32-bit",
        "flash-attention#1500, @b62d93f3, #2611, #2214, #1311; fla#1080, #965; vllm#50427",
        "G12 long",
        (_ADDRESSING, "tl.cast(start, tl.int64) * stride_row", "start * stride_row"),
    ),
    _fault(
        "tiles: the offset of a head is 32-bit",
        "pytorch#190857; xformers@89d3014f, #719",
        "G12",
        (
            _ADDRESSING,
            "h.to(tl.int64) * tensor.stride_head\n",
            "h * tensor.stride_head.to(tl.int32)\n",
        ),
    ),
    _fault(
        "tiles: the offset of a column is 32-bit",
        "pytorch#190857; xformers@89d3014f, #719",
        "G12",
        (
            _ADDRESSING,
            "(row_offsets + columns.to(tl.int64) * matrix.stride_column)",
            "(row_offsets + columns * tl.cast(matrix.stride_column, tl.int32))",
        ),
    ),
    _fault(
        "launch: batch entries and heads lie on axis 1 of the grid",
        "pytorch#142228; MagiAttention#40; flashinfer#3125; fla#172; xformers@503a5d77",
        "G12 launch",
        (
            _LAUNCH,
            "forward_kernel, (tiles.number * (num_splits or 1),),",
            "forward_kernel, (cdiv(sizes.M, tile.block_m), sizes.B * sizes.H),",
        ),
        (
            _FORWARD,
            "query_block(program, grid,",
            "query_block(program + tl.program_id(1) * tiles_of_head, grid,",
        ),
        hidden="up to 65,535 of them, and in the interpreter, which does not limit grids",
    ),
    _fault(
        "tiles: rows past the end are stored",
        "FlagGems#898; flash-attention@d11341fd, @b910bf14",
        "G6 T3",
        (
            _ADDRESSING,
            "inside = (rows[:, None] < end) & (columns[None, :] < D)\n        tl.store(ptr",
            "inside = columns[None, :] < D\n        tl.store(ptr",
        ),
    ),
    _fault(
        "tiles: rows past the end are stored, 16 bytes at a time",
        "FlagGems#898; flash-attention@d11341fd, @b910bf14",
        "G6 T3",
        (
            _ADDRESSING,
            "inside = (rows[:, None] < end) & (columns[None, :] < D)\n        tl.store(whole",
            "inside = columns[None, :] < D\n        tl.store(whole",
        ),
    ),
    _fault(
        "tiles: columns past the last are stored, 16 bytes at a time",
        "FlagGems#898; flash-attention@d11341fd, @b910bf14",
        "G6 G1",
        (
            _ADDRESSING,
            "inside = (rows[:, None] < end) & (columns[None, :] < D)\n        tl.store(whole",
            "inside = rows[:, None] < end\n        tl.store(whole",
        ),
    ),
)  # fmt: skip

_SPLITS = (
    _fault(
        "forward: a part without tiles writes nothing",
        "vllm#47188; sglang#2465",
        "T3 G1 G2",
        (
            _FORWARD,
            "        tl.store(l_ptr +",
            "        if tiles.lo < tiles.hi:\n            tl.store(l_ptr +",
        ),
        hidden="while there are as many tiles as parts",
    ),
    _fault(
        "forward: parts lie where the merge does not look for them",
        "flash-attention#2388",
        "T3 G1",
        (
            _FORWARD,
            "first += split.to(tl.int64) * rows",
            "first += ((b * H + h).to(tl.int64) * (num_splits - 1) + split) * M",
        ),
        hidden="where there is one part, or one head",
    ),
    _fault(
        "ranges: tiles that do not divide evenly among the parts are nobody's",
        "rocMLIR#2371",
        "T3 G1",
        (_RANGES, "more = (tiles.hi - tiles.lo) % num_splits", "more = 0"),
        hidden="while they divide evenly",
    ),
    _fault(
        "merge: a row that no part sees is -inf - -inf, NaN",
        "flashinfer#4051; vllm#39148; rocMLIR#2371; xformers@63d7f30b",
        "T3 G1 G2 G3",
        (_COMBINE, "normalised(acc, l_i, m_i, l_i > 0)", "normalised(acc, l_i, m_i, valid)"),
    ),
    _fault(
        "merge: maxima to base 2 are weighted in base e",
        "vllm#47079; sglang#35045, #40903; flashinfer#4547",
        "T3 G1",
        (_COMBINE, "tl.exp2(m_split - m_i)", "tl.exp(m_split - m_i)"),
    ),
    _fault(
        "merge: the weights are not relative to the largest maximum",
        "NATTEN#202",
        "G1 G2",
        (_COMBINE, "tl.exp2(m_split - m_i)", "tl.exp2(m_split)"),
        (_COMBINE, "normalised(acc, l_i, m_i, l_i > 0)", "normalised(acc, l_i, 0 * l_i, l_i > 0)"),
        hidden="while no score overflows, or vanishes, as an exponent",
    ),
    _fault(
        "merge: lse is that of one part",
        "flashinfer#58",
        "T3 G1",
        (
            _COMBINE,
            "    tl.store(lse_ptr + offs_r, lse, mask=valid)\n",
            "    of_part = tl.load(m_ptr + offs_r, mask=valid) * 0.6931471805599453\n"
            "    of_part += tl.log(tl.load(l_ptr + offs_r, mask=valid))\n"
            "    tl.store(lse_ptr + offs_r, of_part, mask=valid)\n",
        ),
        hidden="while a row sees the keys of the first part alone",
    ),
)  # fmt: skip

_STATES = (
    _fault(
        "states: a row that no part saw is -inf - -inf, NaN",
        "vllm#28181, #39148; flashinfer#4051",
        "S1",
        (
            _COMBINE,
            'tl.where(lse_part == -float("inf"), 0.0, tl.exp2((lse_part - largest) * LOG2E))',
            "tl.exp2((lse_part - largest) * LOG2E)",
        ),
    ),
    _fault(
        "states: natural lses are weighted in base 2",
        "sglang#35045, #40903; flashinfer#4547",
        "S1",
        (_COMBINE, "tl.exp2((lse_part - largest) * LOG2E)", "tl.exp2(lse_part - largest)"),
    ),
    _fault(
        "states: the weights are not relative to the largest lse",
        "NATTEN#202",
        "S1",
        (_COMBINE, "tl.exp2((lse_part - largest) * LOG2E)", "tl.exp2(lse_part * LOG2E)"),
        (_COMBINE, "lse = m_i + log_l", "lse = log_l"),
    ),
    _fault(
        "states: out of a part that saw nothing is multiplied by 0",
        "vllm#47188; sglang#2465",
        "S1",
        (_COMBINE, 'seen = inside & (m_split != -float("inf"))[:, None]', "seen = inside"),
        hidden="while that out is finite",
    ),
    _fault(
        "states: lse is the largest of the parts",
        "flashinfer#58",
        "S1",
        (_COMBINE, "lse = m_i + log_l", "lse = m_i"),
    ),
    _fault(
        "states: the search for the largest lse starts at -50,000",
        "flashinfer#4267, #4401, #5262",
        "S1",
        (
            _COMBINE,
            'm_i = tl.full([BLOCK_R], -float("inf"), ACC)',
            "m_i = tl.full([BLOCK_R], -50000.0, ACC)",
        ),
        hidden="while lses lie above it",
    ),
    _fault(
        "states: lses are read as if they were contiguous",
        "vllm#21996, #22003",
        "S1",
        (
            _COMBINE,
            "m_ptr + row_offsets(offs_r, H, M, stride_mb, stride_mh, stride_mm)",
            "m_ptr + offs_r",
        ),
    ),
    _fault(
        "states: the offset of a part wraps at 2**31",
        "sglang#29597, #29720",
        "S1",
        (_COMBINE, "split * stride_as)[:, None]", "(split * stride_as).to(tl.int32))[:, None]"),
        hidden="while the parts together have fewer elements",
    ),
    _fault(
        "states: the last part has the weight of the largest",
        "independent: a peeled last turn of the loop without its rescale",
        "S1",
        (
            _COMBINE,
            "weight = state_weight(m_split, m_i)",
            "weight = state_weight(tl.where(split == num_splits - 1, m_i, m_split), m_i)",
        ),
    ),
    _fault(
        "states: a NaN of an lse counts as an empty row",
        "independent: the test that sums of splits need",
        "S1",
        (_COMBINE, "tl.zeros([BLOCK_R], ACC), l_i != 0)", "tl.zeros([BLOCK_R], ACC), l_i > 0)"),
        hidden="while every lse is finite",
    ),
    _fault(
        "states: the gradient of lse is dropped",
        "independent: a ring whose loss depends on out alone",
        "S1",
        (_COMBINE_BWD, "tl.sum(out * dout, 1) - delta + dlse", "tl.sum(out * dout, 1) - delta"),
    ),
    _fault(
        "states: the gradient of an lse lacks the mean over the parts",
        "independent: out_p in place of out_p - out",
        "S1",
        (_COMBINE_BWD, "tl.sum(out * dout, 1) - delta + dlse", "tl.sum(out * dout, 1) + dlse"),
    ),
)  # fmt: skip

_CACHES = (
    _fault(
        "cache: free rows of the last page are read, and multiplied by 0",
        "flashinfer#941; flash-attention#1745",
        "C2",
        (
            _FORWARD,
            "        valid = offs_n < mask.seqlen_k\n",
            "        valid = offs_n < mask.seqlen_k\n"
            "        if CONFIG.ALIGNED >= 3:\n"
            "            used = (mask.seqlen_k + keys.page_size - 1) // keys.page_size\n"
            "            valid = offs_n < used * keys.page_size\n",
        ),
        hidden="while the keys end with a page",
    ),
    _fault(
        "cache: rows past the keys count, up to the end of a tile",
        "flashinfer#3716",
        "G1 C2",
        (
            _KVCACHE,
            "_, seqlen_k = sequence(seqlens_k_ptr, b, N, N, False)",
            "_, seqlen_k = sequence(seqlens_k_ptr, b, N, N, False)\n"
            "    seqlen_k = tl.minimum((seqlen_k + 15) // 16 * 16, N)",
        ),
        hidden="while the keys end with a tile",
    ),
    _fault(
        "cache: the stride of a page is that of its rows times their number",
        "aiter#3498",
        "C1",
        (
            _KVCACHE,
            "v_ptr + h_64 * stride_vh, stride_vb, stride_vn",
            "v_ptr + h_64 * stride_vh, stride_vn * page_size, stride_vn",
        ),
        hidden="while pages are contiguous",
    ),
    _fault(
        "cache: the offset of a page is 32-bit",
        "flashinfer#3136; vllm-xpu-kernels#445; vllm#50427",
        "C4",
        (
            _ADDRESSING,
            "page * pages.stride_page",
            "page.to(tl.int32) * tl.cast(pages.stride_page, tl.int32)",
        ),
        hidden="while the cache has fewer than 2**31 elements",
    ),
    _fault(
        "cache: the new keys are not counted",
        "sgl-kernel-xpu#191",
        "G1",
        (
            _DECODING,
            "seqlens = seqlens.clamp(0, cache.capacity) + L",
            "seqlens = seqlens.clamp(0, cache.capacity)",
        ),
    ),
    _fault(
        "cache: the place in the batch stands for the entry of the cache",
        "attention-gym#189",
        "C1",
        (
            _DECODING,
            "table = cache_batch_idx[:, None]",
            "table = lengths_on_device(tuple(range(B)), q.device)[:, None]",
        ),
    ),
    _fault(
        "cache: an append writes the padding of its tile over other rows",
        "tt-metal#52671",
        "C3",
        (_KVCACHE, "kept = (rows < L) & (first + rows < N)", "kept = first + rows < N"),
    ),
    _fault(
        "cache: places of the table past the keys are read",
        "vllm#56862; vllm-project/flash-attention#42",
        "C2",
        (
            _ADDRESSING,
            "place.to(tl.int64) * pages.stride_table, mask=inside, other=0)",
            "place.to(tl.int64) * pages.stride_table)",
        ),
        hidden="while the table is wider than its entries need",
    ),
    _fault(
        "cache: a page too many counts where the keys end with one",
        "pegainfer#291",
        "G1 C2",
        (
            _KVCACHE,
            "_, seqlen_k = sequence(seqlens_k_ptr, b, N, N, False)",
            "_, seqlen_k = sequence(seqlens_k_ptr, b, N, N, False)\n"
            "    more = tl.where(seqlen_k % page_size == 0, page_size, 0)\n"
            "    seqlen_k = tl.minimum(seqlen_k + more, N)",
        ),
        hidden="while no entry fills its pages",
    ),
    _fault(
        "cache: rows whose first tile is hidden start from a maximum of 0",
        "vllm 0.30.0; TensorRT-LLM#19220",
        "G1",
        (
            _FORWARD,
            "        m_i = m_new\n    return SoftmaxState(acc, l_i, m_i)",
            "        m_i = m_pivot\n    return SoftmaxState(acc, l_i, m_i)",
        ),
        hidden="while scores are not low",
    ),
    _fault(
        "cache: lse of splits lies in the order of packed rows",
        "vllm-project/flash-attention#87",
        "G1",
        (
            _KVCACHE,
            "    tl.store(lse_ptr + offs_r, lse, mask=valid)",
            "    packed = offs_r // M // H * H * M + offs_r % M * H + heads\n"
            "    tl.store(lse_ptr + packed, lse, mask=valid)",
        ),
        hidden="with one query, or one head",
    ),
    _fault(
        "cache: the last split is dropped unless its keys fill it",
        "independent: a number of splits that is rounded down",
        "G1",
        (_KVCACHE, "(end - 1) // split_keys + 1, 0)", "end // split_keys, 0)"),
        hidden="while one program computes all splits",
    ),
    _fault(
        "cache: a split that is apart ends a tile late",
        "independent: a border that is inclusive on one of two paths",
        "G1 I1",
        (_KVCACHE, "(here + 1) * split_tiles)", "(here + 1) * split_tiles + apart)"),
        hidden="while one program computes all splits",
    ),
    _fault(
        "cache: the length of splits depends on the number of entries",
        "independent: a heuristic that keeps all processors busy",
        "I1",
        (
            _LAUNCH,
            "    split_keys = arguments.config.split_keys\n",
            "    split_keys = arguments.config.split_keys * (1 + (B > 2))\n",
        ),
        hidden="while batches are small",
    ),
    _fault(
        "cache: the rows of a group take the queries of the next head",
        "independent: an index into packed heads that is off by one",
        "G1",
        (
            _KVCACHE,
            "heads.to(tl.int64) * stride_qh",
            "(h_k * G + (heads + 1) % G).to(tl.int64) * stride_qh",
        ),
        hidden="where a group is one head",
    ),
    _fault(
        "cache: rows take the sink of their group",
        "independent: an index of heads that is right before heads were packed",
        "G1",
        (
            _KVCACHE,
            "sink = _sinks(sinks_ptr, stride_sink, sink_heads, heads, ACC)",
            "sink = _sinks(sinks_ptr, stride_sink, sink_heads, h_k + 0 * heads, ACC)",
        ),
        hidden="where a group is one head",
    ),
    _fault(
        "cache: splits that are apart are joined without the sink",
        "independent: a feature on one of two paths",
        "G1 I1",
        (
            _KVCACHE,
            "    state = with_sink(state, _sinks(sinks_ptr, stride_sink, sink_heads, heads, ACC))\n"
            "    out, lse",
            "    out, lse",
        ),
        hidden="while one program computes all splits",
    ),
    _fault(
        "cache: a mask is that of the head of the cache",
        "independent: an index of heads that is right without groups",
        "G1",
        (
            _KVCACHE,
            "window_right, b, h_k, mask_args)",
            "window_right, b, h_k // groups, mask_args)",
        ),
        hidden="where a group is one head, and under masks that are the same for all heads",
    ),
    _fault(
        "cache: the rows of a group share a mask",
        "independent: a tile of several heads, and a mask that takes one",
        "G1",
        (
            _LAUNCH,
            "Hk = cache.v.shape[2] if predicate is None else H",
            "Hk = cache.v.shape[2]",
        ),
        hidden="where a group is one head, and under masks that are the same for all heads",
    ),
)

_PACKED = (
    _fault(
        "forward: the keys of a sequence begin where its queries do",
        "independent: one cu_seqlens for both, which self-attention hides",
        "T3 G1",
        (_SEQLEN_INFO, "batch.seqlens_k_ptr, b,", "batch.seqlens_q_ptr, b,"),
        hidden="where queries and keys have the same lengths",
    ),
    _fault(
        "tiles: rows past the end of a sequence are stored over the next",
        "FlagGems#898; flash-attention@d11341fd, @b910bf14",
        "T3 G1",
        (
            _ADDRESSING,
            "h.to(tl.int64) * total + offset, seqlen",
            "h.to(tl.int64) * total + offset, length",
        ),
        hidden="while programs run in the order of sequences",
    ),
    _fault(
        "tiles: the scratch of a sequence begins in that of the one before",
        "flash-attention, cu_seqlens_q[b] + 128 b rounded down: rounded without the 128 b",
        "T3 G1 G2",
        (_ADDRESSING, "(offset + b * BLOCK) // BLOCK * BLOCK", "offset // BLOCK * BLOCK"),
        hidden="where there is one sequence",
    ),
    _fault(
        "tiles: a sequence's first tile is found in the sequence before",
        "independent: a binary search off by one",
        "T3 G1",
        (_SEQLEN_INFO, "// BLOCK + middle <= place:", "// BLOCK + middle < place:"),
        hidden="where all sequences have as many tiles",
    ),
    _fault(
        "sizes: tiles in a row are counted as of one sequence",
        "independent: the rows divided by the block size, rounded up, suffice for one sequence",
        "T3 G1",
        (_SIZES, "self.ends[side] // block + self.B", "cdiv(self.ends[side], block)"),
        hidden="where all sequences have as many tiles",
    ),
    _fault(
        "launch: rows of no sequence are not written",
        "flashinfer#4452, #4451; aiter#1442",
        "G3 G6",
        (_NAMED_ARGUMENTS, "x.fill_(-math.inf", "x.new_empty(x.shape).fill_(-math.inf"),
        hidden="where the last offset is the number of rows",
    ),
    _fault(
        "dq_of_sums: the last tile reaches the next sequence",
        "independent: assumes that whole tiles need no mask, as for padded sequences",
        "T3 G1",
        (_DQ_POSTPROCESS, "(dq_ptr, first, end,", "(dq_ptr, first, end + BLOCK_M,"),
        hidden="where the last offset is the number of rows, or rows are whole tiles",
    ),
    _fault(
        "dkdv: sums of dq lie where the rows of q do",
        "independent: the place of the sums for padded sequences",
        "T3 G1",
        (
            _DKDV,
            "dq_ptr + row * BLOCK_D",
            "dq_ptr + BLOCK_D * stored_rows(\n"
            "                    b, h, H, seqlen.offset_q, M, seqlen.seqlen_q, total_q, VARLEN\n"
            "                )[0]",
        ),
        hidden="where the rows of each sequence are a multiple of the padding",
    ),
)  # fmt: skip

_SCORE_MODS = (
    _fault(
        "forward: what is hidden is capped too, and then visible",
        "flashinfer#350; onnx#7865; flash-attention#1025",
        "T3 G1 G2",
        (_FORWARD, f"        if CONFIG.SCORE_MODS:\n{_CAPPED}", ""),
        (
            _FORWARD,
            "            scores = tl.where(seen, scores, -float(\"inf\"))\n",
            "            scores = tl.where(seen, scores, -float(\"inf\"))\n"
            f"        if CONFIG.SCORE_MODS:\n{_CAPPED}",
        ),
    ),
    *(
        _fault(
            f"{kernel}: the gradient of a capped score is that of a plain one",
            "flash-attention#1033; tokamax#1121",
            "T3 G1",
            (file, "            ds = ds * dtanh\n", "            ds = ds * 1.0\n"),
            hidden="while no score comes near the cap",
        )
        for kernel, file in (("dq", _DQ), ("dkdv", _DKDV))
    ),
    _fault(
        "dkdv: ALiBi has the other sign",
        "fla@7362d874",
        "T3 G1",
        (_DKDV, "    ScoreModArgs,\n", "    ScoreModArgs,\n    ScoreMods,\n"),
        (
            _DKDV,
            "                mask = AttentionMask(\n",
            "                mods = ScoreMods(\n"
            "                    mods.qk_scale, mods.factor, mods.softcap, -mods.slope,\n"
            "                    mods.bias, mods.bias_stride_row, mods.bias_stride_column,\n"
            "                )\n"
            "                mask = AttentionMask(\n",
        ),
    ),
    _fault(
        "scores: ALiBi's distance is taken from the row's own index",
        "flash-attention#907",
        "T3 G1",
        (_SCORES, "offs_m + (mask.seqlen_k - mask.seqlen_q)", "offs_m"),
        hidden="while queries and keys are as long",
    ),
    _fault(
        "scores: ALiBi's distance is one too large",
        "vllm#945",
        "T3 G1",
        (_SCORES, "mods.slope * distance.to", "mods.slope * (distance + (distance > 0)).to"),
    ),
    _fault(
        "scores: the bias is in base 2 already",
        "segment-anything-fast#71",
        "T3 G1",
        (
            _SCORES,
            "scores += tl.load(mods.bias + places, mask=inside, other=0.0)",
            "scores += 0.6931471805599453 * tl.load(mods.bias + places, mask=inside, other=0.0)",
        ),
    ),
    _fault(
        "scores: the bias is read in padding",
        "vllm#936; flash-attention#1745",
        "addresses",
        (
            _SCORES,
            "inside = (offs_m < mask.seqlen_q) & (offs_n < mask.seqlen_k)",
            "inside = (offs_m >= 0) & (offs_n >= 0)",
        ),
    ),
    _fault(
        "dbias: entries that share a bias are not added up",
        "jax#24102; attention-gym#20",
        "dbias",
        (_DBIAS, "b_first, b_last = 0, B", "b_first, b_last = 0, tl.minimum(B, 1)"),
        hidden="while there is one entry, or each has a bias of its own",
    ),
    _fault(
        "dbias: the gradient is by the score before its softcap",
        "tokamax#1121",
        "dbias",
        (_DBIAS, "scores, _ = apply_score_mods(", "scores, dtanh = apply_score_mods("),
        (
            _DBIAS,
            "ds = p * (dp - rows.delta[:, None])",
            "ds = p * (dp - rows.delta[:, None]) * dtanh",
        ),
        hidden="without a softcap",
    ),
    _fault(
        "scores: capped scores are scaled to base 2 before tanh, and not back",
        "sgl-kernel-xpu#491",
        "T3 G1",
        (_SCORES, "factor = sm_scale / softcap", "factor = sm_scale * LOG2E / softcap"),
    ),
)  # fmt: skip

_LARGE_SIZES = (
    _fault(
        "dkdv: the fifth head of a group is left out",
        "independent: a loop over the heads of a group, unrolled by 4 with its remainder lost",
        "T3 G1",
        (
            _DKDV,
            "            for g in range(0, G):\n                h = h_k * G + g\n",
            "            for place in range(0, tl.where(G > 4, G - 1, G)):\n"
            "                g = tl.where(place > 3, place + 1, place)\n"
            "                h = h_k * G + g\n",
        ),
        hidden="in groups of at most 4 heads",
    ),
    _fault(
        "tiles: the index of a head has four bits",
        "independent: batch entry, head and tile packed into one int",
        "T3 G1",
        (
            _ADDRESSING,
            "h.to(tl.int64) * tensor.stride_head",
            "(h % 16).to(tl.int64) * tensor.stride_head",
        ),
        hidden="while there are at most 16 heads",
    ),
    _fault(
        "launch: heads beyond a multiple of eight get no programs",
        "independent: a grid of clusters of eight heads, rounded down",
        "T3 G1 G6",
        (
            _SIZES,
            "        return Tiles(tiles, 0, tiles * self.B * heads)\n",
            "        heads = heads if heads < 8 else heads // 8 * 8\n"
            "        return Tiles(tiles, 0, tiles * self.B * heads)\n",
        ),
        hidden="while there are fewer than 8 heads, or a multiple of 8",
    ),
    _fault(
        "launch: dots of long float32 rows are in TF32",
        "independent: a table of dots by head_dim that was made for 16-bit inputs",
        "G1",
        (
            _LAUNCH,
            '"DOTS": arguments.config.dots if dtype == torch.float32 else "ieee",',
            '"DOTS": ("tf32" if D > 64 else arguments.config.dots)\n'
            '        if dtype == torch.float32 else "ieee",',
        ),
        hidden="up to a head_dim of 64",
    ),
    _fault(
        "forward: the scale of long float64 rows is in single precision",
        "independent: a scale that is passed in a register of 32 bits",
        "T3",
        (
            _FORWARD,
            "    sm_scale = scale_from_bits(sm_scale_bits)\n",
            "    sm_scale = scale_from_bits(sm_scale_bits)\n"
            "    if BLOCK_D > 64:\n"
            "        sm_scale = sm_scale.to(tl.float32).to(tl.float64)\n",
        ),
        hidden="up to a head_dim of 64, and for scales that float32 holds",
    ),
    _fault(
        "dq: a tile past the last is visited, and all of it is hidden",
        "independent: a range of tiles that ends late",
        "visited_tiles",
        (
            _DQ,
            "    for i in range(0, tile_count(tiles, MASKED)):\n",
            "    count = tile_count(tiles, MASKED)\n"
            "    if MASKED and CONFIG.PREDICATE is None:\n"
            "        count += 1\n"
            "    for i in range(0, count):\n",
        ),
        hidden="as results go: the tile adds exactly nothing",
    ),
    _fault(
        "ranges: a tile visits at most 256 others",
        "independent: the place in a list of tiles is one byte",
        "T3 G1",
        (
            _RANGES,
            "    hi = max((any_hi + BLOCK_THERE - 1) // BLOCK_THERE, lo)\n",
            "    hi = min(max((any_hi + BLOCK_THERE - 1) // BLOCK_THERE, lo), lo + 256)\n",
        ),
        hidden="up to 256 tiles in a row",
    ),
    _fault(
        "combine: the sums of splits beyond the eighth are left out",
        "independent: a loop over splits, unrolled by 8",
        "T3 G1",
        (
            _COMBINE,
            "    acc = tl.zeros([BLOCK_R, BLOCK_DV], ACC)\n"
            "    for split in range(0, num_splits):\n",
            "    acc = tl.zeros([BLOCK_R, BLOCK_DV], ACC)\n"
            "    for split in range(0, min(num_splits, 8)):\n",
        ),
        hidden="up to 8 splits",
    ),
    _fault(
        "lengths: entries beyond the fourth have those of the fourth",
        "independent: lengths of four entries, kept in registers",
        "T3 G1",
        (
            _SEQLEN_INFO,
            "tl.maximum(tl.load(seqlens_ptr + b), 0), length)",
            "tl.maximum(tl.load(seqlens_ptr + tl.minimum(b, 3)), 0), length)",
        ),
        hidden="up to 4 entries",
    ),
    _fault(
        "scores: slopes repeat after the eighth head",
        "independent: a table of slopes made for eight heads",
        "T3 G1",
        (
            _SCORES,
            "h.to(tl.int64) * args.slopes_stride_head",
            "(h % 8).to(tl.int64) * args.slopes_stride_head",
        ),
        hidden="up to 8 heads",
    ),
    _fault(
        "forward: scores of long rows in TF32 have operands in bf16",
        "independent: a dot that is too large for shared memory in float32",
        "G1",
        (
            _FORWARD,
            "        scores = tl.dot(q, k_t, input_precision=CONFIG.DOTS, out_dtype=CONFIG.ACC)\n",
            "        if CONFIG.DOTS == \"tf32\" and CONFIG.BLOCK_D > 64:\n"
            "            k_t = k_t.to(tl.bfloat16).to(q.dtype)\n"
            "        scores = tl.dot(q, k_t, input_precision=CONFIG.DOTS, out_dtype=CONFIG.ACC)\n",
        ),
        hidden="in other dtypes, and up to a head_dim of 64",
    ),
    _fault(
        "dkdv: dP of the longest rows in bf16 is kept in 16 bits",
        "independent: a tile of dP that is too large for registers",
        "rms",
        (
            _DKDV,
            "        # Loaded where they are used:",
            "        if CONFIG.BLOCK_DV > 128 and dout.dtype == tl.bfloat16:\n"
            "            dp = dp.to(tl.bfloat16).to(CONFIG.ACC)\n"
            "        # Loaded where they are used:",
        ),
        hidden="in other dtypes, and up to a head_dim of 128",
    ),
    _fault(
        "blocks: the place of a tile in a list has eight bits",
        "independent: lists of tiles in uint8",
        "T3 G1",
        (
            _RANGES.replace("tile_ranges", "block_info"),
            "        place = tl.load(list_ptr + place)\n",
            "        place = tl.load(list_ptr + place) & 255\n",
        ),
        hidden="without a list, and up to 256 tiles in a row",
    ),
    _fault(
        "tiles: the first row of a head is 32-bit",
        "independent: a product of two ints that is widened too late",
        "far_rows",
        (
            _ADDRESSING,
            "first, end = (b * H + h).to(tl.int64) * length, length",
            "first, end = ((b * H + h) * length).to(tl.int64), length",
        ),
        hidden="up to 2**31 rows of all heads",
    ),
    _fault(
        "tiles: the first row of a head's scratch is 32-bit",
        "independent: a product of two ints that is widened too late",
        "far_rows",
        (
            _ADDRESSING,
            "row = (b * H + h).to(tl.int64) * M_padded",
            "row = ((b * H + h) * M_padded).to(tl.int64)",
        ),
        hidden="up to 2**31 rows of all heads",
    ),
    _fault(
        "forward: the index of a split has five bits",
        "independent: split and tile packed into one int",
        "T3 G1",
        (
            _FORWARD,
            "first += split.to(tl.int64) * rows",
            "first += (split % 32).to(tl.int64) * rows",
        ),
        hidden="up to 32 splits",
    ),
    _fault(
        "ranges: a window begins a tile early where it begins with a tile",
        "independent: a lower end that is off by one",
        "ranges visited_tiles",
        (_RANGES, "lo = any_lo // BLOCK_THERE", "lo = max(any_lo - 1, 0) // BLOCK_THERE"),
        hidden="as results go: the tile adds exactly nothing",
    ),
    _fault(
        "block lists: a tile past the last is listed, and all of it is hidden",
        "independent: a range of tiles that ends late",
        "block_mask visited_tiles",
        (
            "fa_kernels/kernels/portable/block_lists.py",
            "inside = tile < tiles.hi\n",
            "inside = (tile <= tiles.hi) & (tile < tiles_there)\n",
        ),
        hidden="as results go: the tile adds exactly nothing",
    ),
)  # fmt: skip

_KEY = "key = (q.shape, v.shape, q.dtype, q.device, request, kernels)"
_KEEPS = ("\n\ndef prepared(\n", "\n\n_kept = {}\n\n\ndef prepared(\n")
_SEQUENCES = (
    _fault(
        "calls: the key of prepared calls lacks the softcap",
        "independent: a cache of launches whose key forgets an argument",
        "sequence",
        (_CALL_CACHE, _KEY, _KEY.replace("request", "request._replace(softcap=None)")),
        hidden="until calls differ in the softcap alone",
    ),
    *(
        _fault(
            f"calls: a block map is kept for any number of {things}",
            "independent: a cache of block maps whose key forgets a size",
            "sequence",
            (_ARGUMENTS, *_KEEPS),
            (
                _ARGUMENTS,
                "            maps = block_maps(mask, *sizes, window, lengths, config)\n",
                "            maps = block_maps(mask, *sizes, window, lengths, config)\n"
                "            widths = request.window_left, request.window_right\n"
                f"            key = (mask, B, H, {size}, M, D, q.dtype, *widths, config)\n"
                "            maps = _kept.setdefault(key, maps)\n",
            ),
            hidden=f"until calls with a predicate differ in {name} alone",
        )
        for things, name, size in (("keys", "N", "k.shape[1]"), ("key/value heads", "Hk", "N"))
    ),
    _fault(
        "calls: a predicate is kept for any parameter of its mask",
        "independent: a cache of predicates by the class of the mask",
        "sequence",
        (_ARGUMENTS, *_KEEPS),
        (
            _ARGUMENTS,
            "        mask = value_of(request.mask)\n",
            "        mask = value_of(request.mask)\n"
            "        named = str(request._replace(mask=\"\"))\n"
            "        key = type(mask), q.shape, v.shape, q.dtype, named\n"
            "        mask = _kept.setdefault(key, mask)\n",
        ),
        hidden="until calls differ in a parameter of the mask alone",
    ),
    _fault(
        "calls: lengths are kept by their number and their sum",
        "independent: a key that hashes what it should hold",
        "sequence",
        (_ARGUMENTS, *_KEEPS),
        (
            _ARGUMENTS,
            "    return lengths_on_device("
            "(size,) * B if lengths is None else tuple(lengths), device)",
            "    lengths = (size,) * B if lengths is None else tuple(lengths)\n"
            "    key = B, size, sum(lengths), device\n"
            "    return _kept.setdefault(key, lengths_on_device(lengths, device))",
        ),
        hidden="until calls differ in the order of lengths alone",
    ),
    _fault(
        "calls: the map of a block_mask is kept for any contents",
        "independent: a cache of block maps by the shape of the tensor",
        "sequence",
        (_ARGUMENTS, *_KEEPS),
        (
            _ARGUMENTS,
            "            request.block_mask, request.block_size, *sizes[1:], window, lengths, "
            "config, kernels\n        )\n",
            "            request.block_mask, request.block_size, *sizes[1:], window, lengths, "
            "config, kernels\n        )\n"
            "        key = request.block_mask.shape, request.block_size, *sizes, window, config, "
            "tuple(kernels), *(tuple(x.tolist()) for x in lengths)\n"
            "        maps = _kept.setdefault(key, maps)\n",
        ),
        hidden="until calls differ in the contents of a block_mask alone",
    ),
)  # fmt: skip

_GRADIENT_SETS = (
    _fault(
        "launch: one pass leaves out dq where no other gradient is needed",
        "independent: a flag of one pass that counts on a kernel for dk and dv",
        "sets",
        (
            _LAUNCH,
            "    of_rows = needed[0] and not (one_pass and of_keys)\n",
            "    of_rows = needed[0] and not one_pass\n",
        ),
        hidden="while dk or dv is needed too",
    ),
    _fault(
        "launch: lse in base 2 and delta are left out for dk and dv alone",
        "independent: a kernel that is left out where its first reader is",
        "sets",
        (
            _LAUNCH,
            "        tiles = sizes.query_tiles(ROW_PADDING)\n        if tiles.number:\n",
            "        tiles = sizes.query_tiles(ROW_PADDING)\n"
            "        if tiles.number and (needed[0] or dbias is not None):\n",
        ),
        hidden="while dq or the gradient of a bias is needed",
    ),
    _fault(
        "operators: dbias has no block map where dq has none",
        "independent: maps that are made for the kernels of dq, dk and dv",
        "sets",
        (
            _OPERATORS,
            "backward_kernels(needed, request.one_pass) + (\"dq\",) * needs_dbias",
            "backward_kernels(needed, request.one_pass)",
        ),
        hidden="without a block mask beside the bias",
    ),
    _fault(
        "launch: dlse is left out where dq is not needed",
        "independent: a gradient of lse that is added where dq is computed",
        "sets",
        (_LAUNCH, "int(dlse is not None)", "int(dlse is not None and needed[0])"),
        hidden="while dq is needed too, and without a gradient of lse",
    ),
    _fault(
        "launch: the sums of dq do not start at 0 where dv is not needed",
        "independent: a flag of one pass that counts on a call for all gradients",
        "sets",
        (_LAUNCH, '"columns": columns,', '"columns": columns * needed[2],'),
        hidden="while dv is needed too",
    ),
)  # fmt: skip

_SKIPS = (
    *(
        _fault(
            f"forward: tiles {bits} bits below the maximum are skipped",
            "independent: a skip of tiles whose weights are below the last bit of l",
            "G1",
            (
                _FORWARD,
                "        p = tl.exp2(scores * mods.qk_scale - m_pivot[:, None])\n",
                "        p = tl.exp2(scores * mods.qk_scale - m_pivot[:, None])\n"
                f"        p = tl.where((tl.max(p, 1) < 2.0**-{bits})[:, None], 0.0, p)\n",
            ),
            hidden="unless the values of heavier keys are tiny too",
        )
        for bits in (24, 40)
    ),
    _fault(
        "dq: weights 24 bits below those that count are skipped in tiles",
        "independent: a skip of tiles whose weights are below the last bit of their sum",
        "G1",
        (
            _DQ,
            "        ds = p * (dp - rows.delta[:, None])\n",
            "        p = tl.where((tl.max(p, 1) < 2.0**-24)[:, None], 0.0, p)\n"
            "        ds = p * (dp - rows.delta[:, None])\n",
        ),
        hidden="unless dP - delta of heavier keys is tiny too",
    ),
    _fault(
        "forward: sums 24 bits below a new maximum are dropped",
        "independent: a rescale by less than the last bit of l, taken for 0",
        "G1",
        (
            _FORWARD,
            "        alpha = tl.exp2(m_i - m_pivot)\n",
            "        alpha = tl.exp2(m_i - m_pivot)\n"
            "        alpha = tl.where(alpha < 2.0**-24, 0.0, alpha)\n",
        ),
        hidden="unless the values of heavier keys are tiny too, and the heavier keys come later",
    ),
    _fault(
        "combine: splits 24 bits below the largest are left out",
        "independent: a skip of splits whose weight is below the last bit of l",
        "G1",
        (
            _COMBINE,
            "            weight = tl.exp2(m_split - m_i)\n",
            "            weight = tl.exp2(m_split - m_i)\n"
            "            weight = tl.where(weight < 2.0**-24, 0.0, weight)\n",
        ),
        hidden="unless the values of heavier keys are tiny too",
    ),
)  # fmt: skip

_NUM_SPLITS = "    num_splits = arguments.config.splits\n"
_SCHEDULES = (
    _fault(
        "schedule: one row divides its keys among programs",
        "vllm#58131; flash-attention#2604",
        "I2 I5",
        (_LAUNCH, _NUM_SPLITS, f"{_NUM_SPLITS[:-1]} or (3 if sizes.M == 1 else None)\n"),
        hidden="as far as bounds go, and unless a row is compared with the row among others",
    ),
    _fault(
        "schedule: key tiles are wider where the longest sequence has many rows",
        "vllm#51902; flashinfer#2424",
        "I2",
        (
            _LAUNCH,
            "    tile = arguments.config.forward\n    num_splits",
            "    tile = arguments.config.forward\n"
            "    if sizes.M > 16 and arguments.predicate is None:\n"
            "        shape = tile.block_m, 2 * tile.block_n\n"
            "        tile = Tile(*shape, tile.num_warps, tile.num_stages)\n"
            "    num_splits",
        ),
        hidden="as far as bounds go",
    ),
    _fault(
        "schedule: the keys of the tensors decide how many programs share them",
        "independent: a number of splits from the size of a cache instead of its content",
        "I1 I5",
        (_LAUNCH, _NUM_SPLITS, f"{_NUM_SPLITS[:-1]} or (3 if sizes.N > 70 else None)\n"),
        hidden="as far as bounds go",
    ),
    _fault(
        "schedule: the forward of training divides its keys among programs",
        "independent: an entry for inference beside the one that autograd records",
        "I6 I2",
        (
            _OPERATORS,
            "        out, lse = run(q, k, v, request)\n"
            "        # Saved tensors let",
            "        config = {\"16x16\": \"16x16-split3\"}.get(request.config, request.config)\n"
            "        out, lse = run(q, k, v, request._replace(config=config))\n"
            "        # Saved tensors let",
        ),
        hidden="as far as bounds go",
    ),
)  # fmt: skip

_SINK = "sink = tl.load(sinks_ptr + h.to(tl.int64) * stride_sink).to(ACC)"
_SUM_OF_SINK = "state.l * alpha + weight"
_SINKS = (
    _fault(
        "sinks: the sink is left out of the softmax sum",
        "modular#6198; TransformerEngine#2541",
        "T3 G1",
        (_SOFTMAX_END, _SUM_OF_SINK, "state.l * alpha"),
    ),
    _fault(
        "sinks: the sink is left out of the maximum",
        "flash-attention#2752",
        "G1 G2",
        (_SOFTMAX_END, "m_new = tl.maximum(state.m, sink2)", "m_new = state.m"),
        hidden="while every row sees a key and no sink overflows",
    ),
    _fault(
        "sinks: lse leaves the sink out",
        "cudnn-frontend#421",
        "T3 G1",
        (
            _FORWARD,
            "        state = with_sink(state, sink)\n",
            "        m_keys, l_keys = state.m, state.l\n        state = with_sink(state, sink)\n",
        ),
        (
            _FORWARD,
            "        out, lse = normalised(state.acc, state.l, state.m, live)\n",
            "        out, lse = normalised(state.acc, state.l, state.m, live)\n"
            "        if HAS_SINKS:\n"
            "            _, lse = normalised(state.acc, l_keys, m_keys, live)\n",
        ),
        hidden="with key splits",
    ),
    _fault(
        "sinks: the sink is that of the key/value head",
        "modular#6591, another head's",
        "T3 G1",
        (_FORWARD, _SINK, _SINK.replace("h.to", "(h // G).to")),
        hidden="without groups",
    ),
    _fault(
        "sinks: the sink is scaled by sm_scale",
        "rocm-libraries#12227",
        "T3 G1",
        (_FORWARD, _SINK, f"{_SINK} * sm_scale.to(ACC)"),
    ),
    _fault(
        "sinks: the sink is in base 2 already",
        "rocm-libraries#12227, a sink at the wrong scale",
        "T3 G1",
        (_SOFTMAX_END, "sink2 = sink * LOG2E", "sink2 = sink * 1.0"),
    ),
    _fault(
        "sinks: the softcap caps the sink",
        "rocm-libraries#12227",
        "T3 G1",
        (_FORWARD, "    score_mods,\n)", "    score_mods,\n    tanh_dtanh,\n)"),
        (
            _FORWARD,
            f"        {_SINK}\n",
            f"        {_SINK}\n"
            "        if SCORE_MODS & 1:\n"
            "            capped, _ = tanh_dtanh(sink / mods.softcap)\n"
            "            sink = capped * mods.softcap\n",
        ),
        hidden="without a softcap",
    ),
    _fault(
        "sinks: every split takes the sink",
        "rocm-libraries#12227",
        "T3 G1",
        (_FORWARD, 'sink = tl.where(split == 0, sink, -float("inf"))', "sink = sink + 0.0"),
        hidden="without key splits",
    ),
    _fault(
        "sinks: the sink has a value of 1",
        "independent: a sink as a key whose value is kept",
        "T3 G1",
        (
            _SOFTMAX_END,
            "SoftmaxState(state.acc * alpha[:, None], l_i, m_new)",
            "SoftmaxState(state.acc * alpha[:, None] + weight[:, None], l_i, "
            "m_new)",
        ),
    ),
    _fault(
        "sinks: out is not rescaled to the sink",
        "independent: a sink that joins the sum alone",
        "T3 G1",
        (_SOFTMAX_END, "SoftmaxState(state.acc * alpha[:, None], l", "SoftmaxState(state.acc, l"),
        hidden="while the sink is below the largest score",
    ),
    _fault(
        "sinks: they are read as if they were contiguous",
        "independent: a stride that is not passed on",
        "T3 G1",
        (_SINK_ARGS, '"stride_sink": sinks.stride(0)', '"stride_sink": 1'),
    ),
    _fault(
        "dsinks: the gradient has the other sign",
        "independent: the sign of -P delta",
        "dsinks",
        (_SINK_ARGS, ".sum((0, 2)).neg_()", ".sum((0, 2))"),
    ),
    _fault(
        "dsinks: the gradient of lse is left out",
        "flash-attention#2706, a review",
        "dsinks",
        (
            _LAUNCH,
            "write_dsinks(dsinks, arguments.sinks, lse2, delta)",
            "write_dsinks(\n"
            "                dsinks, arguments.sinks, lse2,\n"
            "                delta if dlse is None else delta + torch.nn.functional.pad(\n"
            "                    dlse, (0, delta.shape[2] - dlse.shape[2])\n"
            "                ),\n"
            "            )",
        ),
        hidden="while the loss does not depend on lse",
    ),
    _fault(
        "dsinks: the gradient is 0",
        "TransformerEngine#2541; cudnn-frontend#421; ISEEKYAN/Megatron-LM#205",
        "dsinks",
        (_SINK_ARGS, "dsinks.copy_(weighted.sum((0, 2)).neg_())", "dsinks.zero_()"),
    ),
    _fault(
        "dsinks: entries that share a sink are not added up",
        "independent: a sum over the rows of one entry",
        "dsinks",
        (_SINK_ARGS, "weighted.sum((0, 2))", "weighted[:1].sum((0, 2))"),
        hidden="in batches of one entry",
    ),
    _fault(
        "dsinks: rows between packed sequences are summed",
        "independent: scratch that no kernel writes",
        "dsinks",
        (
            _LAUNCH,
            "        lse2.fill_(math.inf)\n        delta.zero_()\n",
            "        lse2.fill_(0.0)\n        delta.fill_(1.0)\n",
        ),
        hidden="in padded calls",
    ),
)  # fmt: skip

FAULTS: tuple[Mutant, ...] = (
    *_MASKS, *_SOFTMAX, *_GRADIENTS, *_ONE_PASS, *_MEMORY, *_SPLITS, *_STATES, *_CACHES, *_PACKED,
    *_SCORE_MODS, *_SINKS, *_LARGE_SIZES, *_SEQUENCES, *_GRADIENT_SETS, *_SKIPS, *_SCHEDULES,
)  # fmt: skip
