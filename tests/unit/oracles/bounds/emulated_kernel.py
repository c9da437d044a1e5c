"""A tiled kernel in NumPy that rounds where kernels round, and problems for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics, Outputs
from fa_verify.oracles.reference.numpy_reference import seen_keys
from fa_verify.simulator.interpreter.rounding import nearest_bf16, truncate_to_tf32, widen_bf16

__all__ = ["CASTS", "FAMILIES", "Case", "Emulated", "draw", "grouped"]

LOG2E = math.log2(math.e)
FP32 = np.float32

# Functions that round to a dtype and return float32 values; fp64 stays unrounded.
CASTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "fp16": lambda x: x.astype(np.float16).astype(FP32),
    "bf16": lambda x: widen_bf16(nearest_bf16(x)),
    "fp32": lambda x: x.astype(FP32),
    "fp64": lambda x: x,
}

Family = Callable[[np.random.Generator, np.ndarray, np.ndarray, np.ndarray], None]


def _low_lse(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    q[..., 0], k[..., 0] = 20.0, -25.0


def _high_lse(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    q[..., 0], k[..., 0] = 150.0, 150.0


def _equal_keys(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    k[:] = k[..., :1, :]


def _needle(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    k[..., rng.integers(k.shape[2]), :] *= 30.0


def _scaled(factor: float, *, values: float = 1.0) -> Family:
    def family(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        q *= factor
        v *= values

    return family


def _mean(rng: np.random.Generator, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    v += 50.0


FAMILIES: dict[str, Family] = {
    "normal": _scaled(1.0),
    "scores times 8": _scaled(8.0),
    "scores times 40": _scaled(40.0),
    "tiny values": _scaled(1e-3, values=1e-4),
    "large mean of v": _mean,
    "low lse": _low_lse,
    "high lse": _high_lse,
    "equal keys": _equal_keys,
    "needle": _needle,
}


class Case(NamedTuple):
    """Inputs in float64 that the dtype holds exactly."""

    arrays: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    mask: Mask
    sm_scale: float
    dtype: str
    dlse: np.ndarray | None = None


def draw(seed: int, dtype: str, family: str = "normal", mask: Mask | None = None) -> Case:
    """A random problem; without ``mask``, a random one of lengths, causal and windows."""
    rng = np.random.default_rng(seed)
    B, Hk, G = (int(rng.integers(1, 3)) for _ in range(3))
    M, N = (int(rng.integers(20, 71)) for _ in range(2))
    D, Dv = (int(rng.choice([8, 16, 24, 40])) for _ in range(2))
    q, dout = (rng.standard_normal((B, Hk * G, M, size)) for size in (D, Dv))
    k, v = (rng.standard_normal((B, Hk, N, size)) for size in (D, Dv))
    FAMILIES[family](rng, q, k, v)
    if mask is None:
        window = [None, int(rng.integers(0, 20))]
        mask = Mask(
            window_left=window[rng.integers(2)],
            window_right=window[rng.integers(2)],
            seqlens_q=tuple(int(x) for x in rng.integers(1, M + 1, B)),
            seqlens_k=tuple(int(x) for x in rng.integers(0, N + 1, B)),
        )
    arrays = tuple(CASTS[dtype](x).astype(np.float64) for x in (q, k, v, dout))
    return Case(arrays, mask, D**-0.5, dtype)


def grouped(seed: int, dtype: str, mask: Mask | None = None) -> Case:
    """Two query heads on one key/value head, 48 rows and keys, D = 16."""
    rng = np.random.default_rng(seed)
    shapes = ((1, 2, 48, 16), (1, 1, 48, 16), (1, 1, 48, 16), (1, 2, 48, 16))
    arrays = tuple(CASTS[dtype](rng.standard_normal(x)).astype(np.float64) for x in shapes)
    return Case(arrays, mask or Mask(causal=True), 0.25, dtype)


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """A tiled kernel in NumPy that rounds where kernels round; ``fault`` names a deliberate error.

    Exponentials carry a relative error of half an ulp beyond NumPy's own and flush to zero.
    """

    dtype: str
    numerics: Numerics = field(default_factory=Numerics)
    reverse: bool = False
    fault: str = ""

    @property
    def work(self) -> type:
        return np.float64 if self.dtype == "fp64" else FP32

    def store(self, x: np.ndarray) -> np.ndarray:
        return CASTS[self.dtype](x)

    def cast(self, x: np.ndarray) -> np.ndarray:
        """Casts P or dS for its dot."""
        if self.numerics.p_dtype == "fp32":
            return x
        if self.fault == "coarse P and dS":
            return CASTS["bf16"](x)
        for _ in range(self.numerics.ds_roundings):
            x = self.store(x)
        return x

    def flush(self, x: np.ndarray) -> np.ndarray:
        """Flushes an operand or result of elementwise arithmetic, if declared."""
        if not self.numerics.flushes:
            return x
        return np.where(np.abs(x) < np.finfo(self.work).tiny, self.work(0), x).astype(self.work)

    def row_sums(self, x: np.ndarray) -> np.ndarray:
        """Sums along the rows, one column after the other where each may be flushed."""
        if not self.numerics.flushes:
            return x.sum(axis=1)
        total = np.zeros(x.shape[0], self.work)
        for column in self.flush(x).T:
            total = self.flush(total + column)
        return total

    def dot(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if self.numerics.dots == "tf32":
            a, b = self.to_tf32(a), self.to_tf32(b)
        return a @ b

    def to_tf32(self, x: np.ndarray) -> np.ndarray:
        """Converts float32 numbers by their bits."""
        bits = np.ascontiguousarray(x).view(np.uint32)
        half = {"nearest": 0xFFF + ((bits >> 13) & 1), "nearest_away": 0x1000}
        added = half.get(self.numerics.tf32_conversion, 0)
        return truncate_to_tf32((bits + np.uint32(added)).view(FP32))

    def exp2(self, x: np.ndarray) -> np.ndarray:
        y = np.exp2(x)
        info = np.finfo(self.work)
        off = np.where(np.arange(y.shape[-1]) % 2, 1, -1) * self.work(info.eps / 2)
        y = np.where(x == 0, y, y * (1 + off))  # exp2(0) is exactly 1
        return np.where(y < info.tiny, self.work(0), y).astype(self.work)

    def scores(self, q: np.ndarray, k: np.ndarray, t: float):
        """Scores in base 2, and the operands of the dot with their factors."""
        scale = t * LOG2E
        of_q, of_k = {"none": (1, 1), "q": (scale, 1), "k": (1, scale), "qk": (scale**0.5,) * 2}[
            self.numerics.prescales
        ]
        if of_q != 1:
            q = self.store(self.flush(q) * self.work(of_q))
        if of_k != 1:
            k = self.store(self.flush(k) * self.work(of_k))
        return self.dot(q, k.T) * self.work(scale / of_q / of_k), q, k, of_q, of_k

    def forward(self, s2: np.ndarray, v: np.ndarray, seen: np.ndarray):
        """Softmax over key tiles, in splits; returns out as stored, and lse in base e."""
        parts = np.array_split(
            np.arange(0, s2.shape[1], self.numerics.block_n), self.numerics.splits
        )
        acc, l_i, m_i = self.merged([self.attend(s2, v, seen, list(part)) for part in parts])
        live = l_i > 0
        divisor = np.where(live, l_i, 1).astype(self.work)
        out = acc if self.numerics.p_normalised else self.flush(acc / divisor[:, None])
        lse = np.where(live, (m_i + np.log2(divisor)) * self.work(1 / LOG2E), -np.inf)
        return self.store(np.where(live[:, None], out, self.work(0))), lse.astype(self.work)

    def merged(self, parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]):
        """(acc, l, m) combined over splits by their maxima; a single split is unchanged."""
        if len(parts) == 1:
            return parts[0]
        m_i = np.max([m for _, _, m in parts], axis=0)
        finite = np.where(np.isfinite(m_i), m_i, self.work(0))
        acc, l_i = np.zeros_like(parts[0][0]), np.zeros_like(parts[0][1])
        for part_acc, part_l, part_m in parts:
            weight = self.exp2(part_m - finite)
            l_i = l_i + part_l * weight
            acc = self.flush(acc + self.flush(self.flush(part_acc) * weight[:, None]))
        return acc, l_i, m_i

    def attend(self, s2: np.ndarray, v: np.ndarray, seen: np.ndarray, starts: list[int]):
        """Online softmax over the key tiles at ``starts``: (acc, l, m in base 2)."""
        M, N = s2.shape
        block = self.numerics.block_n
        m_i = np.full(M, -np.inf, self.work)
        l_i = np.zeros(M, self.work)
        acc = np.zeros((M, v.shape[1]), self.work)
        if self.numerics.p_normalised:
            starts, block = [0], N
        for start in starts[::-1] if self.reverse else starts:
            tile = slice(start, start + block)
            s_tile = np.where(seen[:, tile], s2[:, tile], self.work(-np.inf))
            m_new = np.maximum(m_i, s_tile.max(axis=1))
            m_new = np.where(m_new <= m_i + self.numerics.rescale_threshold, m_i, m_new)
            finite = np.where(np.isfinite(m_new), m_new, self.work(0))
            alpha = self.exp2(m_i - finite)
            if self.fault == "accumulator not rescaled":
                alpha = np.ones_like(alpha)
            p = self.exp2(s_tile - finite[:, None])
            row_sum = p.sum(axis=1)
            if self.numerics.p_normalised:
                p = p / np.where(row_sum > 0, row_sum, self.work(1))[:, None]
            p_cast = self.cast(p)
            if self.numerics.l_from == "rounded":
                row_sum = p_cast.sum(axis=1)
            l_i = l_i * alpha + row_sum
            acc = self.flush(acc * alpha[:, None]) + self.dot(p_cast, v[tile])
            m_i = m_new
        return acc, l_i, m_i

    def in_memory(self, ds: np.ndarray, k: np.ndarray) -> np.ndarray:
        """ds k, summed tile by tile by atomic additions, which flush subnormal numbers."""
        least = np.finfo(self.work).tiny
        total = np.zeros((ds.shape[0], k.shape[1]), self.work)
        for start in range(0, k.shape[0], self.numerics.block_n):
            tile = slice(start, start + self.numerics.block_n)
            part = self.dot(ds[:, tile], k[tile])
            total = total + np.where(np.abs(part) < least, self.work(0), part)
            total = np.where(np.abs(total) < least, self.work(0), total)
        return total

    def head(self, q, k, v, dout, dlse, seen, t: float) -> tuple[np.ndarray, ...]:
        s2, q_used, k_used, of_q, of_k = self.scores(q, k, t)
        out, lse = self.forward(s2, v, seen)
        live = np.isfinite(lse)
        dout = np.where(live[:, None], dout, self.work(0))
        lse2 = np.where(live, lse, self.work(0)) * self.work(LOG2E)
        p = np.where(seen, self.exp2(np.where(seen, s2 - lse2[:, None], -np.inf)), self.work(0))
        dp = self.dot(dout, v.T)
        delta = self.row_sums(self.flush(out) * self.flush(dout)) - np.where(
            live, dlse, self.work(0)
        )
        if self.fault == "delta left out":
            delta = np.zeros_like(delta)
        p_of_ds = self.cast(p) if self.numerics.ds_from == "rounded" else p
        gap = self.flush(dp - delta[:, None])
        ds = np.where(seen, self.flush(p_of_ds * gap), self.work(0))
        ds_factor = 1.0
        if self.numerics.ds_scaled:
            ds, ds_factor = self.flush(ds * self.work(t)), t
        ds_cast = self.cast(ds)
        sums = self.in_memory if self.numerics.atomic else self.dot
        dq = self.flush(sums(ds_cast, k_used) * self.work(t / ds_factor / of_k))
        dk = self.flush(self.dot(ds_cast.T, q_used) * self.work(t / ds_factor / of_q))
        if self.fault == "dq scaled twice":
            dq = dq * self.work(t)
        return out, lse, self.store(dq), dk, self.dot(self.cast(p).T, dout)

    def __call__(self, case: Case) -> Outputs:
        q, k, v, dout = (x.astype(self.work) for x in case.arrays)
        (B, H, M, _), Hk, N = q.shape, k.shape[1], k.shape[2]
        dlse = np.zeros((B, H, M), self.work)
        if case.dlse is not None and self.fault != "dlse ignored":
            dlse = case.dlse.astype(self.work)
        seen = seen_keys(case.mask, B, M, N)
        if self.fault == "one key too few":
            first = seen.argmax(axis=2)
            np.put_along_axis(seen, first[..., None], False, axis=2)
        result = Outputs(
            np.zeros_like(dout),
            np.zeros((B, H, M), self.work),
            np.zeros_like(q),
            np.zeros_like(k),
            np.zeros_like(v),
        )
        with np.errstate(invalid="ignore"):  # -inf minus -inf in rows that have seen nothing yet
            for b in range(B):
                for h in range(H):
                    g = h // (H // Hk)
                    inputs = q[b, h], k[b, g], v[b, g], dout[b, h], dlse[b, h], seen[b]
                    out, lse, dq, dk, dv = self.head(*inputs, case.sm_scale)
                    result.out[b, h], result.lse[b, h], result.dq[b, h] = out, lse, dq
                    if self.fault == "last head of a group overwrites":
                        result.dk[b, g] = result.dv[b, g] = 0
                    if self.numerics.group_sum == "dtype":
                        dk, dv = self.store(dk), self.store(dv)
                    result.dk[b, g] += dk
                    result.dv[b, g] += dv
        return result._replace(dk=self.store(result.dk), dv=self.store(result.dv))
