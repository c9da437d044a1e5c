"""Kernels that are called as that of Triton's tutorial, ``attention(q, k, v, causal, sm_scale)``.

Its ``causal`` is the only mask, and it takes contiguous tensors of one shape.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["TutorialCall", "tutorial_call"]

# What such a kernel declares unless it says something else. Row m stands at position m; where M
# and N differ that is no causal mask of this project's.
_DECLARED = {
    "masks": ("causal",),
    "causal_alignment": "top-left",
    "m_ne_n": False,
    "gqa": False,
    "dv_ne_d": False,
    "zero_sizes": False,
    "layouts": ("bhsd",),
}
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_TENSORS = 3


@dataclass(frozen=True)
class TutorialCall:
    """A kernel of the tutorial's signature, called as a subject is.

    Args:
        call: Takes (q, k, v, causal, sm_scale), or sm_scale first, by position.
        owner: Whose attributes declare: the callable, or the class behind ``_attention.apply``.
        signature: Its own, as text.
        causal_first: Whether causal comes before sm_scale.
    """

    call: Callable[..., Any]
    owner: Any
    signature: str
    causal_first: bool

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: Any, sm_scale: float
    ) -> Any:
        """What the kernel returns."""
        last = (mask.causal, sm_scale) if self.causal_first else (sm_scale, mask.causal)
        return self.call(q, k, v, *last)

    def declarations(self, name: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """What the signature says, and over it what the kernel declares.

        Raises:
            ValueError: It declares masks, or configurations, that its signature cannot be given.
        """
        declared = {**_DECLARED, **own}
        more = [kind for kind in declared["masks"] if kind != "causal"]
        if more:
            raise ValueError(
                f"{name} declares masks {more}, but takes {self.signature}: causal is the only "
                "mask that it can be given"
            )
        if len(declared.get("configs", ())) > 1:
            raise ValueError(f"{name} declares configs, but takes {self.signature}: no config")
        return declared


def tutorial_call(call: Callable[..., Any]) -> TutorialCall | None:
    """The callable as a subject's, if its signature is the tutorial's; else None.

    That is: three tensors, then causal and sm_scale in either order, by position; whatever follows
    has defaults. The ``apply`` of an autograd function has the signature of its ``forward``.
    """
    owner: Any = call
    try:
        function = getattr(call, "__self__", None)
        if inspect.isclass(function) and issubclass(function, torch.autograd.Function):
            owner, given = function, [*inspect.signature(function.forward).parameters.values()]
            if function.setup_context == torch.autograd.Function.setup_context:
                given = given[1:]  # ctx
        else:
            # Of what is called, not of what it wraps and may adapt.
            given = [*inspect.signature(call, follow_wrapped=False).parameters.values()]
    except (TypeError, ValueError):
        return None
    first, rest = given[: _TENSORS + 2], given[_TENSORS + 2 :]
    words = [parameter.name for parameter in first[_TENSORS:]]
    if sorted(words) != ["causal", "sm_scale"]:
        return None
    if any(x.kind not in _BY_POSITION for x in first) or any(_is_required(x) for x in rest):
        return None
    signature = str(inspect.Signature(given))
    return TutorialCall(call, owner, signature, words[0] == "causal")


def _is_required(parameter: inspect.Parameter) -> bool:
    """Whether a call has to give it."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in variable
