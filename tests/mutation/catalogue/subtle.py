"""Faults whose errors stay within, or near, the worst-case bound on ordinary data.

Statistics of errors and closed forms detect them.
"""

from __future__ import annotations

from tests.mutation.catalogue.mutant import Edit, Mutant

__all__ = ["SUBTLE"]

_FORWARD = "fa_kernels/kernels/portable/forward.py"
_DELTA = "fa_kernels/kernels/portable/bwd_preprocess.py"
_DKDV = "fa_kernels/kernels/portable/dkdv.py"
_DQ = "fa_kernels/kernels/portable/dq.py"
_ADDRESSING = "fa_kernels/kernels/common/addressing.py"
_MASK = "fa_kernels/kernels/common/mask.py"
_SOFTMAX = "fa_kernels/kernels/common/softmax.py"
_RTZ = ', fp_downcast_rounding="rtz")'


def _subtle(name: str, why: str, *edits: tuple[str, str, str], missed: str = "") -> Mutant:
    return Mutant(name, tuple(Edit(*edit) for edit in edits), why, missed=missed)


def _cast(file: str, value: str, dtype: str, new: str) -> tuple[str, str, str]:
    """Return an edit that replaces the cast of P or dS before its dot product."""
    return file, f"{value}.to({dtype}.dtype), ", f"{new}, "


