"""The numerics of a kernel: the experiments in their order, and what they say together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from fa_verify.oracles.problem import Problem
from fa_verify.probing.answers import Answer, undecided
from fa_verify.probing.arithmetic import arithmetic_of
from fa_verify.probing.gradients import rounding_of_backward
from fa_verify.probing.picture import blocks, in_words
from fa_verify.probing.rounding import PRESCALES, rounding_of_forward
from fa_verify.probing.softcap_slope import slope_of_softcap
from fa_verify.probing.softmax_sum import order_of_softmax_sum
from fa_verify.probing.summation import AXES, Sum, leaves, order_of
from fa_verify.probing.tiles import tiles_of
from fa_verify.properties.kernels.subject import Subject

__all__ = ["numerics_of", "orders_of"]

# Keys or rows of a sum: several tiles of most kernels. The counts of a bf16 sum are exact to 256.
_TERMS = {"bf16": 256, "fp32": 256, "fp16": 128}
# Keys of a row whose tiles are sought. Tensor cores have tiles of 128.
_KEYS = 256
_OPERANDS = ("q_operand", "k_operand", "v_operand")
_CONVERSIONS = {
    "tf32, truncated": "truncate", "tf32, nearest": "nearest",
    "tf32, nearest_away": "nearest_away",
}  # fmt: skip
_OF_BACKWARD = ("dout_operand", "q_operand_of_dk", "k_operand_of_dq")


def numerics_of(subject: Subject, base: Problem, found: Mapping[str, Answer]) -> Iterator[Answer]:
    """Yield where a kernel rounds, its tiles and its splits.

    Args:
        subject: The kernel without its declarations.
        base: A problem that the kernel takes.
        found: The answers about its domain by word, to which those of this function are added.
    """
    limits = _Limits(base, found)
    scaled = limits.scaled(base, 0.3)
    yield from rounding_of_forward(subject, scaled, limits.dtypes)
    backward = _has_backward(base, found)
    if backward:
        exact = limits.scaled(base, 0.25)
        gqa = bool(found["gqa"].value)
        way: Any = found["prescaling"].value if "prescaling" in found else None
        for answer in rounding_of_backward(subject, scaled, exact, limits.dtypes, gqa, way):
            whole = answer.word == "p_dtype_of_dv" and answer.value == "fp32"
            if whole and found["p_dtype_of_out"].value != "fp32":
                # The unnormalised P is 1, which a cast leaves as it is.
                said = "equal weights show no cast before P is normalised"
                yield undecided(answer.word, said, answer.replay)
            else:
                yield answer
    if "prescaling" in found:
        yield _prescales(found)
    yield _p_dtype(found, backward)
    if backward and "fp32" in limits.dtypes and "softcap" in found["score_mods"].value:
        yield slope_of_softcap(subject, scaled)
    if "fp32" in limits.dtypes:
        yield _dots(found, backward)
        yield _tf32_conversion(found, backward)
    yield from _tiles(subject, limits, found)
    if "fp32" in limits.dtypes and base.M > 1 and not found["always_causal"].value:
        long = limits.long("fp32", "keys")
        yield order_of_softmax_sum(
            subject, limits.scaled(dataclasses.replace(long, M=long.N), 0.25)
        )
    widest = next((x for x in ("bf16", "fp32", "fp16") if x in limits.dtypes), None)
    if widest is not None:
        small = dataclasses.replace(base, dtype=widest)
        yield from arithmetic_of(subject, limits.long(widest, "keys"), small)


def orders_of(
    subject: Subject, base: Problem, found: Mapping[str, Answer]
) -> Iterator[Answer | Sum]:
    """Yield the orders of a kernel's sums; the arguments are those of ``numerics_of``."""
    for output in AXES if _has_backward(base, found) else ("out",):
        yield from _Limits(base, found).sums(subject, output)


def _has_backward(base: Problem, found: Mapping[str, Answer]) -> bool:
    """Return whether the experiments can read gradients: each row has to see the same keys."""
    return bool(found["backward"].value) and base.M > 1 and not found["always_causal"].value


