"""C6: where a kernel takes each code and each scale of a cache from, read back exactly.

Every place of a cache holds its own number, digit by digit over several calls. A softmax that
selects one key returns the digits of the places that its values and their scales came from. Keys
show in the weights: each bit of the number of a place makes a score large or 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from fa_verify.oracles.formats.element import ElementFormat
from fa_verify.oracles.formats.in_torch import encoded
from fa_verify.oracles.guarantee import C6
from fa_verify.properties.guarantees.agreement import found_where
from fa_verify.properties.guarantees.compare import Finding
from fa_verify.properties.inputs.caches import CacheInputs, make_cache
from fa_verify.properties.kinds.caches import CacheTrial, run_cache

__all__ = ["places"]

# Codes of digits: normal numbers that every 16-bit dtype has, in all formats.
_FIRST_CODE, _CODES = 20, 100
# Digits of scales: powers of two from 2**-4, times 17/16 to 31/16. A scale that is dropped is none.
_LEAST_EXPONENT, _EIGHTHS, _SCALE_DIGITS = -4, 8, 64
# A number of keys that makes a score large, and the difference of scores that hides all others.
_LARGE, _GAP = 64.0, 200.0
# A scale that is no digit: of keys, while values are read, and of values, while keys are.
_NO_DIGIT = 96.0
_NO_PLACE = "no place, or from several"
_TOKENS = 2  # keys of each entry that are selected


class _Reading:
    """Calls that read places back, from the last row of each entry."""

    def __init__(self, trial: CacheTrial) -> None:
        problem = trial.problem
        a = dataclasses.replace(problem.attention, softcap=None, alibi="none", sinks="none")
        problem = dataclasses.replace(problem, attention=a, new=0, shared=0)
        x = make_cache(problem, trial.inputs)
        self.trial, self.problem = trial, problem
        self.x = x._replace(alibi_slopes=None, sinks=None)
        self.pages, self.rows, self.Hk, self.D = x.k_cache.shape
        self.Dv = x.v_cache.shape[3]
        self.group = a.H // a.Hk
        # The keys that the last row of each entry sees, (B, N).
        device = x.q.device
        dense = a.mask.dense(a.B, a.H, a.M, a.N, device=device)
        self.seen = dense.expand(a.B, a.H, a.M, a.N)[:, 0, -1]
        n = torch.arange(a.N, device=device)
        place = (n // self.rows).clamp(max=max(0, x.table.shape[1] - 1)).expand(a.B, -1)
        page = x.table.to(torch.int64).gather(1, place)
        self.page = torch.where(self.seen, page, 0)
        self.row = (n % self.rows).expand(a.B, -1)
        reach = 2.0 ** math.ceil(math.log2(_GAP / (_LARGE * a.scale)))
        self.large_q = min(reach, 2.0**15)

    @property
    def form(self) -> ElementFormat:
        """The format of the codes."""
        assert self.problem.format is not None
        return self.problem.format

    def code_numbers(self, columns: int) -> torch.Tensor:
        """Return the number of every place of codes, (pages, rows, Hk, columns)."""
        shape = self.pages, self.rows, self.Hk, columns
        return torch.arange(math.prod(shape), device=self.x.q.device).view(shape)

    def scale_numbers(self) -> torch.Tensor:
        """Return the number of every place of scales, shaped as these."""
        assert self.x.k_scale is not None
        count = self.x.k_scale.numel()
        return torch.arange(count, device=self.x.q.device).view(self.x.k_scale.shape)

    def right_codes(self, columns: int) -> torch.Tensor:
        """Return the number of the place of each element, (B, Hk, N, columns)."""
        return self.code_numbers(columns)[self.page, self.row].transpose(1, 2)

    def right_scales(self) -> torch.Tensor:
        """Return the number of the place of each scale, (B, Hk, N)."""
        numbers = self.scale_numbers()
        if numbers.ndim > 1:
            numbers = numbers[self.page] if numbers.ndim == 2 else numbers[self.page, self.row]
            return numbers.transpose(1, 2)
        return numbers.view(1, -1, 1).expand(len(self.page), self.Hk, self.page.shape[1])

    def selected(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a key that the last row of each entry sees, and whether there is one, (B,)."""
        count = self.seen.sum(1)
        # The last, and one that the seed chooses.
        chosen = (count - 1, self.problem.seed % count.clamp(min=1))[i]
        order = self.seen.to(torch.int8).argsort(dim=1, descending=True, stable=True)
        return order.gather(1, chosen.clamp(min=0)[:, None]).squeeze(1), count > 0

    def of_token(self, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the page and the row of a key of each entry."""
        at = token[:, None]
        return self.page.gather(1, at).squeeze(1), self.row.gather(1, at).squeeze(1)

    def out(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: torch.Tensor | float,
        v_scale: torch.Tensor | float,
        channel: int,
    ) -> torch.Tensor:
        """Return out of the last rows by key/value head, float64 (B, Hk, group, Dv).

        Args:
            k: Numbers of the cache of keys, of whose format they are.
            v: The same of values.
            k_scale: Factors on keys.
            v_scale: Factors on values.
            channel: The one channel of q that is not 0.
        """
        x: CacheInputs = self.x
        assert x.k_scale is not None
        assert x.v_scale is not None
        for cache, number in ((x.k_cache, k), (x.v_cache, v)):
            codes = encoded(number.to(torch.float64), self.form)
            cache.view(torch.uint8).copy_(codes.view(torch.uint8))
        for scale, factor in ((x.k_scale, k_scale), (x.v_scale, v_scale)):
            whole = torch.as_tensor(factor, dtype=torch.float32, device=scale.device)
            scale.copy_(whole.reciprocal() if self.problem.divides else whole)
        q = torch.zeros_like(x.q)
        q[..., channel] = self.large_q
        found = run_cache(self.trial.subject, self.problem, x._replace(q=q))[0]
        last = found[:, :, -1].to(torch.float64)
        return last.reshape(len(last), self.Hk, self.group, -1)

    def keys_at(self, token: torch.Tensor, there: torch.Tensor, channel: int) -> torch.Tensor:
        """Return numbers of keys: large where one token of each entry lies, and 0 elsewhere."""
        k = self.x.q.new_zeros(self.x.k_cache.shape)
        page, row = self.of_token(token)
        k[page[there], row[there], :, channel] = _LARGE
        return k


def _digits(numbers: torch.Tensor, base: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the digits of numbers, the last ones first, and the weight of each."""
    most, weight = int(numbers.max()), 1
    while weight == 1 or weight <= most:
        yield numbers // weight % base, weight
        weight *= base


def _nearest(got: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the index of the number of a table that each element is, and -1 if it is none."""
    distance = (got.unsqueeze(-1) - table).abs()
    index = distance.argmin(-1)
    close = distance.amin(-1) <= table[index].abs() * 2.0**-9
    return torch.where(close & got.isfinite(), index, -1)


def _joined(parts: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """Return the numbers whose digits are given; -1 where a digit is none."""
    whole = sum((digit * weight for digit, weight in parts), torch.zeros_like(parts[0][0]))
    none = torch.stack([digit < 0 for digit, _ in parts]).any(0)
    return torch.where(none, -1, whole)


def places(trial: CacheTrial) -> list[Finding]:
    """C6: codes and scales of keys and values come from the places that the call names.

    Every channel of the values and every scale is read back for two keys of each entry. One channel
    of the keys is read back for as many keys as values have columns.
    """
    problem = trial.problem
    if problem.format is None:
        trial.not_applicable(C6.key, "to a cache of the dtype of q")
        return []
    if not problem.attention.mask.is_plain:
        trial.not_applicable(C6.key, "to a mask with a predicate")
        return []
    reading = _Reading(trial)
    if not reading.seen.any() or not reading.group:
        trial.not_applicable(C6.key, "where the last row of no entry sees a key")
        return []
    trial.applies(C6.key)
    channel = problem.seed % reading.D
    # A finding that names no place may follow from another one: wrong keys select no value.
    found: list[Finding] = []
    for i in range(_TOKENS):
        found += _value_scales(reading, i, channel) + _values(reading, i, channel)
        if _named(found):
            return _named(found)
        found += _key_scales(reading, i, channel)
    found += _keys(reading, channel)
    return _named(found) or found[:1]


def _named(found: list[Finding]) -> list[Finding]:
    """Return the findings that name the wrong place."""
    return [finding for finding in found if _NO_PLACE not in finding.claim]


def _keys(reading: _Reading, channel: int) -> list[Finding]:
    """Return a finding where codes of keys come from elsewhere, for keys in a row."""
    right, numbers = reading.right_codes(reading.D), reading.code_numbers(reading.D)
    B, _, N, _ = right.shape
    tokens = torch.arange(N, device=right.device)
    start = reading.problem.seed % max(1, N - reading.Dv + 1)
    read = tokens[start : start + reading.Dv]
    # One value of 1 in each column: that of the key that the column stands for.
    v = reading.x.q.new_zeros(reading.x.v_cache.shape)
    for column, token in enumerate(read.tolist()):
        there = reading.seen[:, token]
        v[reading.page[there, token], reading.row[there, token], :, column] = 1.0
    compared = reading.seen[:, None, None, read]
    got = torch.zeros(B, reading.Hk, reading.group, len(read), dtype=torch.int64)
    got = got.to(right.device)
    wanted = right[:, :, None, read, channel].expand_as(got)
    for digit, weight in _digits(numbers, 2):
        weighs = [
            reading.out(k * _LARGE, v, 1.0, 1.0, channel)[..., : len(read)] > 0.5 / N
            for k in (digit, 1 - digit)
        ]
        # Where all keys are equal, both calls weigh all: nothing is read, and nothing is wrong.
        bit = torch.where(weighs[0] & weighs[1], wanted // weight % 2, weighs[0].to(torch.int64))
        got += torch.where(weighs[0] | weighs[1], bit * weight, 0)
    shape = (*right.shape[:2], reading.group, N, reading.D)
    whole = right[:, :, None].expand(shape).clone()
    where = torch.zeros(shape, dtype=torch.bool, device=right.device)
    whole[..., read, channel], where[..., read, channel] = got, compared.expand_as(got)
    return _told(reading, "k", whole, right[:, :, None].expand(shape), where, numbers.shape)


def _key_scales(reading: _Reading, i: int, channel: int) -> list[Finding]:
    """Return a finding where the scale of a key comes from elsewhere."""
    token, there = reading.selected(i)
    # A key alone has the weight 1, whatever its score.
    there = there & (reading.seen.sum(1) > 1)
    k = reading.keys_at(token, there, channel)
    v = reading.x.q.new_zeros(reading.x.v_cache.shape)
    page, row = reading.of_token(token)
    v[page[there], row[there]] = 1.0
    numbers, right = reading.scale_numbers(), reading.right_scales()

    def is_selected(digit: torch.Tensor) -> torch.Tensor:
        out = reading.out(k, v, torch.where(digit == 1, 1.0, 2.0**-20), 1.0, channel)
        return out[..., :1] > 0.9

    parts = [(is_selected(digit).to(torch.int64), weight) for digit, weight in _digits(numbers, 2)]
    # Where small scales select as well, no scale of keys is read.
    got = torch.where(is_selected(torch.zeros_like(numbers)), -1, _joined(parts))
    return _of_scales(reading, "k_scale", got, right, token, there)


def _values(reading: _Reading, i: int, channel: int) -> list[Finding]:
    """Return a finding where codes of values come from elsewhere."""
    token, there = reading.selected(i)
    k = reading.keys_at(token, there, channel)
    codes = torch.arange(_FIRST_CODE, _FIRST_CODE + _CODES, device=token.device)
    table = torch.tensor([reading.form.magnitude(int(c)) for c in codes], dtype=torch.float64)
    table = table.to(token.device)
    numbers, right = reading.code_numbers(reading.Dv), reading.right_codes(reading.Dv)
    parts = [
        (_nearest(reading.out(k, table[digit], _NO_DIGIT, 1.0, channel), table), weight)
        for digit, weight in _digits(numbers, _CODES)
    ]
    got = _joined(parts)
    shape = (*right.shape[:2], reading.group, *right.shape[2:])
    wanted = right[:, :, None].expand(shape)
    whole, where = wanted.clone(), torch.zeros(shape, dtype=torch.bool, device=token.device)
    entries = torch.arange(len(token), device=token.device)[there]
    whole[entries, :, :, token[there]] = got[there]
    where[entries, :, :, token[there]] = True
    return _told(reading, "v", whole, wanted, where, numbers.shape)


def _value_scales(reading: _Reading, i: int, channel: int) -> list[Finding]:
    """Return a finding where the scale of a value comes from elsewhere."""
    token, there = reading.selected(i)
    k = reading.keys_at(token, there, channel)
    v = reading.x.q.new_ones(reading.x.v_cache.shape)
    digits = torch.arange(_SCALE_DIGITS, device=token.device)
    exponents = digits // _EIGHTHS + _LEAST_EXPONENT
    table = 2.0 ** exponents.to(torch.float64) * (17 / 16 + digits % _EIGHTHS / _EIGHTHS)
    parts = [
        (_nearest(reading.out(k, v, _NO_DIGIT, table[digit], channel)[..., :1], table), weight)
        for digit, weight in _digits(reading.scale_numbers(), _SCALE_DIGITS)
    ]
    return _of_scales(reading, "v_scale", _joined(parts), reading.right_scales(), token, there)


def _of_scales(
    reading: _Reading, name: str, got: torch.Tensor, right: torch.Tensor, token: torch.Tensor,
    there: torch.Tensor,
) -> list[Finding]:  # fmt: skip
    """Return a finding where scales of one key of each entry come from elsewhere."""
    shape = (*right.shape[:2], reading.group, right.shape[2], 1)
    wanted = right[:, :, None, :, None].expand(shape)
    whole, where = wanted.clone(), torch.zeros(shape, dtype=torch.bool, device=right.device)
    entries = torch.arange(len(token), device=token.device)[there]
    whole[entries, :, :, token[there]] = got[there]
    where[entries, :, :, token[there]] = True
    return _told(reading, name, whole, wanted, where, reading.scale_numbers().shape)


_AXES_OF = {1: ("head",), 2: ("page", "head"), 3: ("page", "row", "head"),
            4: ("page", "row", "head", "channel")}  # fmt: skip


def _place(number: int, shape: torch.Size) -> str:
    """Name the place of a number in a cache or in its scales."""
    if number < 0:
        return _NO_PLACE
    index = []
    for size in reversed(shape):
        number, place = divmod(number, size)
        index.append(place)
    names = zip(_AXES_OF[len(shape)], reversed(index), strict=True)
    return ", ".join(f"{axis} {place}" for axis, place in names)


def _told(
    reading: _Reading, name: str, got: torch.Tensor, want: torch.Tensor, compared: torch.Tensor,
    shape: torch.Size,
) -> list[Finding]:  # fmt: skip
    """Return a finding that names an element of a query head, and the wrong and the right place."""
    # (B, Hk, group, N, columns) as (B, H, N, columns).
    got, want, compared = (x.flatten(1, 2) for x in (got, want, compared))
    bad = compared & (got != want)
    if not bad.any():
        return []
    # The element that the finding is about.
    worst = int(torch.where(bad, (got - want).abs(), -1).argmax())
    right, wrong = (_place(int(x.flatten()[worst]), shape) for x in (want, got))
    what = "scale" if name.endswith("scale") else "code"
    if shape == (1,):
        right = "the one scale"
    claim = f"takes its {what} from {wrong} in place of {right}"
    return found_where(reading.trial, f"{name} of a head", bad, got, want, C6, claim, compared)
