"""Digests of the kernels' outputs for each problem.

On a GPU a dq that is summed by atomics differs from run to run. The snapshot then records whether
it lies within the derived bound.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch

import fa_kernels
from fa_verify.adapters import ours
from fa_verify.oracles.bounds import error_model
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.oracles.reference import torch_reference
from fa_verify.properties.kernels.subject import Subject
from tests.altered.emulation import emulate
from tests.snapshots.calls import Inputs, answer
from tests.snapshots.problems import cases

__all__ = ["digest", "outputs"]

# Factor on the lengths of sequences on a GPU.
_SCALE = 7


def digest(x: torch.Tensor) -> str:
    """The digest of a tensor's dtype, shape and bytes."""
    found = hashlib.sha256(f"{x.dtype} {tuple(x.shape)}".encode())
    found.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:20]


def _is_within_bound(x: Inputs, dq: torch.Tensor) -> bool:
    """Whether dq lies within its bound; varlen is judged sequence by sequence."""
    case = x.case
    numerics = Subject.of(ours.flash_attention, "ours").numerics_of(
        Problem(config=case.config, dtype=case.dtype, D=case.D, Dv=case.Dv)
    )
    options = {"sm_scale": case.D**-0.5, "softcap": case.softcap}
    dout = torch.zeros_like(x.dout) if case.dlse == "alone" else x.dout
    is_right = True
    for at_q, at_k, b, mask in _sequences(x):
        q, got, of_out = (y[:, :, at_q].detach() for y in (x.q, dq, dout))
        k, v = (y[:, :, at_k].detach() for y in (x.k, x.v))
        dlse = None if x.dlse is None else x.dlse[:, :, at_q]
        slopes = x.slopes[b : b + 1] if case.alibi == "BH" and case.call == "varlen" else x.slopes
        given = (q, k, v, of_out, dlse, slopes, None if x.bias is None else x.bias.detach())
        want = torch_reference.attention(*given, mask=mask, **options)
        bound = error_model.judge(
            *given, mask=mask, in_dtype=case.dtype,
            numerics=dataclasses.replace(numerics, atomic=("dq",)), **options,
        ).bound  # fmt: skip
        is_right &= bool(((got.double() - want.dq).abs() <= bound.dq).all())
    return is_right


def _sequences(x: Inputs) -> Iterator[tuple[slice, slice, int, Mask]]:
    """(rows, keys, batch entry, mask) of each sequence."""
    if x.case.call != "varlen":
        yield slice(None), slice(None), 0, x.case.of()
        return
    for b in range(x.case.B):
        mask = x.case.of()
        if not mask.is_plain:
            rows, keys = x.case.of_lengths()
            mask = dataclasses.replace(mask, seqlens_q=rows, seqlens_k=keys).taken((b,))
        yield slice(*x.cu_q[b : b + 2]), slice(*x.cu_k[b : b + 2]), b, mask


@contextmanager
def _on_hopper(device: str) -> Iterator[None]:
    """Makes calls run Hopper's kernels, emulated without a GPU."""
    with ExitStack() as stack:
        if device == "cpu":

            def replace(of: object, name: str, value: object) -> None:
                stack.enter_context(mock.patch.object(of, name, value))

            emulate(fa_kernels, replace=replace)
        yield


def outputs(only: str = "") -> dict[str, dict[str, object]]:
    """Digests of all outputs by case and name, for cases whose keys contain ``only``."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, dict[str, object]] = {}
    for case in cases(_SCALE if device == "cuda" else 1):
        assert case.key not in found, case.key
        if only not in case.key:
            continue
        x = Inputs(case, device)
        with _on_hopper(device) if case.hopper else nullcontext():
            got = answer(x)
        # In one pass the kernel of dk and dv computes dq, if it runs.
        is_summed = case.one_pass and device == "cuda" and case.needs != "q"
        found[case.key] = {
            name: _is_within_bound(x, y) if is_summed and name == "dq" else digest(y)
            for name, y in got.items()
        }
    return found
