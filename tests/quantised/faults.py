"""Kernels of caches of codes that are wrong in one way, each beside the incident that it repeats.

``--fa-kernel=tests/quantised/faults.py:NAME`` loads one. ``ORIGINS`` has all names.
"""

from __future__ import annotations

import torch

from tests.quantised.kernel import LEAST_SCALE, CodesKernel, declared

__all__ = ["ORIGINS"]

# The origin of each fault; an own one where it is a variation of another.
ORIGINS: dict[str, str] = {}


def fault(origin: str, **words):
    """Add an instance of a class to this module's kernels, under the name of the class."""

    def added(cls):
        ORIGINS[cls.__name__] = origin
        globals()[cls.__name__] = declared(cls(), **words)
        return globals()[cls.__name__]

    return added


@fault("one scale for all heads")
class ScaleOfHead0(CodesKernel):
    def scales(self, name, scale, page, row, codes):
        return super().scales(name, scale, page, row, codes)[..., :1].expand(codes.shape[:3])


@fault("keys take the scales of values, and values those of keys")
class ScalesSwapped(CodesKernel):
    def __call__(self, q, k_cache, v_cache, *, k_scale=None, v_scale=None, **given):
        return super().__call__(q, k_cache, v_cache, k_scale=v_scale, v_scale=k_scale, **given)


@fault("sgl-project/sglang#18882: a scale that kernels are not given")
class ScaleOfValuesDropped(CodesKernel):
    def scales(self, name, scale, page, row, codes):
        found = super().scales(name, scale, page, row, codes)
        return torch.ones_like(found) if name == "v" else found


@fault("vllm-project/vllm#51091: scales of keys reset to 1, and codes left as they are")
class ScaleOfKeysDropped(CodesKernel):
    def scales(self, name, scale, page, row, codes):
        found = super().scales(name, scale, page, row, codes)
        return torch.ones_like(found) if name == "k" else found


@fault("vllm-project/vllm#42580: a path that returns codes before it reads either scale")
class BothScalesDropped(CodesKernel):
    def scales(self, name, scale, page, row, codes):
        return torch.ones_like(super().scales(name, scale, page, row, codes))


@fault("scales of the row before, within a page")
class ScaleOfTheNeighbouringToken(CodesKernel):
    def scales(self, name, scale, page, row, codes):
        return super().scales(name, scale, page, (row - 1).clamp(min=0), codes)


@fault("a number is its code divided by its scale")
class DividesByTheScale(CodesKernel):
    def dequantised(self, codes, scales):
        return codes / scales[..., None]


@fault(
    "vllm-project/vllm#49716: strides of scales from a shape that they do not have",
    cache_scales=("token_head",),
)
class SwappedStridesOfScales(CodesKernel):
    def scales(self, name, scale, page, row, codes):
        size, heads = scale.shape[1:]
        wrong = scale.contiguous().view(-1, heads, size).transpose(1, 2)
        return super().scales(name, wrong, page, row, codes)


@fault("an append truncates in place of rounding")
class Truncates(CodesKernel):
    def cast(self, x, dtype):
        codes = super().cast(x, dtype)
        if dtype == torch.int8:
            return x.trunc().clamp(-128, 127).to(dtype)
        # Codes of one sign ascend, so that the code below is the number next to 0.
        too_large = codes.float().abs() > x.abs()
        return (codes.view(torch.uint8) - too_large.to(torch.uint8)).view(dtype)


@fault("an append of numbers beyond the range gives NaN, as PyTorch 2.11 casts")
class DoesNotSaturate(CodesKernel):
    def cast(self, x, dtype):
        codes = super().cast(x, dtype)
        if dtype == torch.int8:
            return x.round().to(torch.int32).to(dtype)
        beyond = x.abs() > (464.0 if dtype == torch.float8_e4m3fn else 61439.0)
        return torch.where(beyond, 0x7F, codes.view(torch.uint8)).to(torch.uint8).view(dtype)


