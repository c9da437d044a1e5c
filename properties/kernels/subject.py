"""The subject under test: a callable with its declarations."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fa_verify.oracles.calls.cache import OF_INPUTS
from fa_verify.oracles.calls.quantised import QUANTISED_DTYPES
from fa_verify.oracles.declaration import declarations_of
from fa_verify.oracles.formats.writing import Writing
from fa_verify.oracles.guarantee import GUARANTEES, guarantee_of
from fa_verify.oracles.outputs import OUTPUTS, Numerics
from fa_verify.oracles.problem import Problem
from fa_verify.properties.kernels.declarations import Declarations
from fa_verify.properties.kernels.declared import (
    NUMERICS,
    WORDS,
    check_declarations,
    declared_by,
    narrowings,
    unknown_word,
)
from fa_verify.properties.kernels.packing import OF_VARLEN, PACKED, called_packed
from fa_verify.properties.kernels.refusals import ExcludedCallError
from fa_verify.properties.kernels.tutorial_call import takes, tutorial_call
from fa_verify.properties.kernels.vocabulary import SAME_BITS, score_mods_of

__all__ = ["Subject"]

# Declarations of a kernel that takes codes with scales alone.
OF_CODES: dict[str, Any] = {"dtypes": QUANTISED_DTYPES, "backward": False}


@dataclass(frozen=True)
class Subject(Declarations):
    """A callable ``f(q, k, v, *, mask, sm_scale)`` and its declarations.

    The fields of ``Declarations`` are documented in docs/declarations.md.

    Args:
        name: Name of the subject in messages.
        call: The kernel. Returns out, or (out, lse), differentiable by autograd. With several
            ``configs`` it also takes ``config=``, one of their names. Raises NotImplementedError
            for problems that it does not support.
        numerics: The declarations that determine the error bound.
        takes: The kernel's signature if it is that of Triton's tutorial and was adapted; else
            empty.
        source: Value of --fa-kernel, for replay lines; empty for the project's own kernels.
        assumed: Narrowings that a probe has found and the kernel does not declare, in words:
            "always causal". A run that holds for them ends in NOT VERIFIED.
    """

    name: str
    call: Callable[..., Any]
    numerics: Numerics = field(default_factory=Numerics)
    takes: str = ""
    source: str = ""
    assumed: tuple[str, ...] = ()

    @classmethod
    def of(cls, call: Callable[..., Any], name: str) -> Subject:
        """Create a subject from a callable and the declarations among its attributes.

        A kernel with the signature of Triton's tutorial, ``attention(q, k, v, causal, sm_scale)``,
        is adapted. Inputs that this signature cannot express count as declared unsupported.

        Raises:
            ValueError: A declaration is unknown or has an invalid value. The message names the
                declaration, the value and the allowed values.
        """
        tutorial = tutorial_call(call)
        declared = declared_by(tutorial.owner if tutorial else call, name)
        check_declarations(name, declared)
        if declared.get("varlen"):
            declared = {**OF_VARLEN, **declared}
        if tutorial:
            call, declared = tutorial, tutorial.declarations(name, declared)
            declared["takes"] = tutorial.signature
        if declared.get("states") is True:
            declared["states"] = call
        if declared.get("quantised") is True:
            declared = {**OF_CODES, **declared, "quantised": call}
        if "cache" in declared:
            declared.setdefault("kvcache", call)
        numerics = {word: declared.pop(word) for word in NUMERICS if word in declared}
        return cls(name=name, call=call, numerics=Numerics(**numerics), **declared)

    def assuming(self, declared: Mapping[str, Any]) -> Subject:
        """Return the subject with declarations by word, in place of its own, as ``assumed``.

        Raises:
            ValueError: A declaration is unknown or has an invalid value.
        """
        if not isinstance(declared, Mapping):
            raise ValueError(f"declarations are {declared!r}; needs a dict by word")
        words = dict(declared)
        for word in words:
            if word not in WORDS:
                raise unknown_word(self.name, word)
        check_declarations(self.name, words)
        assumed = (*self.assumed, *narrowings(words))
        numerics = {word: words.pop(word) for word in NUMERICS if word in words}
        of_numerics = dataclasses.replace(self.numerics, **numerics)
        return dataclasses.replace(self, numerics=of_numerics, assumed=assumed, **words)

    def promises(self, guarantee: str, config: str) -> tuple[str, ...]:
        """Return the outputs for which a guarantee is promised bitwise in a configuration.

        Outputs summed by atomics are excluded, as the order of their additions varies. Checks that
        compare runs with the same strides are promised with G10, those that change strides with G8:
        see ``Guarantee.promise``. I1 to I6 are promised by ``same_bits``.
        """
        replaced = self.configs.get(config, {})
        of_parts = [SAME_BITS[word] for word in replaced.get("same_bits", self.same_bits)]
        if GUARANTEES[guarantee_of(guarantee)].promise not in (*self.bitwise, *of_parts):
            return ()
        atomic = replaced.get("atomic", self.numerics.atomic)
        return tuple(name for name in OUTPUTS if name not in atomic)

    def declarations(self) -> dict[str, Any]:
        """Return the declarations that differ from their defaults, as plain values by name."""
        found: dict[str, Any] = {}
        if self.takes:
            found["takes"] = self.takes
        for item in dataclasses.fields(Declarations):
            value, default = getattr(self, item.name), item.default
            if item.name == "configs":
                default = {"default": {}}
            if not callable(value) and value != default:
                found[item.name] = value.record() if isinstance(value, Writing) else value
        for word in NUMERICS:
            value = getattr(self.numerics, word)
            if value != getattr(Numerics(), word):
                found[word] = value
        if self.merges_alone:
            found["states"] = True
        if self.reads_caches_alone:
            found["cache"] = self.cache
        if self.quantised_alone:
            found["quantised"] = True
        return found

    def declared(self) -> str:
        """Format ``declarations`` in one line; "nothing" if all have their defaults."""
        parts = [
            f"configs={', '.join(map(self._of_config, value))}"
            if word == "configs"
            else f"{word}={value!r}"
            for word, value in self.declarations().items()
        ]
        return ", ".join(parts) or "nothing"

    def _of_config(self, config: str) -> str:
        """Format a configuration's name with the declarations that it replaces."""
        replaced = ", ".join(f"{word}={value!r}" for word, value in self.configs[config].items())
        return f"{config} ({replaced})" if replaced else config

    def numerics_of(self, problem: Problem) -> Numerics:
        """Return the numerics of a problem's configuration.

        A softmax sum that runs tile by tile gets the width of the declared ``tiles``, unless
        ``l_tile`` is declared.
        """
        replaced = {k: v for k, v in self.configs.get(problem.config, {}).items() if k in NUMERICS}
        numerics = dataclasses.replace(self.numerics, **replaced)
        if numerics.l_order == "tile" and not numerics.l_tile and self.tiles:
            numerics = dataclasses.replace(numerics, l_tile=self.tiles(problem)[1])
        return numerics

    def tile_of(self, problem: Problem) -> tuple[int, int]:
        """Return (block_m, block_n) of the forward; (16, 16) if unknown."""
        return self.tiles(problem) if self.tiles else (16, 16)

    def excludes(self, problem: Problem) -> str | None:
        """Return the declaration that excludes a problem as a sentence; None if it is supported."""
        if problem.config not in self.configs:  # it has no dtypes
            return f"{self.name} declares configs {[*self.configs]}"
        for word, known in declarations_of(Declarations):
            if known.admits and not known.admits(self, problem):
                value = self.dtypes_of(problem.config) if word == "dtypes" else getattr(self, word)
                return f"{self.name} declares {word} {value!r}"
        return None

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        problem: Problem,
        **tensors: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Call the kernel and convert its result to this project's conventions.

        Args:
            q: Queries (B, H, M, D).
            k: Keys (B, Hk, N, D).
            v: Values (B, Hk, N, Dv).
            problem: The problem.
            tensors: Further keyword arguments of the call. Those that are None are not passed.

        Returns:
            (out, lse) with shapes (B, H, M, Dv) and (B, H, M). lse is natural and -inf on rows
            without a visible key; None if the subject does not return it.

        Raises:
            NotImplementedError: The subject refuses the problem, or its declarations exclude it.
            AssertionError: The kernel does not return out or (out, lse) as tensors.
        """
        reason = self.excludes(problem)
        if reason is not None:
            raise ExcludedCallError(reason)
        if self.merges_alone:
            raise ExcludedCallError(f"{self.name} declares states True: it computes no attention")
        if self.reads_caches_alone:
            raise ExcludedCallError(f"{self.name} declares cache: it takes no padded tensors")
        if self.quantised_alone:
            raise ExcludedCallError(f"{self.name} declares quantised True: it takes codes alone")
        mods: dict[str, Any] = {name: x for name, x in tensors.items() if x is not None}
        if problem.softcap is not None:
            mods["softcap"] = problem.softcap
        call = functools.partial(self.call, **self._asked(problem), **mods)
        if self.varlen:
            result = called_packed(call, self.name, q, k, v, problem.mask)
        else:
            result = call(q, k, v)
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
        """Return the pooled probabilities, (B, H, blocks of rows, blocks of keys).

        Raises:
            NotImplementedError: The subject has no ``pooled``, it refuses the problem, its
                declarations exclude it, or the problem modifies scores.
            AssertionError: ``pooled`` does not return a tensor.
        """
        if self.pooled is None:
            raise ExcludedCallError(f"{self.name} declares no pooled")
        if reason := self.excludes(problem):
            raise ExcludedCallError(reason)
        if score_mods_of(problem):
            raise ExcludedCallError("pooled probabilities do not support score modifications")
        found: object = self.pooled(q, k, v, pool=pool, pool_size=size, **self._asked(problem))
        if not isinstance(found, torch.Tensor):
            raise AssertionError(
                f"{self.name} returns {type(found).__name__} as pooled; needs a tensor"
            )
        return found

    @property
    def merges_alone(self) -> bool:
        """Whether the kernel merges attention states and computes no attention."""
        return self.states is not None and self.states is self.call

    def run_states(
        self, outs: torch.Tensor, lses: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge states, whose lses are in the subject's own convention, as the result is.

        Raises:
            NotImplementedError: The subject has no ``states``, or it refuses the call.
            AssertionError: ``states`` does not return two tensors.
        """
        if self.states is None:
            raise ExcludedCallError(f"{self.name} declares no states")
        return self._pair(self.states(outs, lses))

    @property
    def reads_caches_alone(self) -> bool:
        """Whether the kernel attends to caches and takes no padded tensors."""
        return self.kvcache is not None and self.kvcache is self.call

    @property
    def masks_caches(self) -> bool:
        """Whether a call with a cache takes masks with a predicate, as ``mask``."""
        return self.kvcache is not None and "custom" in self.masks and takes(self.kvcache, "mask")

    @property
    def cache_keywords(self) -> tuple[str, ...]:
        """The keyword arguments of a call with a cache by name, without score modifications."""
        return (
            "cache_seqlens",
            *(("page_table",) if "paged" in self.cache else ()),
            *(("cache_batch_idx",) if "contiguous" in self.cache else ()),
            *(("k", "v") if "append" in self.cache else ()),
            *(("k_scale", "v_scale") if self.cache_formats != (OF_INPUTS,) else ()),
            *(("causal",) if "causal" in self.masks and not self.always_causal else ()),
            *(("window_size",) if "window" in self.masks else ()),
            *(("sm_scale",) if self.fixed_scale is None else ()),
            *(("config",) if len(self.configs) > 1 else ()),
        )

    def excludes_cache(self, problem: Problem, page_size: int, *, appends: bool) -> str | None:
        """Return the declaration that excludes a call with a cache; None if none does.

        Args:
            problem: The attention of the call, with the keys of each entry after it.
            page_size: Rows of a page; 0 for a contiguous cache.
            appends: Whether the call has new keys.
        """
        sizes = self.page_sizes
        for word, holds in (
            ("no kvcache", self.kvcache is not None),
            (f"cache {self.cache}", ("paged" if page_size else "contiguous") in self.cache),
            (f"cache {self.cache}", "append" in self.cache or not appends),
            (f"page_sizes {sizes}", not page_size or sizes is None or page_size in sizes),
            ("zero_sizes False", self.zero_sizes or 0 not in (problem.mask.seqlens_k or ())),
        ):
            if not holds:
                return f"{self.name} declares {word}"
        # A cache has lengths, whatever masks of padded tensors the subject takes.
        padded = dataclasses.replace(self, masks=(*self.masks, "padding"))
        reason = padded.excludes(problem)
        return reason and reason.replace(f"masks {padded.masks}", f"masks {self.masks}")

    def excludes_format(self, stored: str, scales: str, *, divides: bool) -> str | None:
        """Return the declaration that excludes a format of a cache; None if none does.

        Args:
            stored: One of ``CACHE_FORMATS``.
            scales: One of ``SCALES``, which a cache of the dtype of q has none of.
            divides: Whether scales divide.
        """
        of_codes = stored != OF_INPUTS
        for word, holds in (
            (f"cache_formats {self.cache_formats}", stored in self.cache_formats),
            (f"cache_scales {self.cache_scales}", not of_codes or scales in self.cache_scales),
            (f"scale_divides {self.scale_divides}", not of_codes or divides == self.scale_divides),
        ):
            if not holds:
                return f"{self.name} declares {word}"
        return None

    def run_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        problem: Problem,
        **tensors: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to a cache, and convert the result to this project's conventions.

        Args:
            q: Queries (B, H, M, D).
            k_cache: (pages, page_size, Hk, D), or (entries, S, Hk, D).
            v_cache: As ``k_cache``, with Dv columns.
            problem: The attention of the call, with the keys of each entry after it.
            tensors: ``cache_seqlens``, ``page_table``, ``cache_batch_idx``, ``k``, ``v``,
                ``alibi_slopes``, ``sinks``, ``k_scale`` and ``v_scale``, or None; see
                ``CacheInputs``.

        Returns:
            (out, lse) as from ``run``.

        Raises:
            NotImplementedError: The subject has no ``kvcache``, it refuses the call, or its
                declarations exclude it.
            AssertionError: ``kvcache`` does not return out or (out, lse) as tensors.
        """
        if self.kvcache is None:
            raise ExcludedCallError(f"{self.name} declares no kvcache")
        page_size = 0 if tensors["page_table"] is None else k_cache.shape[1]
        if reason := self.excludes_cache(problem, page_size, appends=tensors["k"] is not None):
            raise ExcludedCallError(reason)
        mask = problem.mask
        given = {
            **tensors,
            "mask": mask,
            "causal": mask.causal,
            "window_size": (mask.window_left, mask.window_right),
            "sm_scale": problem.scale,
            "config": problem.config,
        }
        optional = ("k", "v", "alibi_slopes", "sinks", "k_scale", "v_scale")
        words = [x for x in self.cache_keywords if x not in optional]
        if not mask.is_plain:
            if not self.masks_caches:
                raise ExcludedCallError(f"{self.name} takes no mask in a call with a cache")
            words = [x for x in words if x not in ("causal", "window_size")] + ["mask"]
        mods = {name: given[name] for name in optional if given.get(name) is not None}
        if problem.softcap is not None:
            mods["softcap"] = problem.softcap
        found: object = self.kvcache(
            q, k_cache, v_cache, **{word: given[word] for word in words}, **mods
        )
        out, lse = (found, None) if isinstance(found, torch.Tensor) else self._pair(found)
        return out, None if lse is None else self._natural(lse, problem)

    @property
    def quantised_alone(self) -> bool:
        """Whether the kernel takes codes with scales alone."""
        return self.quantised is not None and self.quantised is self.call

    @property
    def attends(self) -> bool:
        """Whether the kernel takes padded tensors of 16 bits and more."""
        return not (self.merges_alone or self.reads_caches_alone or self.quantised_alone)

    @property
    def quantised_keywords(self) -> tuple[str, ...]:
        """The keyword arguments of a call with codes by name."""
        words = self.keywords if self.quantised_alone else ("mask", "sm_scale")
        return (*words, "out_dtype")

    def run_quantised(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_scale: torch.Tensor,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor | None,
        *,
        problem: Problem,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to codes with scales, and convert the result to this project's conventions.

        Args:
            q: Codes (B, H, M, D).
            k: Codes (B, Hk, N, D).
            v: Codes (B, Hk, N, Dv), or numbers of ``out_dtype``.
            q_scale: See ``QuantisedInputs``, as the next two.
            k_scale: The same.
            v_scale: The same, or None.
            problem: The attention.
            out_dtype: The dtype of out.

        Returns:
            (out, lse) as from ``run``.

        Raises:
            NotImplementedError: The subject has no ``quantised``, or it refuses the call.
            AssertionError: ``quantised`` does not return out or (out, lse) as tensors.
        """
        if self.quantised is None:
            raise ExcludedCallError(f"{self.name} declares no quantised")
        given = {**self._asked(problem), "mask": problem.mask, "sm_scale": problem.scale}
        given["out_dtype"] = out_dtype
        words = {word: given[word] for word in self.quantised_keywords if word in given}
        found: object = self.quantised(q, k, v, q_scale, k_scale, v_scale, **words)
        out, lse = (found, None) if isinstance(found, torch.Tensor) else self._pair(found)
        return out, None if lse is None else self._natural(lse, problem)

    def _pair(self, found: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a pair of tensors, (out, lse), that a function of the subject has returned.

        Raises:
            AssertionError: It is no such pair.
        """
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise AssertionError(f"{self.name} returns {type(found).__name__}; needs (out, lse)")
        for what, x in zip(("out", "lse"), found, strict=True):
            if not isinstance(x, torch.Tensor):
                raise AssertionError(
                    f"{self.name} returns {type(x).__name__} as {what}; needs a tensor"
                )
        return found[0], found[1]

    def _asked(self, problem: Problem) -> dict[str, Any]:
        """Return the keyword arguments of a call, except those of packed sequences."""
        given = {"mask": problem.mask, "sm_scale": problem.scale, "config": problem.config}
        return {word: given[word] for word in self.keywords if word in given}

    @property
    def keywords(self) -> tuple[str, ...]:
        """The names of the keyword arguments of a call without score modifications.

        ``mask`` is among them, unless the declarations leave one mask and the call takes none.
        """
        has_one_mask = self.masks == (("causal",) if self.always_causal else ())
        return (
            *(() if has_one_mask and not takes(self.call, "mask") else ("mask",)),
            *(("sm_scale",) if self.fixed_scale is None else ()),
            *(("config",) if len(self.configs) > 1 else ()),
            *(PACKED if self.varlen else ()),
        )

    def _natural(self, lse: torch.Tensor, problem: Problem) -> torch.Tensor:
        """Convert lse to a natural logarithm that is -inf on rows without a visible key.

        Empty rows whose value is not the declared ``empty_lse`` are not converted, so that a check
        finds them. An lse of the wrong shape is returned unchanged.
        """
        if self.lse_base == "2":
            lse = (lse.to(torch.float64) * math.log(2)).to(lse.dtype)
        sizes = problem.B, problem.H, problem.M, problem.N
        if self.empty_lse != "-inf" and lse.shape == sizes[:3]:
            empty = ~problem.mask.dense(*sizes, device=lse.device).any(3)
            lse = torch.where(empty & (lse == float(self.empty_lse)), -math.inf, lse)
        return lse
