"""Kernels without a fault: the right parts of the others hold."""

from paged_attention import decode, paged
from plain_attention import Attention, kernel
from tiled_attention import tiled

EVERYTHING = {
    "dtypes": ("fp16", "bf16", "fp32", "fp64"), "backward": True, "gqa": True, "lse_grad": True,
    "masks": ("causal", "window", "padding", "custom"),
}  # fmt: skip


@kernel(**EVERYTHING, score_mods=("softcap", "alibi", "bias", "sinks"))
class Plain(Attention):
    """No fault."""


Tiled = tiled("", dtypes=("fp16", "bf16", "fp32"), gqa=True, masks=("causal", "window", "padding"))
TiledBackward = tiled(
    "", backward=True, backward_reads=("out", "lse"), gqa=True,
    masks=("causal", "window", "padding"),
)  # fmt: skip
Paged = paged("", cache=("paged", "append"), masks=("causal", "window"))
Decoding = decode()
