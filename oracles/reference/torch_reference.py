"""Attention and its gradients in float64: PyTorch, gradients by autograd, chunked over rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import Protocol

import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Outputs
from fa_verify.oracles.reference.score_mods import Additions
from fa_verify.oracles.reference.softcap import capped

__all__ = [
    "DenseMask",
    "RowMasks",
    "attention",
    "bias_gradient",
    "chunk_height",
    "row_chunks",
    "sink_gradient",
    "sinks_of_rows",
]

_RANGES = 16  # the keys of chunks begin and end at this part of all keys
_SCORES = 2**24  # scores in one chunk; about ten float64 tensors of this size live at a time


class DenseMask(Protocol):
    """The part of a mask that the oracles use."""

    def dense(
        self, B: int, H: int, M: int, N: int, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Returns bool (B or 1, H or 1, M, N), True where visible."""


class RowMasks:
    """The dense mask, a few rows at a time.

    A ``Mask`` is evaluated for the requested rows alone, so M x N is never materialised: lengths
    and window here, the rest by its ``mask_mod``. Any other mask is made dense once and sliced.
    """

    def __init__(
        self, mask: DenseMask, B: int, H: int, M: int, N: int, device: torch.device
    ) -> None:
        """Takes a ``Mask`` or any object with ``dense``, the sizes, and the device of the bools."""
        self.shape = (B, H, M, N)
        self.device = device
        # Whether lengths and window do not describe the mask completely.
        self.has_predicate = not (isinstance(mask, Mask) and mask.is_plain)
        self._dense: torch.Tensor | None = None
        self._beyond: Mask | None = None
        self._lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        if isinstance(mask, Mask) and type(mask).dense is Mask.dense:
            self._lengths = mask.lengths(B, M, N)
            self._left, self._right = mask.window_left, mask.right
            # Entries without padding are all the same, and need no tensors of lengths.
            self._differ = not mask.is_plain or self._lengths != ((M,) * B, (N,) * B)
            self._ahead: torch.Tensor | int = N - M
            if self._differ:
                lengths = torch.tensor(self._lengths, dtype=torch.int64, device=device)
                self._rows, self._keys = lengths.view(2, B, 1, 1, 1).unbind()
                self._ahead = self._keys - self._rows
            if not mask.is_plain:
                self._beyond = mask
                both = lengths.cpu().amin(0) > 0
                self._live = both.nonzero()[:, 0].to(device)
        else:
            self._dense = mask.dense(B, H, M, N, device=device)

    def keys(self, start: int, stop: int) -> slice:
        """Returns a range of keys with all that rows [start, stop) see, by lengths and window."""
        N = self.shape[3]
        if self._lengths is None:
            return slice(0, N)
        first, last = N, 0
        for rows, keys in zip(*self._lengths, strict=True):
            if start >= rows:
                continue
            ahead = keys - rows
            low = 0 if self._left is None else max(0, start + ahead - self._left)
            beyond = min(stop, rows) + ahead
            high = keys if self._right is None else min(keys, beyond + self._right)
            if low < high:
                first, last = min(first, low), max(last, high)
        return slice(first, last) if first < last else slice(0, 0)

    def between(self, start: int, stop: int, keys: slice | None = None) -> torch.Tensor:
        """Returns rows [start, stop), bool (B or 1, H or 1, stop - start, keys); None is all N."""
        keys = keys or slice(0, self.shape[3])
        if self._dense is not None:
            return self._dense[:, :, start:stop, keys]
        m = torch.arange(start, stop, device=self.device).view(1, 1, -1, 1)
        n = torch.arange(keys.start, keys.stop, device=self.device)
        conditions = []
        if self._differ:
            conditions += [(m < self._rows) & (n < self._keys)]
        if self._left is not None:
            conditions += [n >= m + (self._ahead - self._left)]
        if self._right is not None:
            conditions += [n <= m + (self._ahead + self._right)]
        everything = (1, 1, m.shape[2], n.shape[0])
        seen = reduce(torch.logical_and, conditions or [m.new_ones(everything, dtype=torch.bool)])
        if self._beyond is not None and 0 not in self.shape:
            _, H, M, N = self.shape
            h = torch.arange(1 if self._beyond.uniform else H, device=self.device).view(-1, 1, 1)
            seen = seen.expand(-1, h.shape[0], -1, -1).clone()
            # ``mask_mod`` never gets a padding row or key.
            b = self._live
            m = torch.minimum(m, self._rows - 1)[b]
            n = torch.minimum(n, self._keys - 1)[b]
            if b.numel():
                seen[b] &= self._beyond.mask_mod(b.view(-1, 1, 1, 1), h, m, n, M=M, N=N)
        return seen


