"""The features of attention to padded tensors, and the nearest problems without each."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import DTYPES, LAYOUTS, TENSORS, Problem
from fa_verify.properties.inputs.layouts import strides_of
from fa_verify.properties.kinds.feature import FIELDS, Feature

__all__ = ["features_of", "holds", "of_sizes", "resized", "size_of", "without"]

_DEFAULT = Problem()
# Sizes that kernels pad to, or that they take for granted. G is the number of query heads that
# share a key head.
_MULTIPLES: dict[str, tuple[int, ...]] = {
    "seqlens_q": (16, 32, 64, 128), "seqlens_k": (16, 32, 64, 128),
    "M or N": (16, 32, 64, 128), "M": (2, 16, 32, 64, 128), "N": (2, 16, 32, 64, 128),
    "D": (2, 8, 16, 32, 64), "Dv": (2, 8, 16, 32, 64), "B": (), "G": (2,), "Hk": (), "H": (2,),
    "B * H": (), "M * G": (),
}  # fmt: skip
# Whole tiles, for which kernels leave out the masks of ragged ones; the widest first, as its
# problems have the others too.
_WHOLE = {"M": (128, 64, 32, 16), "N": (128, 64, 32, 16), "D": (8,)}
# Sizes that kernels take for powers of two.
_POWERS = ("M", "N", "D", "Dv", "G", "H")
# Dimensions of a tensor by the words for their strides; where columns are apart, rows are too.
_DIMENSIONS = {"column": 3, "batch": 0, "head": 1, "row": 2}
# Pairs of rows and keys of which a mask is made to see whether it has empty rows.
_MOST_PAIRS = 2**25


def features_of(problem: Problem) -> list[Feature]:
    """Return the features of a problem, those that kernels treat apart first.

    Where two features vanish together, a failure is attributed to the first of them.
    """
    names = [
        *("zero size", "empty sequences", "padded rows", "empty rows", "grouped heads"),
        *("hidden keys", "padded keys", "entries of different lengths"),
        *("predicate", "window left of 0", "window left"),
        *("right bound", "window right", "causal", "diagonal"),
        *("M is 1", "M > N", "M < N", "M != N", "D > Dv", "D < Dv", "D != Dv"),
    ]
    found = [Feature(name) for name in names]
    found += [Feature(name, (getattr(problem, name),)) for name in ("dtype", "config")]
    found += [Feature(name, (str(getattr(problem, name)),)) for name in FIELDS]
    found += [Feature(f"{stride} stride of {x}") for x in TENSORS for stride in _DIMENSIONS]
    found += [Feature(f"layout of {name}") for name in TENSORS]
    found += [Feature(f"{names} of other strides") for names in _PAIRS]
    found += [Feature("several problems")]
    found += [
        Feature(f"{size} is a multiple of {x}") for size, tiles in _WHOLE.items() for x in tiles
    ]
    found += [Feature("B * H is no multiple of 8")]
    for size, multiples in _MULTIPLES.items():
        power = [Feature(f"{size} is no power of two")] * (size in _POWERS)
        found += power if size in ("M", "N", "D", "Dv") else []
        found += [Feature(f"{size} is no multiple of {x}") for x in multiples]
        found += power if size in ("G", "H") else []
        if size in ("N", "D", "Dv"):
            found += [Feature(f"{size} is 1")]
        if size != "M or N":
            found += [Feature(f"{size} above", size_of(problem, size) - 1)]
    found += [Feature("not causal"), Feature("not grouped")]
    return [x for x in found if holds(x, problem)]


def holds(feature: Feature, problem: Problem) -> bool:
    """Return whether a problem has a feature."""
    name, value = feature
    if name in _PREDICATES:
        return _PREDICATES[name](problem)
    if name in ("dtype", "config"):
        return isinstance(value, tuple) and getattr(problem, name) in value
    if name in FIELDS:
        return bool(getattr(problem, name) != getattr(_DEFAULT, name))
    if name.startswith("layout of "):
        return problem.layouts[TENSORS.index(name.split()[2])] != LAYOUTS[0]
    if " stride of " in name:
        return _has_other_stride(problem, *name.split(" stride of "))
    if " multiple of " in name:
        size, how, multiple = re.split(r" is (no|a) multiple of ", name)
        numbers = [size_of(problem, x) for x in size.split(" or ")]
        if size in ("seqlens_q", "seqlens_k"):
            numbers = [*(getattr(problem.mask, size) or ())]
        if how == "no":
            return any(x % int(multiple) for x in numbers)
        return all(x and x % int(multiple) == 0 for x in numbers)
    size, kind = re.split(r" (?=above|up to|is )", name)
    number = size_of(problem, size)
    if kind in ("above", "up to"):
        assert isinstance(value, int)
        return bool(number > value >= 1 if kind == "above" else number <= value)
    return bool(number == int(kind.split()[-1]))


def size_of(problem: Problem, size: str) -> int:
    """Return a size, the product of sizes such as "B * H", or the largest of some lengths."""
    if size in ("seqlens_q", "seqlens_k"):
        return max(getattr(problem.mask, size) or (0,), default=0)
    return math.prod(getattr(problem, x) for x in size.split(" * "))


def _shape(problem: Problem, tensor: str) -> tuple[int, int, int, int]:
    heads, rows = (problem.H, problem.M) if tensor in ("q", "dout") else (problem.Hk, problem.N)
    return problem.B, heads, rows, problem.D if tensor in ("q", "k") else problem.Dv


def _has_other_stride(problem: Problem, dimension: str, tensor: str) -> bool:
    """Return whether a dimension of a tensor has another stride than in contiguous storage."""
    place, sizes = _DIMENSIONS[dimension], _shape(problem, tensor)
    layout = problem.layouts[TENSORS.index(tensor)]
    return sizes[place] > 1 and strides_of(layout, *sizes)[place] != math.prod(sizes[place + 1 :])


# Pairs of tensors of which a kernel may read one with the strides of the other.
_PAIRS = {"q and k": (0, 1), "q and v": (0, 2), "k and v": (1, 2)}


def _have_other_strides(problem: Problem, names: str) -> bool:
    """Return whether two tensors have other strides, but where both have a size of 1.

    Batch entries and heads of q are compared with no others: their sizes may differ.
    """
    sizes = [_shape(problem, x) for x in TENSORS]
    first, second = (
        [
            (size, x)
            for size, x in zip(sizes[i], strides_of(problem.layouts[i], *sizes[i]), strict=True)
        ]
        for i in _PAIRS[names]
    )
    start = 2 if names[0] == "q" else 0
    pairs = zip(first[start:], second[start:], strict=True)
    return any(max(m, n) > 1 and x != y for (m, x), (n, y) in pairs)


def without(feature: Feature, problem: Problem, configs: Iterable[str] = ()) -> Iterator[Problem]:
    """Yield problems like the given one, but without a feature it has; nearest first.

    ``configs`` are the tile configurations of the subject.
    """
    for change in _changes(feature, problem, configs):
        try:
            changed = dataclasses.replace(problem, **change)
        except ValueError:
            continue
        if not holds(feature, changed):
            yield changed


def _seen(problem: Problem) -> torch.Tensor | None:
    """Return the dense mask; None if it is empty or too large to make."""
    B, H, M, N = problem.B, problem.H, problem.M, problem.N
    if not 0 < B * H * M * N <= _MOST_PAIRS:
        return None
    return problem.mask.dense(B, H, M, N)


def _has_empty_rows(problem: Problem) -> bool:
    seen = _seen(problem)
    if seen is None:
        return problem.N == 0 < problem.B * problem.M
    return not bool(seen.any(3).all())


def _sizes_of_entries(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield the numbers of rows and of keys of each entry, without padding."""
    yield from zip(*problem.mask.lengths(problem.B, problem.M, problem.N), strict=True)


