"""FlashInfer's Triton kernels that merge attention states, with logarithms in base 2."""

import torch
from brought import module

from fa_verify import attention_kernel

kernels = module("flashinfer-ai/flashinfer", "flashinfer/triton/kernels/cascade.py")
merges = attention_kernel(
    states=True, lse_base="2", dtypes=("fp16", "bf16", "fp32"), backward=False,
)  # fmt: skip


def _tokens(x):
    """(P, B, H, M, ...) as (P, B M, H, ...), contiguous as the kernels assume."""
    return x.transpose(2, 3).flatten(1, 2).contiguous()


def _entries(x, of):
    """(B M, H, ...) as (B, H, M, ...)."""
    return x.unflatten(0, (of.shape[1], of.shape[3])).transpose(1, 2)


@merges
def two(outs, lses):
    """merge_state: two states, into new tensors."""
    if len(outs) != 2:
        raise NotImplementedError("merge_state takes two states")
    v, s = _tokens(outs), _tokens(lses)
    merged, lse = torch.empty_like(v[0]), torch.empty_like(s[0])
    rows, H, Dv = merged.shape
    if rows:
        kernels.merge_state_kernel[(rows,)](
            v[0], s[0], v[1], s[1], merged, lse, H, Dv, bdx=Dv, bdy=H
        )
    return _entries(merged, outs), _entries(lse, outs)


@merges
def in_place(outs, lses):
    """merge_state_in_place: two states, into the first."""
    if len(outs) != 2:
        raise NotImplementedError("merge_state_in_place takes two states")
    v, s = _tokens(outs).clone(), _tokens(lses).clone()
    rows, H, Dv = v[0].shape
    if rows:
        kernels.merge_state_in_place_kernel[(rows,)](
            v[0], s[0], v[1], s[1], H, Dv, None, bdx=Dv, bdy=H
        )
    return _entries(v[0], outs), _entries(s[0], outs)


@merges
def many(outs, lses):
    """merge_states: any number of states."""
    v, s = (_tokens(x).transpose(0, 1).contiguous() for x in (outs, lses))
    rows, P, H, Dv = v.shape
    merged, lse = v.new_empty(rows, H, Dv), s.new_empty(rows, H)
    if rows:
        kernels.merge_states_kernel[(rows,)](v, s, merged, lse, P, H, Dv, bdx=Dv, bdy=H)
    return _entries(merged, outs), _entries(lse, outs)
