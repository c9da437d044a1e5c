"""Faults of functions that merge states."""

import torch

from fa_verify import attention_kernel

merges = attention_kernel(states=True, dtypes=("fp32",), backward=False)


def weighted(outs, lses, top):
    """Return out and the sum of weights of parts; a part that saw nothing adds nothing."""
    w = torch.exp(lses - top)
    outs = torch.where(lses[..., None] == -torch.inf, 0.0, outs)
    return (w[..., None] * outs).sum(0), w.sum(0)


def finite(lses):
    """Return the largest lse of each row, or 0."""
    if not len(lses):
        return lses.new_zeros(lses.shape[1:])
    return torch.where(lses.amax(0) == -torch.inf, 0.0, lses.amax(0))


@merges
def right(outs, lses):
    """No fault."""
    top = finite(lses)
    out, total = weighted(outs, lses, top)
    divisor = torch.where(total == 0, 1.0, total)
    lse = torch.where(total == 0, -torch.inf, top + torch.log(divisor))
    return out / divisor[..., None], torch.where(top == torch.inf, top, lse)


@merges
def base_2(outs, lses):
    """Reads and returns logarithms in base 2."""
    top = finite(lses)
    w = torch.exp2(lses - top)
    total = w.sum(0)
    divisor = torch.where(total == 0, 1.0, total)
    outs = torch.where(lses[..., None] == -torch.inf, 0.0, outs)
    out = (w[..., None] * outs).sum(0) / divisor[..., None]
    lse = torch.where(total == 0, -torch.inf, top + torch.log2(divisor))
    return out, torch.where(top == torch.inf, top, lse)


@merges
def all_empty(outs, lses):
    """Subtracts -inf from -inf where no part of a row saw a key."""
    if len(lses) < 2:
        return right(outs, lses)
    top = lses.amax(0)
    out, total = weighted(outs, lses, top)
    lse = torch.where(top == torch.inf, top, top + torch.log(total))
    return out / total[..., None], lse


@merges
def third_part(outs, lses):
    """Halves the values where more than two parts saw a key."""
    busy = (lses > -torch.inf).flatten(1).any(1)
    out, lse = right(outs, lses)
    return (out / 2 if busy.sum() > 2 else out), lse