def _has_different_lengths(problem: Problem) -> bool:
    lengths = problem.mask.seqlens_q, problem.mask.seqlens_k
    return any(len({*x}) > 1 for x in lengths if x is not None)


def _has_empty_sequences(problem: Problem) -> bool:
    return 0 in (*(problem.mask.seqlens_q or ()), *(problem.mask.seqlens_k or ()))


def _hides_keys(problem: Problem) -> bool:
    """Return whether a row sees some keys, but not all."""
    seen = _seen(problem)
    return seen is not None and bool((seen.any(3) & ~seen.all(3)).any())


def _is_no_power(problem: Problem, size: str) -> bool:
    return size_of(problem, size).bit_count() > 1


_PREDICATES: dict[str, Callable[[Problem], bool]] = {
    "zero size": lambda x: 0 in (x.B, x.M, x.N),
    "empty sequences": _has_empty_sequences,
    "entries of different lengths": _has_different_lengths,
    "empty rows": _has_empty_rows,
    "grouped heads": lambda x: x.G > 1,
    "hidden keys": _hides_keys,
    "padded keys": lambda x: x.mask.seqlens_k is not None,
    "padded rows": lambda x: x.mask.seqlens_q is not None,
    "predicate": lambda x: not x.mask.is_plain,
    "window left of 0": lambda x: x.mask.window_left == 0,
    "window left": lambda x: x.mask.window_left is not None,
    "right bound": lambda x: x.mask.right is not None,
    "window right": lambda x: bool(x.mask.right),
    "causal": lambda x: x.mask.causal,
    "diagonal": lambda x: x.mask.right is not None or x.mask.window_left is not None,
    "not grouped": lambda x: x.G == 1,
    "not causal": lambda x: not x.mask.causal,
    "M is 1": lambda x: x.M == 1,
    "M != N": lambda x: any(m != n for m, n in _sizes_of_entries(x)),
    "M > N": lambda x: any(m > n for m, n in _sizes_of_entries(x)),
    "M < N": lambda x: any(m < n for m, n in _sizes_of_entries(x)),
    "D != Dv": lambda x: x.D != x.Dv,
    "D > Dv": lambda x: x.D > x.Dv,
    "D < Dv": lambda x: x.D < x.Dv,
    **{
        f"{names} of other strides": functools.partial(_have_other_strides, names=names)
        for names in _PAIRS
    },
    **{f"{x} is no power of two": functools.partial(_is_no_power, size=x) for x in _POWERS},
    "several problems": lambda x: bool(x.seeds),
}