@dataclasses.dataclass(frozen=True)
class _Limits:
    """The sizes that a kernel takes."""

    base: Problem
    found: Mapping[str, Answer]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that the kernel takes."""
        taken: tuple[str, ...] = self.found["dtypes"].value
        return taken

    def scaled(self, problem: Problem, scale: float) -> Problem:
        """Return a problem with a scale, unless the kernel ignores the scale."""
        found = self.found["fixed_scale"]
        follows = found.value is None and found.certainty == "shown"
        return dataclasses.replace(problem, sm_scale=scale) if follows else problem

    def long(self, dtype: str, axis: str, n: int | None = None) -> Problem:
        """Return a problem with several tiles along an axis."""
        n = _TERMS[dtype] if n is None else n
        dims = self.found["head_dims"].value
        D = 64 if dims is None or 64 in dims else self.base.D
        sizes = {"keys": {"N": n}, "rows": {"M": n}}[axis]
        # A causal diagonal that begins at the first key would hide the other keys.
        aligned = self.found.get("causal_alignment")
        hides = self.base.mask.causal and aligned is not None and aligned.value == "top-left"
        if (hides or not self.found["m_ne_n"].value) and self.base.M > 1:
            sizes = {"M": n, "N": n}
        problem = dataclasses.replace(self.base, dtype=dtype, D=D, Dv=D, **sizes)
        return problem

    def sums(self, subject: Subject, output: str) -> Iterator[Sum | Answer]:
        """Yield the order of a sum in each dtype, and its description."""
        narrow = next((x for x in ("bf16", "fp16") if x in self.dtypes), None)
        for dtype in (narrow, "fp32" if "fp32" in self.dtypes else None):
            if dtype is None:
                continue
            # Weights of the terms stay in the range of fp16.
            scale = 0.25 if dtype != "fp16" else 16.0
            problem = self.scaled(self.long(dtype, AXES[output]), scale)
            one = order_of(subject, problem, output)
            yield one
            word = f"order_of_{output}_{dtype}"
            if one.tree == ():
                yield undecided(word, one.why, one.replay)
                continue
            widths = [len(leaves(part)) for part in blocks(one.tree)]
            value = widths[0] if len({*widths}) == 1 else None
            said = in_words(one.tree, one.axis)
            if value is None:
                yield undecided(word, f"no equal blocks: {said}", one.replay)
            else:
                yield Answer(word, value, "shown", said, one.replay)


def _tiles(subject: Subject, limits: _Limits, found: Mapping[str, Answer]) -> Iterator[Answer]:
    narrow = next((x for x in ("bf16", "fp16") if x in limits.dtypes), None)
    way: Any = found["prescaling"].value if "prescaling" in found else None
    casts = narrow is not None and (found["p_dtype_of_out"].value, found["p_normalised"].value) == (
        "input", False
    )  # fmt: skip
    if narrow is None or way is None or not casts:
        why = "only 16-bit inputs, whose P is cast before it is normalised, show tiles"
        if narrow is not None and way is None:
            why = "prescaling is undecided"
        for word in ("block_n", "tile_order", "splits", "rescale_threshold"):
            yield undecided(word, why)
        return
    yield from tiles_of(subject, limits.scaled(limits.long(narrow, "keys", _KEYS), 0.3), way)


def _prescales(found: Mapping[str, Answer]) -> Answer:
    """Return the declaration prescales: the operands that either pass prescales."""
    words = ("prescaling", "prescaling_of_backward")
    answers = [found[word] for word in words if word in found]
    scaled = {one.word: PRESCALES[one.value][0] for one in answers if one.value is not None}
    letters = "".join(x for x in "qk" if any(x in of for of in scaled.values() if of != "none"))
    if letters:
        shown = [one for one in answers if scaled.get(one.word, "none") != "none"]
        said = "; ".join(f"{one.word}: {one.value}, {one.evidence}" for one in shown)
        return Answer("prescales", letters, "shown", said, shown[0].replay)
    unclear = [one for one in answers if one.value is None]
    if unclear:
        said = f"{unclear[0].word}: {unclear[0].evidence}"
        return undecided("prescales", said, unclear[0].replay)
    return Answer("prescales", "none", "shown", answers[-1].evidence, answers[-1].replay)


def _p_dtype(found: Mapping[str, Answer], backward: bool) -> Answer:
    """Return the declaration p_dtype: fp32 if neither P nor dS is cast anywhere."""
    words = ["p_dtype_of_out", *(["p_dtype_of_dv", "ds_dtype"] if backward else [])]
    answers = [found[word] for word in words if word in found]
    cast = [one for one in answers if one.value == "input"]
    if cast:
        said = f"{cast[0].word}: {cast[0].evidence}"
        return Answer("p_dtype", "input", "shown", said, cast[0].replay)
    if answers and all(one.value == "fp32" for one in answers):
        said = f"{' and '.join(words)} are fp32"
        return Answer("p_dtype", "fp32", "shown", said, answers[0].replay)
    unclear = [one for one in answers if one.value is None]
    said = f"{unclear[0].word}: {unclear[0].evidence}" if unclear else "no 16-bit inputs"
    return undecided("p_dtype", said, unclear[0].replay if unclear else "")


def _dots(found: Mapping[str, Answer], backward: bool) -> Answer:
    """Return the declaration dots, from the operands of each dot of fp32 inputs."""
    words = (*_OPERANDS, *(_OF_BACKWARD if backward else ()))
    answers = [found[word] for word in words]
    # bf16x3 errs less than TF32, and has no declaration of its own.
    short = [
        one for one in answers if one.value is not None and one.value[:5] in ("tf32,", "bf16x")
    ]
    shortest = [one for one in answers if one.value is not None and one.value[:5] == "bf16,"]
    if shortest:
        said = f"{shortest[0].word} is cut to bf16, which no declaration allows"
        return undecided("dots", said, shortest[0].replay)
    if short:
        said = "; ".join(f"{one.word}: {one.value}" for one in short)
        return Answer("dots", "tf32", "shown", said, short[0].replay)
    unclear = [one for one in answers if one.value is None]
    if unclear:
        said = f"{unclear[0].word}: {unclear[0].evidence}"
        return undecided("dots", said, unclear[0].replay)
    return Answer("dots", "ieee", "shown", f"{', '.join(words)} are whole", answers[0].replay)


def _tf32_conversion(found: Mapping[str, Answer], backward: bool) -> Answer:
    """Return the declaration tf32_conversion, if all operands are converted alike."""
    word = "tf32_conversion"
    if found["dots"].value != "tf32":
        return undecided(word, f"dots: {found['dots'].evidence}", found["dots"].replay)
    words = (*_OPERANDS, "p_operand", *(_OF_BACKWARD if backward else ()))
    answers = [found[name] for name in words]
    first = answers[0]
    other = next((one for one in answers if one.value != first.value), None)
    if other is not None or first.value not in _CONVERSIONS:
        one = other or first
        value = one.evidence if one.value is None else one.value
        return undecided(word, f"{first.word}: {first.value}; {one.word}: {value}", one.replay)
    said = f"{', '.join(words)} are {first.value}"
    return Answer(word, _CONVERSIONS[first.value], "tried", said, first.replay)