def sinks_of_rows(
    sinks: torch.Tensor, mask: object, shape: tuple[int, int, int, int], here: slice
) -> torch.Tensor:
    """Returns the sink of each row of a chunk, float64 (B, H, rows); -inf in padding.

    Args:
        sinks: (H,).
        mask: The mask. The rows of a mask without ``lengths`` are all valid.
        shape: (B, H, M, N).
        here: The rows of the chunk.
    """
    B, H, M, N = shape
    lengths = mask.lengths(B, M, N)[0] if hasattr(mask, "lengths") else (M,) * B
    m = torch.arange(M, device=sinks.device)[here]
    valid = m < torch.tensor(lengths, device=sinks.device).view(B, 1, 1)
    return torch.where(valid, sinks.to(torch.float64).view(1, H, 1), -math.inf)


def chunk_height(rows: int | None, B: int, H: int, N: int) -> int:
    """Returns the height of a chunk: ``rows``, or for None a height that limits memory.

    B, H and N are >= 1.

    Raises:
        ValueError: rows is less than 1.
    """
    if rows is None:
        return max(1, _SCORES // (B * H * N))
    if rows < 1:
        raise ValueError(f"rows is {rows}; needs None or an int >= 1")
    return rows


def row_chunks(
    masks: RowMasks, height: int, *, row_step: int = 1, key_step: int = 1
) -> Iterator[tuple[slice, slice]]:
    """Yields the rows of each chunk, and a range with all keys that they see, at least one.

    A chunk whose rows see few keys is taller, so that it has as many pairs as others. Ranges begin
    and end at a sixteenth of the keys. With as many sizes as chunks, the memory that PyTorch keeps
    of one chunk would not fit the next.

    Args:
        masks: The mask.
        height: Rows of a chunk that sees all keys, >= 1.
        row_step: Divides the first row of each chunk.
        key_step: Divides the first key of each chunk.
    """
    _, _, M, N = masks.shape
    height += -height % row_step
    step = key_step * max(1, N // (_RANGES * key_step))

    def keys_of(start: int, stop: int) -> slice:
        if stop - start == M:
            return slice(0, N)
        keys = masks.keys(start, stop)
        first = keys.start // step * step
        return slice(first, min(N, max(first + step, -(-keys.stop // step) * step)))

    start = 0
    while start < M:
        stop = min(start + height, M)
        keys = keys_of(start, stop)
        while stop < M:
            taller = min(2 * stop - start, M)
            wider = keys_of(start, taller)
            if (taller - start) * (wider.stop - wider.start) > height * N:
                break
            stop, keys = taller, wider
        yield slice(start, stop), keys
        start = stop


def _rows_with_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    seen: torch.Tensor,
    sm_scale: float,
    softcap: float | None,
    added: tuple[torch.Tensor, ...],
    leaves_of_scores: list[torch.Tensor],
    sinks_bhm: torch.Tensor | None,
) -> tuple[Outputs[torch.Tensor], list[torch.Tensor]]:
    """Returns the outputs of a chunk of rows, with its contributions to dk, dv and other gradients.

    The other gradients are those of ``leaves_of_scores``, the bias and the sinks if there are any.
    """
    B, H, M, _ = q.shape
    Hk, N = k.shape[1:3]
    seen = seen.expand(B, H, M, N)
    # 1. Rows without a visible key and keys that none of these rows sees may hold NaN. They are
    #    replaced by 0 before any product, where 0 * NaN would be NaN.
    hidden, dead = ~seen, ~seen.any(3, keepdim=True)
    unused = ~seen.any(2).view(B, Hk, H // Hk, N, 1).any(2)
    q, dout = (x.to(torch.float64).masked_fill(dead, 0.0) for x in (q, dout))
    k, v = (x.to(torch.float64).masked_fill(unused, 0.0) for x in (k, v))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        # 2. Each query head reads the key/value head of its group.
        q, k, v = leaves
        if H > Hk:
            k, v = (x.repeat_interleave(H // Hk, dim=1) for x in (k, v))
        # 3. Scores. A row without a visible key gets zeros; its finite softmax is dropped below.
        scores_bhmn = q @ k.mT * sm_scale
        if softcap is not None:
            scores_bhmn = capped(scores_bhmn, softcap)
        scores_bhmn = sum(added, scores_bhmn)
        if sinks_bhm is not None:
            # A sink is one more key, whose value is 0.
            sinks_bhm1 = sinks_bhm.unsqueeze(3)
            scores_bhmn = torch.cat([scores_bhmn, sinks_bhm1], 3)
            hidden = torch.cat([hidden, sinks_bhm1 == -math.inf], 3)
            dead = hidden.all(3, keepdim=True)
        scores_bhmn = scores_bhmn.masked_fill(hidden, -math.inf).masked_fill(dead, 0.0)
        # 4. Softmax, divided by its sum: exp(s - lse) would carry the rounding of lse, which grows
        #    with |lse|, into every weight of the row. The fill excludes hidden pairs from the
        #    gradient.
        m_bhm1 = scores_bhmn.detach().amax(3, keepdim=True)
        e_bhmn = torch.exp(scores_bhmn - m_bhm1)
        l_bhm1 = e_bhmn.sum(3, keepdim=True)
        p_bhmn = (e_bhmn / l_bhm1).masked_fill(hidden, 0.0)
        # 5. Output and gradients. The sum is written out so that the backward begins with an
        #    elementwise kernel: cuBLAS warns if it runs first in autograd's own thread.
        out = p_bhmn[:, :, :, :N] @ v
        loss = (out * dout).sum()
        if dlse is not None:
            # The row maximum is a constant in lse = m + log l: its contributions cancel.
            loss = loss + (l_bhm1.log() * dlse.unsqueeze(3)).masked_fill(dead, 0.0).sum()
        dq, dk, dv, *others = torch.autograd.grad(loss, [*leaves, *leaves_of_scores])
    lse = (m_bhm1 + l_bhm1.detach().log()).masked_fill(dead, -math.inf).squeeze(3)
    return Outputs(out.detach(), lse, dq, dk, dv), others


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    mask: DenseMask,
    sm_scale: float,
    softcap: float | None = None,
    rows: int | None = None,
) -> Outputs[torch.Tensor]:
    """Returns attention, its log-sum-exp and its gradients, in float64.

    out = softmax(s + mask) v, where s is x = sm_scale q k', or c tanh(x / c) with a softcap, plus
    the terms of ``Additions``. lse is the natural logarithm of the softmax's denominator. dq, dk,
    dv are the gradients of sum(out * dout) + sum(lse * dlse). A row without a visible key has out
    0, lse -inf and dq 0, and adds nothing to dk and dv. Padding may hold anything, and hidden pairs
    contribute exact zeros. A sink is one more key of each valid row: its score is given, its value
    is 0, and no mask hides it. lse includes it.

    Args:
        q: (B, H, M, D), any float dtype and strides.
        k: (B, Hk, N, D); H is a multiple of Hk.
        v: (B, Hk, N, Dv).
        dout: (B, H, M, Dv).
        dlse: (B, H, M), the gradient of lse; None is zero. It is ignored for rows without a
            visible key.
        alibi_slopes: (H,) or (B, H), for a mask with ``lengths``; None without ALiBi.
        bias: (B or 1, H or 1, M or 1, N or 1); None without a bias. It may hold anything where no
            row sees a key.
        sinks: (H,), finite or -inf; None without sinks.
        mask: The mask.
        sm_scale: Factor on q.k.
        softcap: c, > 0; None without a softcap.
        rows: Height of a chunk, more where its rows see few keys; None keeps a chunk's scores
            within 2**24.

    Returns:
        Float64 tensors on q's device; gradients are summed over the chunks and the group's heads.

    Numerics: the error is a few float64 roundings, about the bound of a float64 kernel.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1.
    """
    given = (q, k, v, dout, dlse, alibi_slopes, bias, sinks)
    return _by_chunks(*given, mask=mask, sm_scale=sm_scale, softcap=softcap, rows=rows)[0]


def bias_gradient(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    mask: DenseMask,
    sm_scale: float,
    softcap: float | None = None,
    rows: int | None = None,
) -> torch.Tensor:
    """Returns the gradient of the bias, float64 in its shape: dS, summed over broadcast axes.

    Arguments and numerics are those of ``attention``.
    """
    given = (q, k, v, dout, dlse, alibi_slopes, bias, sinks)
    return _by_chunks(*given, mask=mask, sm_scale=sm_scale, softcap=softcap, rows=rows)[1][0]


def sink_gradient(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor,
    *,
    mask: DenseMask,
    sm_scale: float,
    softcap: float | None = None,
    rows: int | None = None,
) -> torch.Tensor:
    """Returns the gradient of the sinks, float64 (H,): dS of the sink, summed over valid rows.

    Arguments and numerics are those of ``attention``.
    """
    given = (q, k, v, dout, dlse, alibi_slopes, bias, sinks)
    return _by_chunks(*given, mask=mask, sm_scale=sm_scale, softcap=softcap, rows=rows)[1][-1]


def _nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Outputs[torch.Tensor]:
    """Returns the outputs where no row sees a key."""
    dq, dk, dv = (x.new_zeros(x.shape, dtype=torch.float64) for x in (q, k, v))
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=torch.float64)
    return Outputs(out, q.new_full(q.shape[:3], -math.inf, dtype=torch.float64), dq, dk, dv)


def _by_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    mask: DenseMask,
    sm_scale: float,
    softcap: float | None,
    rows: int | None,
) -> tuple[Outputs[torch.Tensor], list[torch.Tensor]]:
    """Returns the outputs, and the gradients of a bias and of sinks, if there are any."""
    (B, H, M, _), N = q.shape, k.shape[2]
    bias, sinks = (
        None if x is None else x.detach().to(torch.float64).contiguous().requires_grad_()
        for x in (bias, sinks)
    )
    leaves = [x for x in (bias, sinks) if x is not None]
    gradients = [torch.zeros_like(x, requires_grad=False) for x in leaves]
    if 0 in (B, M) or (N == 0 and sinks is None):
        return _nothing(q, k, v), gradients
    masks = RowMasks(mask, B, H, M, N, q.device)
    additions = Additions(mask, (B, H, M, N), q.device, alibi_slopes, bias)

    def of_chunk(here: slice, keys: slice) -> tuple[Outputs[torch.Tensor], list[torch.Tensor]]:
        seen = masks.between(here.start, here.stop, keys)
        of_lse = None if dlse is None else dlse[:, :, here].to(torch.float64)
        with torch.enable_grad():
            added = additions.between(here.start, here.stop, keys)
            of_sinks = None if sinks is None else sinks_of_rows(sinks, mask, (B, H, M, N), here)
        return _rows_with_gradients(
            q[:, :, here], k[:, :, keys], v[:, :, keys], dout[:, :, here], of_lse, seen,
            sm_scale, softcap, added, leaves, of_sinks,
        )  # fmt: skip

    chunks = [*row_chunks(masks, chunk_height(rows, B, H, max(N, 1)))]
    if len(chunks) == 1:
        whole, gradients = of_chunk(*chunks[0])
        return Outputs(*(x.contiguous() for x in whole)), gradients
    results = _nothing(q, k, v)
    for here, keys in chunks:
        part, others = of_chunk(here, keys)
        for gradient, of_rows in zip(gradients, others, strict=True):
            gradient += of_rows
        for name in ("out", "lse", "dq"):
            getattr(results, name)[:, :, here] = getattr(part, name)
        results.dk[:, :, keys].add_(part.dk)
        results.dv[:, :, keys].add_(part.dv)
    return results, gradients
