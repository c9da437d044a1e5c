"""Probe a kernel: all questions in their order, and the declarations that the answers refute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fa_verify.oracles.problem import Problem
from fa_verify.probing.answers import Answer, alike
from fa_verify.probing.conventions import conventions_of
from fa_verify.probing.domain import (
    domain_of,
    smallest,
    with_gradients,
    with_right_results,
    without_mask,
)
from fa_verify.probing.numerics import numerics_of, orders_of
from fa_verify.probing.same_bits import same_bits_of
from fa_verify.probing.summation import Sum
from fa_verify.probing.trying import Tried, declares, stripped
from fa_verify.properties.kernels.declared import (
    ASSUMED_CONVENTIONS,
    NARROWINGS,
    NUMERICS,
    WORDS,
    check_declarations,
)
from fa_verify.properties.kernels.narrowing import narrowed
from fa_verify.properties.kernels.subject import Subject
from fa_verify.properties.kernels.vocabulary import score_mods_of

__all__ = ["BITS", "RAISES", "TOPICS", "Probed", "probe", "refuted"]

TOPICS = ("domain", "conventions", "numerics", "orders")
# A topic that takes ten seconds.
BITS = "bits"
# The only answer about a kernel that raises an exception on every problem.
RAISES = "raises"
# A kernel that takes ``sm_scale`` and ignores it is wrong, whatever a declaration may allow.
_FAULTS = ("fixed_scale",)
# The exceptions that such a kernel's answer shows.
_MOST_ERRORS = 3


@dataclass(frozen=True)
class Probed:
    """The answers about one kernel.

    Args:
        kernel: Name of the kernel.
        device: "cpu" or "cuda".
        answers: The answers, in the order in which they were found.
        sums: The orders of its sums.
    """

    kernel: str
    device: str
    answers: tuple[Answer, ...]
    sums: tuple[Sum, ...] = ()

    def __getitem__(self, word: str) -> Answer:
        """Return the answer about a property.

        Raises:
            KeyError: The probe did not ask for it.
        """
        for answer in self.answers:
            if answer.word == word:
                return answer
        raise KeyError(word)

    def declarations(self) -> dict[str, Any]:
        """Return the declarations that the answers give, without those that are undecided."""
        found = {
            answer.word: answer.value
            for answer in self.answers
            if answer.word in WORDS and answer.value is not None
        }
        check_declarations(self.kernel, found)
        return found

    def assumed(self) -> dict[str, Any]:
        """Return the declarations that the checks assume: limits, conventions, wider roundings.

        A mask that the kernel accepts and that changes nothing is no limit: the checks report it.
        Only a kernel that is always causal, and heeds no mask, is taken for what it is.
        """
        found = self.declarations()
        ignored = self["ignored_masks"].value if "masks" in found else ()
        if ignored and not (found.get("always_causal") and found["masks"] == ("causal",)):
            found["masks"] = tuple({*found["masks"], *ignored})
        check_declarations(self.kernel, found)
        plain = Subject(self.kernel, lambda **_: None)
        defaults = {
            word: getattr(plain, word, getattr(plain.numerics, word, None)) for word in found
        }
        return {
            word: found[word]
            for word in (*NARROWINGS, *ASSUMED_CONVENTIONS)
            if word in found and word not in _FAULTS and found[word] != defaults[word]
        }


def probe(
    subject: Subject,
    device: str = "cpu",
    asked: Callable[[str], None] = lambda _: None,
    topics: Sequence[str] = TOPICS,
) -> Probed:
    """Find out what a kernel takes, its conventions and how it rounds, without its declarations.

    Args:
        subject: The kernel. With several configurations, the one it takes by default is probed.
        device: "cpu" or "cuda".
        asked: Called with the word of every answer.
        topics: Topics to ask about, from ``TOPICS`` and ``BITS``. The domain is always asked for
            first.
    """
    found: dict[str, Answer] = {}
    sums: list[Sum] = []
    # The questions are about padded tensors of 16 bits and more, except for those about bits.
    of_bits = subject.reads_caches_alone or subject.quantised_alone
    answers = () if of_bits else _answers(subject, device, found, topics)
    for answer in answers:
        if isinstance(answer, Sum):
            sums.append(answer)
            continue
        found[answer.word] = answer
        asked(answer.word)
    probed = Probed(subject.name, device, tuple(found.values()), tuple(sums))
    if BITS not in topics or RAISES in found:
        return probed
    taking = subject if declares(subject) else subject.assuming(probed.assumed())
    for answer in same_bits_of(taking, device):
        found[answer.word] = answer
        asked(answer.word)
    return dataclasses.replace(probed, answers=tuple(found.values()))


def _answers(
    own: Subject, device: str, found: dict[str, Answer], topics: Sequence[str]
) -> Iterator[Answer | Sum]:
    subject = stripped(own)
    base = smallest(subject, own, device)
    if not isinstance(base, Problem):
        yield _raises(base)
        return
    base = with_gradients(subject, with_right_results(subject, base))
    always_causal, base = without_mask(subject, base)
    yield always_causal
    base = narrowed(own, base)
    yield from domain_of(subject, own, base)
    if "conventions" in topics:
        yield from conventions_of(subject, base, found)
    # The experiments need a row that sees all keys, and support no score modifications.
    if always_causal.value is None or score_mods_of(base):
        return
    if "numerics" in topics:
        yield from numerics_of(subject, base, found)
    if "orders" in topics:
        yield from orders_of(subject, base, found)


def _raises(failed: Sequence[Tried]) -> Answer:
    """Return what a kernel raises on every problem: one call of each exception, errors first."""
    kinds: dict[str, list[Tried]] = {}
    for one in failed:
        kinds.setdefault(alike(one.message), []).append(one)
    of_kinds = sorted(
        kinds.values(), key=lambda of: (of[0].message.startswith("NotImplemented"), -len(of))
    )
    first, *others = of_kinds[:_MOST_ERRORS]
    total = f"all {len(failed)}" if len(of_kinds) == 1 else f"{len(first)} of {len(failed)}"
    messages = [" ".join(of[0].message.split()) for of in (first, *others)]
    said = f"on {total} problems: {messages[0]}"
    for of, message in zip(others, messages[1:], strict=True):
        said += f"; on {len(of)}: {message}, with {of[0].replay}"
    return Answer(RAISES, messages[0].partition(":")[0], "shown", said, first[0].replay)


def refuted(subject: Subject, probed: Probed) -> list[str]:
    """Return the declarations of a kernel that its answers contradict, as sentences.

    The default of a word counts as declared if the kernel declares another one. A narrower domain
    or a wider bound than the answers give is no contradiction.
    """
    if not declares(subject):
        return []
    own = subject.declarations()
    wrong = []
    for answer in probed.answers:
        word = answer.word
        if answer.value is False and word.removeprefix("same_bits_") in subject.same_bits:
            wrong.append(
                f"{subject.name} declares same_bits={subject.same_bits!r}, and "
                f"{answer.evidence}; {answer.replay}"
            )
        if answer.value is None or word not in (*_WIDTHS, *_SETTLED):
            continue
        # The checks count these refusals, and report none as a failure.
        if word not in own and "NotImplementedError" in answer.evidence:
            continue
        given = getattr(subject.numerics if word in NUMERICS else subject, word)
        if word in ("dots", "tf32_conversion") and "fp32" not in subject.dtypes:
            continue  # both are about fp32 inputs
        if _contradicts(word, given, answer.value):
            how = "declares" if word in own else "has the default"
            wrong.append(
                f"{subject.name} {how} {word}={given!r}, and the probe finds {answer.value!r}: "
                f"{answer.evidence}; {answer.replay}"
            )
    return wrong


# Words that are compared for what they promise, and their values from strict to wide.
_WIDTHS: dict[str, tuple[Any, ...]] = {
    "dots": ("ieee", "tf32"), "p_dtype": ("fp32", "input"), "l_from": ("unrounded", "rounded"),
    "ds_from": ("unrounded", "rounded"), "group_sum": ("fp32", "dtype"), "flushes": (False, True),
    "prescales": ("none", "q", "k", "qk"), "softcap_slope": ("exact", "difference"),
}  # fmt: skip
# Further words that the answers can contradict.
_SETTLED = (
    "dtypes", "head_dims", "seqlen_multiple", "gqa", "m_ne_n", "m_gt_n", "one_query", "dv_ne_d",
    "zero_sizes", "masks", "always_causal", "layouts", "backward", "score_mods", "returns_lse",
    "lse_grad", "lse_base", "empty_lse", "causal_alignment", "p_normalised", "ds_scaled", "splits",
    "rescale_threshold", "tf32_conversion",
)  # fmt: skip


def _contradicts(word: str, given: Any, found: Any) -> bool:
    """Return whether a declaration promises more than the answer gives."""
    if word in _WIDTHS:
        if word == "prescales":
            return not set(found.replace("none", "")) <= set(given.replace("none", ""))
        return _WIDTHS[word].index(given) < _WIDTHS[word].index(found)
    if word in ("splits", "rescale_threshold"):
        return bool(given < found)
    if word == "seqlen_multiple":
        return bool(given % found)
    if (word, given) in (("returns_lse", None), ("tf32_conversion", "unknown")):
        return False
    if isinstance(found, tuple):
        return given is None or not {*given} <= {*found}
    if word in ("always_causal", "one_query"):
        return bool(found and not given)
    if isinstance(found, bool) and word in _LIMITS:
        # A declared limit that the kernel does not have is no contradiction.
        return bool(given and not found)
    return bool(given != found)


_LIMITS = ("gqa", "m_ne_n", "m_gt_n", "dv_ne_d", "zero_sizes", "backward", "lse_grad")
