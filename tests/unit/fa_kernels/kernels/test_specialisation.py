"""Parameters that the decorator of kernels keeps Triton from specialising a compilation on."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from fa_kernels.kernels.common.jit import kernel  # noqa: E402


# The annotations of this module are postponed: Python keeps them as strings.
def copy(from_ptr, to_ptr, length, BLOCK: tl.constexpr):
    """Copies ``length`` elements."""
    at = tl.arange(0, BLOCK)
    tl.store(to_ptr + at, tl.load(from_ptr + at, mask=at < length), mask=at < length)


def test_a_constant_is_one_where_annotations_are_postponed(monkeypatch):
    """Triton refuses to compile a kernel that does not specialise on its constants."""
    monkeypatch.setattr(triton, "jit", lambda fn, **options: options)
    assert kernel(copy) == {
        "do_not_specialize": ["length"],
        "do_not_specialize_on_alignment": ["from_ptr", "to_ptr"],
    }