SUBTLE: tuple[Mutant, ...] = (
    *(
        _subtle(
            f"{kernel}: {what} is truncated where it should be rounded",
            "a conversion by bit operations, quicker than the rounding one",
            _cast(file, value, dtype, f"{value}.to({dtype}.dtype{_RTZ}"),
        )
        for kernel, what, file, value, dtype in (
            ("forward", "P", _FORWARD, "p", "v"),
            ("dkdv", "P", _DKDV, "p", "dout"),
            ("dkdv", "dS", _DKDV, "ds", "q_t"),
            ("dq", "dS", _DQ, "ds", "k_t"),
        )
    ),
    _subtle(
        "tiles: results are truncated where they should be rounded",
        "a conversion by bit operations, quicker than the rounding one",
        (
            _ADDRESSING,
            "tile = tile.to(ptr.dtype.element_ty)",
            "tile = tile.to(tl.float32).to(ptr.dtype.element_ty, "
            'fp_downcast_rounding="rtz") if ptr.dtype.element_ty.primitive_bitwidth == 16 '
            "else tile.to(ptr.dtype.element_ty)",
        ),
    ),
    _subtle(
        "tiles: results are rounded twice, to bf16 first",
        "one epilogue for both 16-bit dtypes",
        (
            _ADDRESSING,
            "tile = tile.to(ptr.dtype.element_ty)",
            "tile = tile.to(tl.bfloat16).to(ptr.dtype.element_ty)",
        ),
    ),
    _subtle(
        "delta: products are rounded to the input dtype",
        "a packed 16-bit multiply, twice as fast",
        (_DELTA, "_row_sums(out.to(ACC) * dout.to(ACC))", "_row_sums((out * dout).to(ACC))"),
        missed="out, from which delta is computed, has the same rounding: on ordinary data this "
        "adds less to the mean square of dq than its limit allows; elsewhere it reached 0.4 bounds",
    ),
    _subtle(
        "dkdv: dk and dv are kept in the input dtype between tiles",
        "half the registers",
        (
            _DKDV,
            "    return dk, dv\n",
            "    return dk.to(k.dtype).to(CONFIG.ACC), dv.to(v.dtype).to(CONFIG.ACC)\n",
        ),
    ),
    _subtle(
        "dkdv: dS is made from the rounded P",
        "one cast for both uses of P",
        (
            _DKDV,
            "ds = p * (dp - delta[None, :])",
            "ds = p.to(dout.dtype).to(CONFIG.ACC) * (dp - delta[None, :])",
        ),
    ),
    _subtle(
        "dq: dS is made from the rounded P",
        "one cast for both uses of P",
        (
            _DQ,
            "ds = p * (dp - rows.delta[:, None])",
            "ds = p.to(k_t.dtype).to(CONFIG.ACC) * (dp - rows.delta[:, None])",
        ),
    ),
    *(
        _subtle(
            f"{kernel}: {what} is too large by one part in a thousand",
            "a scale of too few digits",
            (file, old, f"{old} * 1.001"),
        )
        for kernel, what, file, old in (
            ("forward", "out", _SOFTMAX, "acc / l_safe[:, None]"),
            ("dq", "dq", _DQ, "dq * sm_scale.to(ACC)"),
            ("dkdv", "dk", _DKDV, "dk * sm_scale.to(ACC)"),
        )
    ),
    _subtle(
        "forward: out is too large by one part in two thousand",
        "a reciprocal of too few digits",
        (_SOFTMAX, "acc / l_safe[:, None]", "acc / l_safe[:, None] * 1.0005"),
    ),
    _subtle(
        "forward: an epsilon is added to the numerator too",
        "a guard against a division of 0 by 0",
        (_SOFTMAX, "acc / l_safe[:, None]", "(acc + 1e-6) / l_safe[:, None]"),
    ),
    _subtle(
        "delta: it is truncated to the input dtype",
        "scratch of half the size, a conversion by bit operations",
        (
            _DELTA,
            "    tl.store(delta_ptr + (row + offs_m), delta)\n",
            "    delta = delta.to(tl.float32)\n"
            "    if dout.dtype.primitive_bitwidth == 16:\n"
            '        delta = delta.to(dout.dtype, fp_downcast_rounding="rtz").to(tl.float32)\n'
            "    tl.store(delta_ptr + (row + offs_m), delta)\n",
        ),
    ),
    _subtle(
        "delta: the log-sum-exp of the backward pass has eleven digits",
        "scratch of half the size",
        (_DELTA, "lse * LOG2E)", "(lse * LOG2E).to(tl.float16).to(ACC))"),
    ),
    _subtle(
        "dkdv: the first key and the last row of a sequence are taken for hidden from each other",
        "a corner of the triangle, off by one",
        (
            _DKDV,
            "seen = element_mask(offs_m[None, :], offs_n[:, None], mask, PREDICATE)\n",
            "seen = element_mask(offs_m[None, :], offs_n[:, None], mask, PREDICATE)\n"
            "    corner = (offs_n[:, None] == 0) & (offs_m[None, :] == mask.seqlen_q - 1)\n"
            "    seen = seen & ~corner\n",
        ),
    ),
    _subtle(
        "forward: exp2 has ten good bits",
        "a polynomial of low degree",
        (
            _FORWARD,
            "p = tl.exp2(scores * mods.qk_scale - m_pivot[:, None])",
            "p = tl.exp2(tl.floor((scores * mods.qk_scale - m_pivot[:, None]) * 1024.0) / 1024.0)",
        ),
    ),
    _subtle(
        "forward: P has 17 digits in fp32",
        "a product of split operands whose smallest part is left out",
        _cast(
            _FORWARD,
            "p",
            "v",
            "((p.to(tl.int32, bitcast=True) & -128).to(tl.float32, bitcast=True) "
            "if v.dtype == tl.float32 else p.to(v.dtype))",
        ),
    ),
    _subtle(
        "dkdv: P of the first tile of TF32 dots is too large by one part in 512",
        "a rescale that the first tile does not need",
        _cast(
            _DKDV,
            "p",
            "dout",
            '(p * tl.where(start_m == 0, 1.001953125, 1.0) if CONFIG.DOTS == "tf32" else p)'
            ".to(dout.dtype)",
        ),
    ),
    _subtle(
        "dq: keys are rounded to TF32, and those of the forward are truncated",
        "a conversion before the dot in one kernel of two",
        (
            _DQ,
            "tl.dot(rows.q, k_t, ",
            "tl.dot(rows.q, (k_t.to(tl.int32, bitcast=True) + 4096).to(tl.float32, bitcast=True) "
            'if CONFIG.DOTS == "tf32" else k_t, ',
        ),
    ),
    _subtle(
        "forward: the softmax sum of 16-bit inputs takes 16 of the digits of P",
        "a packed addition of halves",
        (
            _FORWARD,
            "tl.sum(p, 1)",
            "tl.sum((p.to(tl.int32, bitcast=True) & -256).to(tl.float32, bitcast=True) "
            "if q.dtype.primitive_bitwidth == 16 else p, 1)",
        ),
    ),
    _subtle(
        "forward: P of a row's last full tile is truncated",
        "the last turn of an unrolled loop, with a conversion by bit operations",
        (
            _FORWARD,
            "        acc = tl.dot(p.to(v.dtype), v, acc,",
            "        if q.dtype.primitive_bitwidth == 16:\n"
            "            cut = p.to(v.dtype, fp_downcast_rounding=\"rtz\").to(CONFIG.ACC)\n"
            "            is_last = (place + 1 == tiles.full_hi) & (not is_edge(place, tiles))\n"
            "            p = tl.where(is_last, cut, p)\n"
            "        acc = tl.dot(p.to(v.dtype), v, acc,",
        ),
        missed="it errs to one side in one tile of many, which moves no sum of out past its limit",
    ),
    _subtle(
        "forward: the factor that rescales acc is rounded to the input dtype",
        "a packed 16-bit multiply, twice as fast",
        (_FORWARD, "acc * alpha[:, None]", "acc * alpha.to(v.dtype).to(CONFIG.ACC)[:, None]"),
    ),
    _subtle(
        "forward: acc is kept in 16 bits between tiles",
        "half the registers",
        (
            _FORWARD,
            "        m_i = m_new\n",
            "        acc = acc.to(q.dtype).to(CONFIG.ACC)\n        m_i = m_new\n",
        ),
    ),
    _subtle(
        "mask: a window's far edge is one key short where windows are long",
        "a special case for windows of whole tiles",
        (
            _MASK,
            "(distance >= -mask.window_left)",
            "(distance >= -mask.window_left + tl.where(mask.window_left > 512, 1, 0))",
        ),
    ),
    _subtle(
        "forward: the far edge of a window of thousands of keys is one key short",
        "a special case for windows of whole tiles",
        (
            _FORWARD,
            "seen = element_mask(offs_m[:, None], offs_n[None, :], mask, CONFIG.PREDICATE)\n",
            "seen = element_mask(offs_m[:, None], offs_n[None, :], mask, CONFIG.PREDICATE)\n"
            "            if mask.window_left > 4096:\n"
            "                left = offs_n[None, :] - 1\n"
            "                nearer = element_mask(offs_m[:, None], left, mask, CONFIG.PREDICATE)\n"
            "                seen = seen & nearer\n",
        ),
    ),
    _subtle(
        "forward: the last head of several runs over the keys of full tiles backwards",
        "work is handed out in turns",
        (
            _FORWARD,
            "        start_n = n_block * CONFIG.BLOCK_N\n",
            "        if not is_edge(place, tiles) and mask.window_left > 0:\n"
            "            n_block = tl.where(\n"
            "                tl.program_id(0) + 1 == tl.num_programs(0),\n"
            "                tiles.full_lo + tiles.full_hi - 1 - n_block, n_block\n"
            "            )\n"
            "        start_n = n_block * CONFIG.BLOCK_N\n",
        ),
    ),
)  # fmt: skip
