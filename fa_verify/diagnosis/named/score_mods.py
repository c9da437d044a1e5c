"""Faults of softcap, ALiBi, bias and sinks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fa_verify.diagnosis.named.masks import axes, finite
from fa_verify.diagnosis.named.named import BACKWARD, Change, Named
from fa_verify.diagnosis.named.passes import Pass

__all__ = ["SCORE_MODS"]


def _without_mod(name: str) -> Change:
    def change(p: Pass, block_m: int, block_n: int) -> bool:
        there = getattr(p, name) is not None
        setattr(p, name, None)
        return there

    return change


def _plain_slope(p: Pass, block_m: int, block_n: int) -> bool:
    p.capped_slope = False
    return p.softcap is not None


def _capped_hidden(p: Pass) -> float | None:
    return None if p.softcap is None else -p.softcap


def _cap_in_base_2(p: Pass, block_m: int, block_n: int) -> bool:
    p.scale *= math.log2(math.e)  # c tanh(x log2(e) / c)
    return p.softcap is not None


def _caps(*what: str) -> Change:
    """Return a change of what is capped: the dots alone, or the scores with what is added."""

    def change(p: Pass, block_m: int, block_n: int) -> bool:
        there = {"dots": True, "alibi": p.slopes is not None, "bias": p.bias is not None}
        p.capped = what
        return p.softcap is not None and any(there.get(name) for name in what)

    return change


def _alibi(make: Callable[[Pass], torch.Tensor]) -> Change:
    def change(p: Pass, block_m: int, block_n: int) -> bool:
        if p.slopes is None:
            return False
        distance = make(p)
        changed = not torch.equal(distance, p.distance)
        p.distance = distance
        return changed

    return change


def _own_index(p: Pass) -> torch.Tensor:
    m, n, _, _ = axes(p)
    return (m - n).abs().double().expand(p.distance.shape)


def _bias_times(factor: Callable[[Pass], float]) -> Change:
    def change(p: Pass, block_m: int, block_n: int) -> bool:
        if p.bias is None:
            return False
        p.bias = p.bias * factor(p)
        return factor(p) != 1

    return change


def _sink(make: Callable[[Pass, torch.Tensor], torch.Tensor]) -> Change:
    def change(p: Pass, block_m: int, block_n: int) -> bool:
        if p.sink is None:
            return False
        sink = make(p, p.sink)
        changed = not torch.equal(sink, p.sink)
        p.sink = sink
        return changed

    return change


def _of_key_head(p: Pass, sink: torch.Tensor) -> torch.Tensor:
    return sink[:, torch.arange(sink.shape[1], device=sink.device) // p.case.problem.G]


SCORE_MODS: tuple[Named, ...] = (
    Named("hidden keys capped", "hidden scores were capped too, and visible then",
          tuple(finite(_capped_hidden, *x)
                for x in ((False, False), (False, True), (True, False))),
          ("everywhere", "forward", "the forward alone"), "mn",
          on_record="flashinfer#350; onnx#7865; flash-attention#1025"),
    Named("no slope of the softcap", "dS were not multiplied by the derivative of the softcap",
          (_plain_slope,), BACKWARD, on_record="flash-attention#1033; tokamax#1121"),
    Named("no softcap", "the softcap were ignored", (_without_mod("softcap"),)),
    Named("softcap in base 2", "scores were scaled to base 2 before tanh", (_cap_in_base_2,),
          on_record="sgl-kernel-xpu#491"),
    Named("softcap of the sum", "the softcap were applied after ALiBi or the bias were added",
          (_caps("scores", "alibi"), _caps("scores", "bias"), _caps("scores", "alibi", "bias"))),
    Named("softcap before the scale", "dots were capped before they were scaled",
          (_caps("dots"),)),
    Named("ALiBi negated", "ALiBi had the other sign", (_alibi(lambda p: -p.distance),),
          on_record="fla@7362d874"),
    Named("ALiBi from the own index", "ALiBi's distance were taken from the row's own index",
          (_alibi(_own_index),), on_record="flash-attention#907"),
    Named("ALiBi one too far", "ALiBi's distance were one too large",
          (_alibi(lambda p: p.distance + (p.distance > 0)), _alibi(lambda p: p.distance + 1)),
          on_record="vllm#945"),
    Named("ALiBi scaled", "ALiBi were multiplied by sm_scale, as the dots are",
          (_alibi(lambda p: p.distance * p.case.problem.scale),)),
    Named("no ALiBi", "ALiBi were ignored", (_without_mod("slopes"),)),
    Named("bias in base 2", "the bias were in base 2 already",
          (_bias_times(lambda _: math.log(2)), _bias_times(lambda _: math.log2(math.e))),
          on_record="segment-anything-fast#71"),
    Named("bias scaled", "the bias were multiplied by sm_scale, as the dots are",
          (_bias_times(lambda p: p.case.problem.scale),)),
    Named("no bias", "the bias were ignored", (_without_mod("bias"),)),
    Named("no sink", "the sink were ignored", (_without_mod("sink"),),
          on_record="modular#6198; TransformerEngine#2541"),
    Named("sink scaled", "the sink were multiplied by sm_scale",
          (_sink(lambda p, sink: p.case.problem.scale * sink),),
          on_record="rocm-libraries#12227"),
    Named("sink in base 2", "the sink were in base 2 already",
          (_sink(lambda _, sink: math.log(2) * sink),
           _sink(lambda _, sink: math.log2(math.e) * sink)),
          on_record="rocm-libraries#12227, a sink at the wrong scale"),
    Named("sink of the key head", "the sink were that of the key/value head",
          (_sink(_of_key_head),), on_record="modular#6591, another head's"),
)  # fmt: skip
