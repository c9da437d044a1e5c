"""The default subject: ``fa_kernels.flash_attention`` with its declarations."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from types import ModuleType

import torch

import fa_kernels
from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.problem import Problem
from fa_verify.properties.inputs.families import NO_ALIBI, NO_BIAS, NO_SINKS, TORCH_DTYPES
from fa_verify.properties.kernels.packing import Packing

__all__ = ["adapted", "flash_attention"]

# Suffixes of a configuration's name: for calls with deterministic=False, and then for packed
# sequences.
_ONE_PASS = "-one_pass"
_PACKED = "-packed"
_IN_ONE_PASS = ("default", "16x16", "16x32", "32x16")
_PACKED_OF = ("default", "default-one_pass", "16x16", "32x16-one_pass", "16x16-split3")


def adapted(package: ModuleType):
    """Wrap ``flash_attention`` of ``fa_kernels``, or of a copy, as a subject with declarations."""
    resolution = importlib.import_module(f"{package.__name__}.configs")
    hopper = importlib.import_module(f"{package.__name__}.launch.hopper")

    def flash_attention(q, k, v, *, mask, sm_scale, config="default", **beside):
        """Return (out, lse)."""
        of_padded = config.removesuffix(_PACKED)
        options = {
            "sm_scale": sm_scale, "return_lse": True,
            "deterministic": not of_padded.endswith(_ONE_PASS),
            "config": of_padded.removesuffix(_ONE_PASS), **beside,
        }  # fmt: skip
        if config.endswith(_PACKED):
            return _in_a_row(q, k, v, mask, options)
        return package.flash_attention(q, k, v, **_masking(q, k, v, mask, options), **options)

    def _masking(q, k, v, mask, options) -> dict[str, object]:
        """Return the mask arguments: a plain mask's fields, or a BlockSparse mask's block_mask.

        Other masks, and BlockSparse masks that are not made of whole tiles, are passed as ``mask``.
        """
        if type(mask) is Mask:
            return {
                "causal": mask.causal, "window_size": (mask.window_left, mask.window_right),
                "seqlens_q": mask.seqlens_q, "seqlens_k": mask.seqlens_k,
            }  # fmt: skip
        if not isinstance(mask, BlockSparse) or mask.side % _largest_tile(q, v, options):
            return {"mask": mask}
        beside = Mask(
            causal=mask.causal, window_left=mask.window_left, window_right=mask.window_right,
            seqlens_q=mask.seqlens_q, seqlens_k=mask.seqlens_k,
        )  # fmt: skip
        blocks = mask.blocks(q.shape[1], q.shape[2], k.shape[2]).to(q.device)
        return {"mask": beside, "block_mask": blocks, "block_size": mask.side}

    def _in_a_row(q, k, v, mask, options):
        """Call the varlen function on packed sequences, with padding after the last one."""
        if "bias" in options:
            raise NotImplementedError("packed sequences take no bias")
        lengths = mask.lengths(q.shape[0], q.shape[2], k.shape[2])
        if not mask.is_plain:
            # A predicate needs the lengths that offsets leave to the device.
            mask = dataclasses.replace(mask, seqlens_q=lengths[0], seqlens_k=lengths[1])
        of_q = Packing.of(lengths[0], q.shape[2], q.device)
        of_k = Packing.of(lengths[1], k.shape[2], q.device)
        out, lse = package.flash_attention_varlen(
            of_q.packed(q), of_k.packed(k), of_k.packed(v), mask=mask,
            cu_seqlens_q=of_q.offsets, cu_seqlens_k=of_k.offsets, **options,
        )  # fmt: skip
        return of_q.padded(out), of_q.padded(lse.mT)

    def packed(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask, sm_scale,
        config="default", **beside,
    ):  # fmt: skip
        """Call the varlen function with offsets in tensors. A predicate needs them as ints."""
        name = config.removesuffix(_PACKED)
        if not mask.is_plain:
            cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        else:
            mask = dataclasses.replace(mask, seqlens_q=None, seqlens_k=None)
        out, lse = package.flash_attention_varlen(
            q, k, v, mask=mask, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, sm_scale=sm_scale,
            return_lse=True, deterministic=not name.endswith(_ONE_PASS),
            config=name.removesuffix(_ONE_PASS), **beside,
        )  # fmt: skip
        return out, lse

    def pooled(q, k, v, *, pool, pool_size, mask, sm_scale, config="default", **beside):
        """Return the pooled probabilities. For packed sequences, computes the padded problem."""
        if beside:
            raise NotImplementedError("pooled probabilities do not support score modifications")
        name = config.removesuffix(_PACKED)
        _, lse = flash_attention(q, k, v, mask=mask, sm_scale=sm_scale, config=name)
        options = {
            "config": name.removesuffix(_ONE_PASS), "deterministic": not name.endswith(_ONE_PASS),
        }  # fmt: skip
        masking = _masking(q, k, v, mask, options)
        return package.pooled_attention_probs(
            q, k, lse, pool=pool, pool_size=pool_size, sm_scale=sm_scale,
            config=options["config"], **masking,
        )  # fmt: skip

    def _largest_tile(q, v, options) -> int:
        """Return the side of the largest tile; a block_mask needs multiples of it as block size."""
        tiles = tiles_of(options["config"], q.dtype, q.shape[3], v.shape[3], q.device)
        if not options["deterministic"]:
            tiles = dataclasses.replace(tiles, dkdv=tiles.one_pass)
        return max(max(x.block_m, x.block_n) for x in (tiles.forward, tiles.dkdv, tiles.dq))

    def tiles_of(config: str, dtype: torch.dtype, D: int, Dv: int, device: torch.device):
        """Return the resolved tile configuration."""
        large = resolution.holds_large_tiles(device)
        return resolution.resolve(config, dtype, D, Dv, large=large)

    def declared(config) -> dict[str, object]:
        """Return the declarations that a configuration replaces."""
        # Triton passes float32 numbers to tensor cores without a ``cvt.rna.tf32``. Tensor cores
        # truncate them, and the repaired interpreter does the same.
        dots = {"dots": "tf32", "tf32_conversion": "truncate", "dtypes": ("fp32",)}
        # Splits divide the key tiles that a query tile sees, so their borders move with chunks.
        splits = (
            {}
            if config.splits in (None, 1)
            else {"splits": config.splits, "same_bits": ("batch", "heads", "varlen", "inference")}
        )
        return (dots if config.dots == "tf32" else {}) | splits

    def config_of(problem: Problem):
        """Return the resolved tile configuration of a problem."""
        name = problem.config.removesuffix(_PACKED).removesuffix(_ONE_PASS)
        device = torch.device(problem.device)
        return tiles_of(name, TORCH_DTYPES[problem.dtype], problem.D, problem.Dv, device)

    def modifies_scores(problem: Problem) -> bool:
        return (problem.softcap, problem.alibi, problem.bias) != (None, NO_ALIBI, NO_BIAS)

    def is_on_hopper(problem: Problem) -> bool:
        """Whether the backward, and without splits the forward, runs on Hopper's kernels."""
        return (
            config_of(problem).hopper
            and type(problem.mask) is Mask
            and not modifies_scores(problem)
            and hopper.takes_shapes(TORCH_DTYPES[problem.dtype], problem.D, problem.Dv)
            and hopper.is_there(torch.device(problem.device))
        )

    def tiles(problem: Problem) -> tuple[int, int]:
        """Return (block_m, block_n) of the forward kernel."""
        config = config_of(problem)
        if config.splits is None and is_on_hopper(problem):
            return hopper.forward_tile(problem.Dv)
        return config.forward.block_m, config.forward.block_n

    def kvcache_splits(problem: Problem) -> int:
        """Return the most splits of the keys of an entry in a call with a cache."""
        return max(1, -(-problem.N // config_of(problem).split_keys))

    def paths(problem: Problem) -> tuple[str, ...]:
        """Return the kernels that a problem runs on, once for each of their features."""
        is_split = config_of(problem).splits is not None
        backward = "portable"
        if is_on_hopper(problem):
            backward = f"hopper-{hopper.padded(problem.D, problem.Dv)}"
        forward = "portable" if is_split else backward
        passes = "one-pass" if _ONE_PASS in problem.config else "two-pass"
        features = {
            "packed": problem.config.endswith(_PACKED),
            "block map": type(problem.mask) is not Mask,
            "score mods": modifies_scores(problem),
            "sinks": problem.sinks != NO_SINKS,
        }
        found = [f"{backward} {passes}", *[f"{forward} split"] * is_split]
        for kernel in dict.fromkeys((forward, backward)):
            found += [f"{kernel} {feature}" for feature, has in features.items() if has]
        return tuple(found)

    flash_attention.returns_lse = True
    flash_attention.lse_grad = True
    flash_attention.score_mods = ("softcap", "alibi", "bias", "sinks")
    flash_attention.l_order = "tile"
    flash_attention.backward_reads = ("out", "lse")
    flash_attention.softcap_slope = "exact"
    flash_attention.bitwise = ("G4", "G5", "G8", "G9", "G10")
    flash_attention.same_bits = ("batch", "chunks", "heads", "varlen", "inference")
    # Offsets, cache_seqlens and page tables are on the device, where no call waits for them.
    flash_attention.refuses = (
        "heads not divisible", "head dims differ", "lengths differ", "batch differs",
        "dtypes differ", "devices differ", "too many keys", "wrong bias shape",
    )  # fmt: skip
    configs = {name: declared(x) for name, x in package.CONFIGS.items()}
    configs |= {f"{name}{_ONE_PASS}": configs[name] | {"atomic": ("dq",)} for name in _IN_ONE_PASS}
    flash_attention.configs = configs | {f"{name}{_PACKED}": configs[name] for name in _PACKED_OF}
    flash_attention.tiles = tiles
    flash_attention.paths = paths
    flash_attention.pooled = pooled
    flash_attention.packed = packed
    flash_attention.states = package.combine_attention_states
    flash_attention.kvcache = functools.partial(
        package.flash_attention_with_kvcache, return_lse=True
    )
    flash_attention.kvcache_splits = kvcache_splits
    return flash_attention


flash_attention = adapted(fa_kernels)
