"""What is under test: a callable, and what it declares of its domain, conventions and numerics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fa_verify.oracles.outputs import OUTPUTS, Numerics
from fa_verify.oracles.problem import DTYPES, Problem
from fa_verify.properties.inputs.alibi_families import NO_ALIBI
from fa_verify.properties.inputs.bias_families import NO_BIAS
from fa_verify.properties.inputs.dlse_families import NO_DLSE
from fa_verify.properties.subjects.declarations import (
    BITWISE,
    NUMERICS,
    SCORE_MODS,
    check_declarations,
    declared_by,
)
from fa_verify.properties.subjects.tutorial_call import tutorial_call

__all__ = ["BITWISE", "Subject", "score_mods_of"]

_PROMISED_WITH = {"G3": "G10", "G7": "G10", "G12": "G8", "G13": "G10"}


def score_mods_of(problem: Problem) -> tuple[str, ...]:
    """What a problem does to scores, out of ``declarations.SCORE_MODS``."""
    has = {
        "softcap": problem.softcap is not None,
        "alibi": problem.alibi != NO_ALIBI,
        "bias": problem.bias != NO_BIAS,
    }
    return tuple(mod for mod in SCORE_MODS if has[mod])


@dataclass(frozen=True)
class Subject:
    """A callable ``f(q, k, v, *, mask, sm_scale)`` and its declarations.

    Declarations are attributes of the callable, which ``attention_kernel`` sets and explains; the
    fields that are not listed here are such words.

    Args:
        name: What messages call it.
        call: Returns out, or (out, lse), differentiable by autograd. With several ``configs`` it
            also takes ``config=``, one of their names. What it cannot do it refuses with
            NotImplementedError.
        numerics: What chooses the error bound.
        takes: The signature, where it is the one of Triton's tutorial and was adapted; else empty.
        source: What --kernel was given, for replay lines; empty for the project's own kernels.
    """

    name: str
    call: Callable[..., Any]
    dtypes: tuple[str, ...] = DTYPES
    head_dims: tuple[int, ...] | None = None
    seqlen_multiple: int = 1
    max_seqlen: int | None = None
    gqa: bool = True
    m_ne_n: bool = True
    dv_ne_d: bool = True
    zero_sizes: bool = True
    masks: tuple[str, ...] = ("causal", "window", "padding", "custom")
    layouts: tuple[str, ...] | None = None
    dirty: tuple[str, ...] | None = None
    backward: bool = True
    devices: tuple[str, ...] = ("cpu", "cuda")
    returns_lse: bool | None = None
    lse_grad: bool = False
    lse_base: str = "e"
    empty_lse: str | int = "-inf"
    causal_alignment: str = "bottom-right"
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"default": {}})
    bitwise: tuple[str, ...] = ()
    numerics: Numerics = field(default_factory=Numerics)
    tiles: Callable[[Problem], tuple[int, int]] | None = None
    pooled: Callable[..., torch.Tensor] | None = None
    takes: str = ""
    source: str = ""
    score_mods: tuple[str, ...] = ()

    @classmethod
    def of(cls, call: Callable[..., Any], name: str) -> Subject:
        """Reads the declarations off a callable.

        One that is called as Triton's tutorial calls its kernel, ``attention(q, k, v, causal,
        sm_scale)``, is adapted; what that signature cannot say counts as declared away.

        Raises:
            ValueError: A declaration is unknown, or has a value that it cannot have; the message
                names it, what was given and what there is.
        """
        tutorial = tutorial_call(call)
        declared = declared_by(tutorial.owner if tutorial else call, name)
        check_declarations(name, declared)
        if tutorial:
            call, declared = tutorial, tutorial.declarations(name, declared)
            declared["takes"] = tutorial.signature
        numerics = {word: declared.pop(word) for word in NUMERICS if word in declared}
        return cls(name=name, call=call, numerics=Numerics(**numerics), **declared)

    def promises(self, guarantee: str, config: str) -> tuple[str, ...]:
        """The outputs of which a guarantee is promised to the bit, in a configuration.

        What is summed by atomics has an order of chance, and is held to the bound. G3, G7 and G13
        compare runs on the same strides, so they are as sharp as the promise to repeat; G12 moves
        elements apart, as G8 does.
        """
        if _PROMISED_WITH.get(guarantee, guarantee) not in self.bitwise:
            return ()
        atomic = self.configs.get(config, {}).get("atomic", self.numerics.atomic)
        return tuple(name for name in OUTPUTS if name not in atomic)

    def declarations(self) -> dict[str, Any]:
        """What differs from saying nothing, by word: strings, numbers, tuples and dicts."""
        found: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name in ("name", "call", "tiles", "pooled", "numerics", "source"):
                continue
            default: Any = {"default": {}} if item.name == "configs" else item.default
            if value != default:
                found[item.name] = value
        for word in NUMERICS:
            value = getattr(self.numerics, word)
            if value != getattr(Numerics(), word):
                found[word] = value
        return found

    def declared(self) -> str:
        """``declarations`` in one line: each of them widens something."""
        parts = [
            f"configs={', '.join(map(self._of_config, value))}"
            if word == "configs"
            else f"{word}={value!r}"
            for word, value in self.declarations().items()
        ]
        return ", ".join(parts) or "nothing"

    def _of_config(self, config: str) -> str:
        """A configuration's name, with what it replaces."""
        replaced = ", ".join(f"{word}={value!r}" for word, value in self.configs[config].items())
        return f"{config} ({replaced})" if replaced else config

    def numerics_of(self, problem: Problem) -> Numerics:
        """The numerics that hold for a problem's configuration."""
        replaced = {k: v for k, v in self.configs.get(problem.config, {}).items() if k in NUMERICS}
        return dataclasses.replace(self.numerics, **replaced)

    def tile_of(self, problem: Problem) -> tuple[int, int]:
        """(block_m, block_n) of the forward; 16 x 16 where unknown."""
        return self.tiles(problem) if self.tiles else (16, 16)

    def excludes(self, problem: Problem) -> str | None:
        """The declaration that excludes a problem, as a sentence; None where it is supported."""
        M, N, mask = problem.M, problem.N, problem.mask
        dtypes = self.configs.get(problem.config, {}).get("dtypes", self.dtypes)
        rows, keys = mask.lengths(problem.B, M, N)
        positional = (mask.right, mask.window_left) != (None, None) or not mask.is_plain
        windowed = (mask.window_left, mask.window_right) != (None, None)
        padded = (mask.seqlens_q, mask.seqlens_k) != (None, None)
        multiple, most = self.seqlen_multiple, self.max_seqlen
        dims, alignment, layouts = self.head_dims, self.causal_alignment, self.layouts
        clean = self.dirty is None or problem.dirty in self.dirty
        aligned = alignment == "bottom-right" or not positional or rows == keys
        for word, holds in (
            (f"configs {[*self.configs]}", problem.config in self.configs),
            (f"dtypes {dtypes}", problem.dtype in dtypes),
            (f"head_dims {dims}", dims is None or {problem.D, problem.Dv} <= set(dims)),
            (f"seqlen_multiple {multiple}", M % multiple == 0 == N % multiple),
            (f"max_seqlen {most}", most is None or max(M, N) <= most),
            ("gqa False", self.gqa or problem.G == 1),
            ("m_ne_n False", self.m_ne_n or M == N),
            ("dv_ne_d False", self.dv_ne_d or problem.D == problem.Dv),
            ("zero_sizes False", self.zero_sizes or 0 not in (problem.B, M, N)),
            (f"masks {self.masks}", "causal" in self.masks or not mask.causal),
            (f"masks {self.masks}", "window" in self.masks or not windowed),
            (f"masks {self.masks}", "padding" in self.masks or not padded),
            (f"masks {self.masks}", "custom" in self.masks or mask.is_plain),
            (f"layouts {layouts}", layouts is None or {*problem.layouts} <= {*layouts}),
            (f"dirty {self.dirty}", clean or not padded),
            ("lse_grad False", self.lse_grad or problem.dlse == NO_DLSE),
            (f"devices {self.devices}", problem.device in self.devices),
            (f"score_mods {self.score_mods}", {*score_mods_of(problem)} <= {*self.score_mods}),
            (f"causal_alignment {alignment!r}", aligned),
        ):
            if not holds:
                return f"{self.name} declares {word}"
        return None

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        problem: Problem,
        **tensors: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse) in this project's conventions; lse is None where the subject returns none.

        ``tensors`` are what else the call takes by name, but for those that are None.

        Raises:
            NotImplementedError: The subject refuses the problem, or its declarations do.
            AssertionError: It returns something else than it should.
        """
        reason = self.excludes(problem)
        if reason is not None:
            raise NotImplementedError(reason)
        mods: dict[str, Any] = {name: x for name, x in tensors.items() if x is not None}
        if problem.softcap is not None:
            mods["softcap"] = problem.softcap
        result = self.call(q, k, v, **self._asked(problem), **mods)
        pair = isinstance(result, tuple | list)
        if pair and len(result) != 2:
            raise AssertionError(
                f"{self.name} returns {len(result)} values; needs to return out, or (out, lse)"
            )
        out, lse = result if pair else (result, None)
        if self.returns_lse not in (None, lse is not None):
            returned = "no lse" if lse is None else "one"
            raise AssertionError(
                f"{self.name} declares returns_lse={self.returns_lse} and returns {returned}"
            )
        for what, x in (("out", out), ("lse", lse)):
            if not isinstance(x, torch.Tensor) and not (what == "lse" and x is None):
                raise AssertionError(
                    f"{self.name} returns {type(x).__name__} as {what}; needs a tensor"
                )
        return out, None if lse is None else self._natural(lse, problem)

    def run_pooled(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        problem: Problem,
        pool: str,
        size: tuple[int, int],
    ) -> torch.Tensor:
        """The pooled probabilities.

        Raises:
            NotImplementedError: The subject refuses the problem, or its declarations do, or the
                problem modifies scores.
            AssertionError: It returns something else than a tensor.
        """
        if self.pooled is None:
            raise NotImplementedError(f"{self.name} declares no pooled")
        if reason := self.excludes(problem):
            raise NotImplementedError(reason)
        if score_mods_of(problem):
            raise NotImplementedError("pooled probabilities are of scores that nothing modifies")
        found: object = self.pooled(q, k, v, pool=pool, pool_size=size, **self._asked(problem))
        if not isinstance(found, torch.Tensor):
            raise AssertionError(
                f"{self.name} returns {type(found).__name__} as pooled; needs a tensor"
            )
        return found

    def _asked(self, problem: Problem) -> dict[str, Any]:
        """The keywords of a call."""
        config = {"config": problem.config} if len(self.configs) > 1 else {}
        return dict(mask=problem.mask, sm_scale=problem.scale, **config)

    def _natural(self, lse: torch.Tensor, problem: Problem) -> torch.Tensor:
        """Lse as a natural logarithm that is -inf on rows without a visible key.

        A row that does not hold what was declared for such rows stays as it is, to be found; so
        does an lse of the wrong shape.
        """
        if self.lse_base == "2":
            lse = (lse.to(torch.float64) * math.log(2)).to(lse.dtype)
        sizes = problem.B, problem.H, problem.M, problem.N
        if self.empty_lse != "-inf" and lse.shape == sizes[:3]:
            empty = ~problem.mask.dense(*sizes, device=lse.device).any(3)
            lse = torch.where(empty & (lse == float(self.empty_lse)), -math.inf, lse)
        return lse
