"""Kernels with the signature of Triton's tutorial, ``attention(q, k, v, causal, sm_scale)``.

``causal`` is the only mask. The tensors are contiguous and have one shape.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["TutorialCall", "takes", "tutorial_call"]

# Declarations of these kernels, which their own declarations override. Row m is at position m: for
# M != N this is not the bottom-right causal mask of this project.
_DECLARED = {
    "masks": ("causal",),
    "causal_alignment": "top-left",
    "m_ne_n": False,
    "gqa": False,
    "dv_ne_d": False,
    "zero_sizes": False,
    "layouts": ("bhsd",),
}
# Names of the last two parameters.
_CAUSAL, _SCALES = ("causal", "is_causal"), ("sm_scale", "softmax_scale", "scale")
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_TENSORS = 3


@dataclass(frozen=True)
class TutorialCall:
    """Adapts a kernel with the tutorial's signature to the signature of a subject.

    Args:
        call: The kernel, which takes (q, k, v, causal, sm_scale), or sm_scale before causal, by
            position.
        owner: The object whose attributes are declarations: the callable, or the class behind
            ``_attention.apply``.
        signature: The kernel's signature as text.
        causal_first: Whether causal comes before sm_scale.
    """

    call: Callable[..., Any]
    owner: Any
    signature: str
    causal_first: bool

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: Any, sm_scale: float
    ) -> Any:
        """Call the kernel and return its result."""
        last = (mask.causal, sm_scale) if self.causal_first else (sm_scale, mask.causal)
        return self.call(q, k, v, *last)

    def declarations(self, name: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the declarations implied by the signature, overridden by the kernel's own.

        Raises:
            ValueError: The kernel declares masks or configurations that its signature does not
                accept.
        """
        declared = {**_DECLARED, **own}
        for word in ("fixed_scale", "varlen"):
            if own.get(word):
                given = f"{word}={own[word]!r}"
                raise ValueError(f"{name} declares {given}, but takes {self.signature}")
        more = [kind for kind in declared["masks"] if kind != "causal"]
        if more:
            raise ValueError(
                f"{name} declares masks {more}, but takes {self.signature}: causal is the only "
                "mask that this signature accepts"
            )
        if len(declared.get("configs", ())) > 1:
            raise ValueError(f"{name} declares configs, but takes {self.signature}: no config")
        return declared


def tutorial_call(call: Callable[..., Any]) -> TutorialCall | None:
    """Adapt a callable with the tutorial's signature; return None for other signatures.

    The signature is three tensors, then causal and sm_scale in either order, all by position, then
    any parameters with defaults. ``is_causal``, ``softmax_scale`` and ``scale`` are other names of
    the two. The ``apply`` of an autograd function has the signature of its
    ``forward``.
    """
    owner: Any = call
    try:
        function = getattr(call, "__self__", None)
        if inspect.isclass(function) and issubclass(function, torch.autograd.Function):
            owner, given = function, [*inspect.signature(function.forward).parameters.values()]
            if function.setup_context == torch.autograd.Function.setup_context:
                given = given[1:]  # ctx
        else:
            # The signature of the wrapper itself, which may adapt the function that it wraps.
            given = [*inspect.signature(call, follow_wrapped=False).parameters.values()]
    except (TypeError, ValueError):
        return None
    first, rest = given[: _TENSORS + 2], given[_TENSORS + 2 :]
    words = [parameter.name for parameter in first[_TENSORS:]]
    if not any(a in _CAUSAL and b in _SCALES for a, b in itertools.permutations(words, 2)):
        return None
    if any(x.kind not in _BY_POSITION for x in first) or any(_is_required(x) for x in rest):
        return None
    signature = str(inspect.Signature(given))
    return TutorialCall(call, owner, signature, words[0] in _CAUSAL)


def takes(call: Callable[..., Any], word: str) -> bool:
    """Return whether a callable takes a keyword argument; True if its signature is unknown."""
    try:
        given = inspect.signature(call, follow_wrapped=False).parameters
    except (TypeError, ValueError):
        return True
    variable = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in given.values())
    return variable or word in given


def _is_required(parameter: inspect.Parameter) -> bool:
    """Return whether a call must pass the parameter."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in variable