@fault("codes of e5m2 are read as e4m3", cache_formats=("e4m3fn", "e5m2"))
class E5m2ReadAsE4m3(CodesKernel):
    def read(self, codes, dtype):
        return super().read(codes, torch.float8_e4m3fn)


@fault("codes of int8 are read as uint8", cache_formats=("int8",))
class Int8ReadAsUint8(CodesKernel):
    def read(self, codes, dtype):
        return codes.float()


@fault("scales of pages by their place in the table", cache=("paged",), cache_scales=("page",))
class ScalesOfPagesByPlace(CodesKernel):
    def scales(self, name, scale, page, row, codes):
        if scale.ndim == 2:
            first = torch.arange(page.shape[1]) // self.size
            page = first.clamp(max=len(scale) - 1).expand_as(page)
        return super().scales(name, scale, page, row, codes)

    def __call__(self, q, k_cache, v_cache, **given):
        self.size = k_cache.shape[1]
        return super().__call__(q, k_cache, v_cache, **given)


@fault("a scale that is applied twice")
class ScaleAppliedTwice(CodesKernel):
    def dequantised(self, codes, scales):
        return super().dequantised(super().dequantised(codes, scales), scales)


@fault("the scale of the first key for all keys of a page")
class ScaleOfTheFirstRow(CodesKernel):
    def scales(self, name, scale, page, row, codes):
        return super().scales(name, scale, page, torch.zeros_like(row), codes)


@fault("ovg-project/kvcached#435: scales of all pages at one address")
class ScalesOfPage0(CodesKernel):
    def scales(self, name, scale, page, row, codes):
        return super().scales(name, scale, torch.zeros_like(page), row, codes)


@fault("scales rounded to bf16 where they are read")
class ScalesInBf16(CodesKernel):
    def scales(self, name, scale, page, row, codes):
        return super().scales(name, scale, page, row, codes).bfloat16().float()


@fault("an append does not write the scales of its tokens", cache_scales=("token_head",))
class ScalesNotWritten(CodesKernel):
    def write(self, name, cache, scale, new, places):
        before = scale.clone() if scale is not None and scale.ndim == 3 else None
        super().write(name, cache, scale, new, places)
        if before is not None:
            scale.copy_(before)


@fault("an append divides by 447, or 126, in place of the largest", cache_scales=("token_head",))
class AnotherLargest(CodesKernel):
    def made_scales(self, x, largest):
        return super().made_scales(x, largest - 1)


@fault("an append of zeros makes NaN: no least scale", cache_scales=("token_head",))
class NoLeastScale(CodesKernel):
    def made_scales(self, x, largest):
        found = x.abs().amax(-1) / largest
        return torch.where(found < LEAST_SCALE, found, super().made_scales(x, largest))


@fault("an append multiplies by the rounded reciprocal, which differs in few codes")
class MultipliesByTheReciprocal(CodesKernel):
    def quotient(self, x, factor):
        return x * (1 / factor)


@fault("an append takes the largest of all heads of a token", cache_scales=("token_head",))
class ScaleOfAllHeads(CodesKernel):
    def made_scales(self, x, largest):
        found = super().made_scales(x, largest)
        return found.amax(-1, keepdim=True).expand_as(found)


@fault("ties away from 0 in place of to even")
class TiesAway(CodesKernel):
    def cast(self, x, dtype):
        if dtype == torch.int8:
            return (x + torch.where(x < 0, -0.5, 0.5)).trunc().clamp(-128, 127).to(dtype)
        return super().cast(x * (1 + 2.0**-20), dtype)


@fault("codes of the neighbouring head", gqa=True)
class CodesOfTheNextHead(CodesKernel):
    def codes(self, cache, page, row):
        return super().codes(cache, page, row).roll(1, 2)


@fault("keys take codes of values where D and Dv agree")
class LastChannelTwice(CodesKernel):
    def codes(self, cache, page, row):
        found = super().codes(cache, page, row)
        return torch.cat((found[..., :-1], found[..., -2:-1]), -1) if found.shape[3] > 1 else found
