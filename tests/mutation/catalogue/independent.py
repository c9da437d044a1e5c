"""Ten faults written from the kernels and the algorithm alone, before any check was run on them."""

from __future__ import annotations

from tests.mutation.catalogue.mutant import Edit, Mutant

__all__ = ["INDEPENDENT"]

INDEPENDENT: tuple[Mutant, ...] = (
    Mutant(
        name="forward: conditional rescaling with a threshold that fp16 P cannot hold",
        edits=(
            Edit(
                "fa_kernels/kernels/portable/forward.py",
                "        m_new = tl.maximum(m_i, tl.max(scores, 1) * mods.qk_scale)\n",
                "        m_top = tl.maximum(m_i, tl.max(scores, 1) * mods.qk_scale)\n"
                "        # Rescaled only where the maximum has grown much: float32 has room.\n"
                "        m_new = tl.where(m_top - m_i > 24.0, m_top, m_i)\n",
            ),
        ),
        origin="FlashAttention-4's lazy rescaling, with the threshold raised from 8 bits to the "
        "24 of a float32 accumulator, although P is rounded to fp16 first. fp16, config 16x16, D "
        "16, N 32, q = 1, k = 0 except key 16 = 3.25 (score 13 nats, 18.8 bits above the first "
        "tile): P = 4e5 is inf, and so is out; the correct out is about v[16].",
    ),
    Mutant(
        name="delta: rows past M get the LSE 0 and count as live",
        edits=(
            Edit(
                "fa_kernels/kernels/portable/bwd_preprocess.py",
                'mask=offs_m < end, other=-float("inf"))',
                "mask=offs_m < end, other=0.0)",
            ),
        ),
        origin="the fill value of all other loads, assuming that rows past M are never used. "
        "Their lse2 becomes finite, so dk/dv reads q and dout past M and adds 0 times them. fp32, "
        "config 16x16, M 20, q and dout are [:, :, :20] of buffers (1, 1, 256, 16) with NaN from "
        "row 20 on: dk and dv are NaN. For contiguous tensors a NaN in the next head has the same "
        "effect.",
    ),
    Mutant(
        name="dkdv: dS is made from the rounded P",
        edits=(
            Edit(
                "fa_kernels/kernels/portable/dkdv.py",
                "        dv = tl.dot(p.to(dout.dtype), dout, dv,",
                "        # Half the registers from here on.\n"
                "        p = p.to(dout.dtype)\n"
                "        dv = tl.dot(p, dout, dv,",
            ),
        ),
        origin="P is cast once for both of its uses to save registers, so dS is rounded twice "
        "and vanishes with a P below 2**-25 in fp16. fp16, M = N = 32, D = Dv = 16, q = 1, k = 0 "
        "except key 0 = 4.5 (score 18: all other P are 1.5e-8), v = 2000 except row 0 = 0, dout = "
        "100: dk of the other keys is 0.39, the fault gives 0.",
    ),
    Mutant(
        name="dkdv: the dot of dk has lost its input precision",
        edits=(
            Edit(
                "fa_kernels/kernels/portable/dkdv.py",
                "tl.trans(q_t), dk, input_precision=CONFIG.DOTS, out_dtype=CONFIG.ACC",
                "tl.trans(q_t), dk, out_dtype=CONFIG.ACC",
            ),
        ),
        origin="GPU only: an argument lost in a merge; Triton then uses TF32. fp32 with config "
        "default on any GPU with TF32, unit-Gaussian data: only dk is wrong, by about 5e-4 "
        "relative where IEEE dot products give 1e-6. The interpreter does not show it.",
    ),
    Mutant(
        name="dq: the scale goes into dS before it is rounded",
        edits=(
            Edit(
                "fa_kernels/kernels/portable/dq.py",
                "ds = p * (dp - rows.delta[:, None])\n",
                "ds = p * (dp - rows.delta[:, None]) * mods.qk_scale\n",
            ),
            Edit(
                "fa_kernels/kernels/portable/dq.py",
                "dq * sm_scale.to(ACC)",
                "dq * 0.6931471805599453",
            ),
        ),
        origin="as in Triton's tutorial (the scale in base 2 inside, LN2 at the end): fp16 dS "
        "becomes subnormal or overflows. fp16, D = 16, N = 32, sm_scale "
        "2**-22, k uniform in +-2**14, q, v, dout unit-Gaussian: dS is about 4e-8 where the fp16 "
        "step is 6e-8, so dq (about 0.002) is off by tens of per cent.",
    ),
    Mutant(
        name="dq: range of key tiles for a query tile of BLOCK_N rows",
        edits=(
            Edit(
                "fa_kernels/kernels/portable/dq.py",
                "    tiles, list_ptr = key_tiles(block, mask, lists, CONFIG)\n",
                "    NARROW: tl.constexpr = KernelConfig(\n"
                "        BLOCK_N, BLOCK_N, BLOCK_D, BLOCK_DV, ACC, DOTS, ALIGNED, PREDICATE,\n"
                "        SCORE_MODS,\n"
                "    )\n"
                "    tiles, list_ptr = key_tiles(block, mask, lists, NARROW)\n",
            ),
        ),
        origin="the dk/dv call, copied with a mistake; correct for square tiles, for "
        "block_m < block_n and for an unbounded window. fp32, config 32x16, M = N = 64, D 16, "
        "causal: for the query tile 0..31 the range ends at key 16, so dq of rows 16..31 lacks "
        "the keys from 16 on.",
    ),
    Mutant(
        name="launch: lse2 and delta padded to 128 rows, less than the largest block_m",
        edits=(
            Edit(
                "fa_kernels/launch/sizes.py",
                "# A multiple of every block_m.\nROW_PADDING = 256\n",
                "# A multiple of every block_m of the table.\nROW_PADDING = 128\n",
            ),
        ),
        origin="saves scratch memory, as no tile of the table has more than 128 rows. A caller's "
        "Tile may have 256 and then reads the next head's lse2 or, past the last head, memory out "
        "of bounds. fp32, dkdv=Tile(256, 16), H = Hk = 2, M 100, q, k, v, dout are [:, :, :100] of "
        "(1, 2, 256, 16) buffers with NaN from row 100 on: rows 128..227 count as live, dk and dv "
        "of head 0 are NaN.",
    ),
    Mutant(
        name="launch: dk/dv takes the aligned path without a look at dout",
        edits=(
            Edit(
                "fa_kernels/launch/portable.py",
                '"ALIGNED": alignment(q, k, v, dout, dk, dv), "ONE_PASS"',
                '"ALIGNED": alignment(q, k, v, dk, dv), "ONE_PASS"',
            ),
        ),
        origin="the list of tensors assumes that the incoming gradient is contiguous. fp16, "
        "D = Dv = 16, dout = randn(1, 1, 16, 32).transpose(2, 3): its column stride counts as 1 "
        "and its row stride as 0, so dk and dv are wrong; out.sum().backward() (all strides 0) "
        "reads 15 elements past a scalar.",
    ),
    Mutant(
        name="arguments: windows clamped to the number of keys",
        edits=(
            Edit(
                "fa_kernels/validation/arguments.py",
                "M + N if x is None else min(x, M + N)",
                "M + N if x is None else min(x, N)",
            ),
        ),
        origin="assumes that a window reaches no further than the number of keys. This holds to "
        "the left, but with M > N a query stands before key 0. fp32, M 64, N 16, "
        "window_size=(None, 40): row m sees n <= m - 8, with the fault n <= m - 32, so rows 8..31 "
        "give out 0 and lse -inf.",
    ),
    Mutant(
        name="arguments: a strided tensor of lengths goes to the kernels as it is",
        edits=(
            Edit(
                "fa_kernels/validation/arguments.py",
                "        return lengths.contiguous(), None\n",
                "        return lengths, None\n",
            ),
        ),
        origin="assumes that a tensor of shape (B,) is contiguous. The kernels load at pointer + "
        "b. B 2, N 16, seqlens_k = torch.tensor([[5, 11], [7, 11]], dtype=torch.int32)[:, 0]: "
        "batch entry 1 is computed with 11 keys instead of 7.",
    ),
)