def _changes(
    feature: Feature, problem: Problem, configs: Iterable[str]
) -> Iterator[dict[str, Any]]:
    """Yield changes of fields that may remove a feature, smallest change first."""
    name, _value = feature
    mask, M, N = problem.mask, problem.M, problem.N
    if name == "zero size":
        yield {size: max(1, getattr(problem, size)) for size in ("B", "M", "N")}
        yield {**{size: max(1, getattr(problem, size)) for size in ("B", "M", "N")}, "mask": Mask()}
    elif name == "empty sequences":
        more = _with_lengths(mask, lambda lengths: tuple(x + 1 for x in lengths))
        yield {"M": M + 1, "N": N + 1, "mask": more}
        # Rows that see no key otherwise.
        yield {"M": N + 1, "mask": Mask(causal=True)}
        yield {"M": M + 1, "mask": Mask(seqlens_q=(M,) * problem.B)}
        sizes = {"M": max(M, 1), "N": max(N, 1)}
        yield {**sizes, "mask": _with_lengths(mask, lambda lengths: tuple(x or 1 for x in lengths))}
        yield {**sizes, "mask": _unpadded(mask)}
    elif name == "entries of different lengths":
        yield {"mask": _with_lengths(mask, lambda lengths: (max(lengths),) * len(lengths))}
        yield {"mask": _with_lengths(mask, lambda lengths: (min(lengths),) * len(lengths))}
    elif name == "empty rows":
        yield from _without_empty_rows(problem)
    elif name == "hidden keys":
        yield {"mask": Mask()}
    elif name == "grouped heads":
        yield {"Hk": problem.H}
        yield {"H": problem.Hk}
    elif name in ("padded keys", "padded rows"):
        field = "seqlens_k" if name == "padded keys" else "seqlens_q"
        yield {"mask": _changed(mask, field, None)}
        if name == "padded keys":
            yield from _hiding_otherwise(name, problem)
        else:  # rows that see no key otherwise
            yield {"M": N + 1, "mask": Mask(causal=True, seqlens_k=mask.seqlens_k)}
    elif name == "predicate":
        yield {"mask": _plain(mask)}
    elif name == "window left of 0":
        for keys in (1, 2):  # the first keys of a row are hidden, still
            longer = mask.seqlens_k and tuple(x + keys for x in mask.seqlens_k)
            wide = dataclasses.replace(mask, window_left=keys, seqlens_k=longer)
            yield {"N": N + keys, "mask": wide}
        yield from _hiding_otherwise("window left", problem)
    elif name == "window left":
        yield {"mask": _changed(mask, "window_left", None)}
        yield from _hiding_otherwise(name, problem)
    elif name == "right bound":
        yield {"mask": _unbounded(mask)}
        yield from _hiding_otherwise(name, problem)
    elif name == "diagonal":
        yield {"mask": _changed(_unbounded(mask), "window_left", None)}
        yield from ({"mask": Mask(seqlens_k=(keys,) * problem.B)} for keys in {0, max(N - 1, 0)})
    elif name == "window right" or name == "causal":
        yield {"mask": dataclasses.replace(mask, causal=False, window_right=0)}
    elif name == "not grouped":
        yield from ({"H": groups * problem.H} for groups in (2, 3))
    elif name == "not causal":
        for sizes in ({}, {"M": max(M, N), "N": max(M, N)}):
            yield {**sizes, "mask": dataclasses.replace(mask, causal=True, window_right=None)}
    elif name in ("M != N", "M > N", "M < N"):
        yield {"M": max(M, N), "N": max(M, N)}
        if name != "M != N":
            yield {"M": N, "N": M, "mask": _unpadded(mask)}
        yield {"M": min(M, N), "N": min(M, N)}
        for size in (max(M, N), min(M, N)):
            yield {"M": size, "N": size, "mask": _unpadded(mask)}
    elif name == "D != Dv":
        yield from ({"D": size, "Dv": size} for size in (problem.D, problem.Dv))
    elif name in ("D > Dv", "D < Dv"):
        yield {"Dv": problem.D}
        below, above = (problem.Dv - 1) // 8 * 8, (problem.Dv // 8 + 1) * 8
        other = below if problem.D > problem.Dv else above
        yield from [{"D": other}] * (other > 0)
        yield {"D": problem.Dv, "Dv": problem.D}
    elif name in ("dtype", "config"):
        yield from ({name: other} for other in (DTYPES if name == "dtype" else configs))
    elif name in FIELDS:
        yield {name: getattr(_DEFAULT, name)}
    elif name.startswith("layout of ") or " stride of " in name:
        place = TENSORS.index(name.split()[-1])
        layouts = problem.layouts
        others = LAYOUTS[:1] if name.startswith("layout") else LAYOUTS[1:] + LAYOUTS[:1]
        # One head has no stride.
        heads = {"H": 2 * problem.H, "Hk": 2 * problem.Hk} if problem.Hk == 1 else {}
        for x in others:
            several = heads if x == "expanded" else {}
            yield {**several, "layouts": (*layouts[:place], x, *layouts[place + 1 :])}
    elif name.endswith(" of other strides"):
        places = _PAIRS[name.removesuffix(" of other strides")]
        for both in dict.fromkeys((*(problem.layouts[i] for i in places), LAYOUTS[0])):
            given = enumerate(problem.layouts)
            same = {"layouts": tuple(both if i in places else x for i, x in given)}
            yield {**same, "Dv": problem.D if 2 in places else problem.Dv}
    elif name.endswith(" is no power of two"):
        what = name.split()[0]
        lower = 1 << size_of(problem, what).bit_length() - 1
        # The smaller one is no multiple of a tile that the others fill.
        for power in (2 * lower, lower, max(1, lower // 4)):
            yield from resized(problem, {what: power})
    elif name == "several problems":
        yield {"seeds": (), "B": problem.B // len(problem.seeds), "mask": problem.part(0, 1).mask}
    else:
        yield from _resized(feature, problem)


def _hiding_otherwise(name: str, problem: Problem) -> Iterator[dict[str, Any]]:
    """Yield masks that hide keys, or all keys, by other means than the named one."""
    if name != "right bound":
        yield {"mask": Mask(causal=True)}
    if name != "window left":
        yield {"mask": Mask(window_left=0)}
        if name == "right bound":  # with its lengths
            yield {"N": problem.N + 1, "mask": _changed(_unbounded(problem.mask), "window_left", 0)}
    for keys in (0, problem.N - 1):
        if keys >= 0 and name != "padded keys":
            yield {"mask": Mask(seqlens_k=(keys,) * problem.B)}


def _resized(feature: Feature, problem: Problem) -> Iterator[dict[str, Any]]:
    """Yield changes of a size that may remove a feature of it."""
    name, value = feature
    if " multiple of " in name:
        size, how, words = re.split(r" is (no|a) multiple of ", name)
        step, names = int(words), size.split(" or ")
        if size in ("G", "H"):
            number = size_of(problem, size)
            wanted = [{size: x} for x in (2 * number, number + 1, number - 1) if x]
        elif size == "B * H":
            wanted = [{"B": step}, {size: size_of(problem, size) // step * step + step}]
        elif how == "a":
            number = size_of(problem, size)
            near = (number - 1, number + 1, number - step // 2, number + step // 2)
            wanted = [{size: x} for x in near if x > 0]
        else:
            wanted = [{x: -(-size_of(problem, x) // step) * step for x in names}]
            if min(wanted[0].values()) > step:  # the next larger one may be too large for a kernel
                wanted.append({x: number - step for x, number in wanted[0].items()})
    else:
        size, kind = re.split(r" (?=above|up to|is )", name)
        assert isinstance(value, int | None)
        above = (value or size_of(problem, size)) + 1
        number = value if kind == "above" and value is not None else above
        wanted = [{size: number}]
        if kind == "above" and number > 1:  # a whole tile may lack another feature
            wanted.append({size: number - 1})
        if kind == "above" and size in ("D", "Dv"):
            # A kernel may declare its head dims.
            wanted += [{size: x} for x in range(number - number % 8, 0, -8) if x < number]
    for sizes in wanted:
        yield from resized(problem, sizes)
    if size.split(" or ")[0] in ("M", "N", "D", "Dv"):
        pair = ("D", "Dv") if size[0] == "D" else ("M", "N")
        for sizes in wanted:
            yield from resized(problem, dict.fromkeys(pair, max(sizes.values())))


def resized(problem: Problem, sizes: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield changes that give a problem other sizes, all but one of them lengths or head dims."""
    size, number = next(iter(sizes.items()))
    mask, B = problem.mask, problem.B
    if size == "B":
        if number <= B or (mask.uniform and B):
            yield {"B": number, "mask": mask.sliced(tuple(i % B for i in range(number)))}
            yield {"B": number, "mask": mask.sliced(tuple(i % B for i in range(-number, 0)))}
    elif size == "H":
        yield from ({"H": number, "Hk": x} for x in (number, problem.Hk, 1) if number % x == 0)
    elif size == "G":
        yield {"H": problem.Hk * number}
    elif size == "Hk":
        yield {"Hk": number}
        yield {"H": number * problem.G, "Hk": number}
    elif size == "B * H":
        entries, heads = number // problem.H, number // max(B, 1)
        if entries:
            yield from resized(problem, {"B": entries})
        yield from ({"H": heads, "Hk": x} for x in (heads // problem.G, heads, 1) if x)
        if B and number:
            yield {"B": 1, "H": number, "Hk": number, "mask": mask.sliced((0,))}
    elif size == "M * G":
        if number >= problem.G:
            yield {"M": number // problem.G}
        yield {"H": problem.Hk * max(1, number // max(problem.M, 1))}
    elif size in ("seqlens_q", "seqlens_k") and getattr(mask, size) is not None:
        name = "M" if size == "seqlens_q" else "N"
        longest = size_of(problem, size)
        lengths = tuple(number if x == longest else min(x, number) for x in getattr(mask, size))
        longer = max(number, getattr(problem, name))
        yield {name: longer, "mask": _changed(mask, size, lengths)}
        yield {name: longer, "mask": _changed(mask, size, (number,) * B)}
    elif all(hasattr(problem, x) for x in sizes):
        yield {**sizes}
        yield {**sizes, "mask": of_sizes(problem, **sizes)}
        yield {**sizes, "mask": _unpadded(mask)}


def of_sizes(problem: Problem, **sizes: int) -> Mask:
    """Return the mask of a problem with lengths that are the same shares of other M and N."""
    found = problem.mask
    for name, size in (("seqlens_q", "M"), ("seqlens_k", "N")):
        old = getattr(problem, size)
        if (lengths := getattr(found, name)) is not None and old:
            new = sizes.get(size, old)
            shares: Any = tuple(x and max(1, x * new // old) for x in lengths)
            found = dataclasses.replace(found, **{name: shares})
    return found


def _with_lengths(mask: Mask, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Mask:
    """Return a mask with other lengths of rows and of keys, where it has any."""
    given = {name: getattr(mask, name) for name in ("seqlens_q", "seqlens_k")}
    changed: dict[str, Any] = {name: change(x) for name, x in given.items() if x is not None}
    return dataclasses.replace(mask, **changed)


def _plain(mask: Mask) -> Mask:
    """Return a mask without its predicate."""
    return Mask(
        causal=mask.causal, window_left=mask.window_left, window_right=mask.window_right,
        seqlens_q=mask.seqlens_q, seqlens_k=mask.seqlens_k,
    )  # fmt: skip


def _changed(mask: Mask, field: str, value: Any) -> Mask:
    return dataclasses.replace(mask, **{field: value})


def _unbounded(mask: Mask) -> Mask:
    return dataclasses.replace(mask, causal=False, window_right=None)


def _unpadded(mask: Mask) -> Mask:
    return dataclasses.replace(mask, seqlens_q=None, seqlens_k=None)


def _without_empty_rows(problem: Problem) -> Iterator[dict[str, Any]]:
    """Yield changes that may leave no row without a key: lengths, then sizes, then the mask."""
    mask = problem.mask
    _, keys = mask.lengths(problem.B, problem.M, problem.N)
    if mask.seqlens_k is not None and 0 in keys:
        longer = dataclasses.replace(mask, seqlens_k=tuple(x + 1 for x in keys))
        yield {"mask": longer, "N": problem.N + 1}
        yield {"mask": dataclasses.replace(mask, seqlens_k=tuple(x or problem.N for x in keys))}
    if mask.seqlens_q is not None:
        yield {"mask": dataclasses.replace(mask, seqlens_q=None)}
    yield {"mask": _unpadded(mask)}
    size = max(problem.M, problem.N, 1)
    yield {"M": size, "N": size}
    yield {"M": size, "N": size, "mask": _unpadded(mask)}
    for kept in (Mask(causal=mask.causal), Mask(window_left=mask.window_left), Mask()):
        padded = dataclasses.replace(kept, seqlens_q=mask.seqlens_q, seqlens_k=mask.seqlens_k)
        yield {"mask": padded}
        yield {"M": size, "N": size, "mask": kept}
