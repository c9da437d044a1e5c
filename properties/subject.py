"""What is under test: a callable, and what it declares of its domain and its numerics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from oracles.outputs import Numerics
from oracles.problem import DTYPES, LAYOUTS, Problem
from properties.strategies import MASK_KINDS

__all__ = ["BITWISE", "Subject"]

BITWISE = ("G4", "G5", "G8", "G9", "G10")
_NUMERICS = tuple(item.name for item in dataclasses.fields(Numerics))


@dataclass(frozen=True)
class Subject:
    """A callable ``f(q, k, v, *, mask, sm_scale)`` and its declarations.

    Declarations are attributes of the callable; what is not declared is: any domain, the default
    numerics, one configuration, no promise to the bit.

    Args:
        name: What messages call it.
        call: Returns out, or (out, lse), differentiable by autograd. With ``configs`` it also takes
            ``config=``, one of their names.
        dtypes: Supported dtypes, out of DTYPES.
        masks: Supported kinds of masks, out of MASK_KINDS.
        layouts: Supported layouts, out of LAYOUTS.
        returns_lse: Whether it returns (out, lse).
        configs: Names of tile configurations; each maps to declarations that replace the general
            ones for it: "dtypes", or fields of Numerics.
        bitwise: Guarantees out of BITWISE that it promises to the bit.
        numerics: What chooses the error bound.
        tiles: (problem) -> (block_m, block_n) of the forward, for reports; None where unknown.
    """

    name: str
    call: Callable[..., Any]
    dtypes: tuple[str, ...] = DTYPES
    masks: tuple[str, ...] = MASK_KINDS
    layouts: tuple[str, ...] = LAYOUTS
    returns_lse: bool = False
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"default": {}})
    bitwise: tuple[str, ...] = ()
    numerics: Numerics = field(default_factory=Numerics)
    tiles: Callable[[Problem], tuple[int, int]] | None = None

    @classmethod
    def of(cls, call: Callable[..., Any], name: str) -> Subject:
        """Reads the declarations off a callable.

        Raises:
            ValueError: A declaration has an unknown word in it.
        """
        declared: dict[str, Any] = {
            item.name: getattr(call, item.name)
            for item in dataclasses.fields(cls)
            if item.name not in ("name", "call", "numerics") and hasattr(call, item.name)
        }
        for attribute, known in (
            ("dtypes", DTYPES),
            ("masks", MASK_KINDS),
            ("layouts", LAYOUTS),
            ("bitwise", BITWISE),
        ):
            given = declared.get(attribute, ())
            unknown = [word for word in given if word not in known]
            if unknown:
                raise ValueError(f"{name}.{attribute} has {unknown}; known are {known}")
        numerics = {word: getattr(call, word) for word in _NUMERICS if hasattr(call, word)}
        subject = cls(name=name, call=call, numerics=Numerics(**numerics), **declared)
        for config, replaced in subject.configs.items():
            unknown = [word for word in replaced if word not in ("dtypes", *_NUMERICS)]
            if unknown:
                raise ValueError(f"{name}.configs[{config!r}] has {unknown}; known are {_NUMERICS}")
        return subject

    def numerics_of(self, problem: Problem) -> Numerics:
        """The numerics that hold for a problem's configuration."""
        replaced = {k: v for k, v in self.configs.get(problem.config, {}).items() if k in _NUMERICS}
        return dataclasses.replace(self.numerics, **replaced)

    def tile_of(self, problem: Problem) -> tuple[int, int]:
        """(block_m, block_n) of the forward; 16 x 16 where unknown."""
        return self.tiles(problem) if self.tiles else (16, 16)

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse), lse None where the subject does not return it.

        Raises:
            NotImplementedError: The subject refuses the problem.
        """
        if problem.config not in self.configs:
            raise NotImplementedError(
                f"{self.name} has no configuration {problem.config!r}; it has {[*self.configs]}"
            )
        config = {"config": problem.config} if len(self.configs) > 1 else {}
        result = self.call(q, k, v, mask=problem.mask, sm_scale=problem.scale, **config)
        if self.returns_lse:
            out, lse = result
            return out, lse
        return result, None
