"""flash-linear-attention's softmax attention, which is causal, with an optional window."""

import importlib.util
import os

from brought import importable, stand_in

from fa_verify import attention_kernel

os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")
importable("fla-org/flash-linear-attention", "fla/ops/attn/parallel.py")
if importlib.util.find_spec("einops") is None:
    # It sums the gradients of a group of heads.
    stand_in("einops", reduce=lambda x, _, g, reduction: x.unflatten(2, (-1, g)).sum(3))
from fla.ops.attn.parallel import parallel_attn


@attention_kernel(
    always_causal=True, m_ne_n=False, masks=("causal", "window"), dtypes=("fp16", "bf16"),
    zero_sizes=False,
)  # fmt: skip
def attention(q, k, v, *, mask, sm_scale):
    """Attend with (B, T, H, K), as its documentation says."""
    if mask.window_right not in (None, 0):
        raise NotImplementedError("its window ends at the diagonal")
    width = None if mask.window_left is None else mask.window_left + 1
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return parallel_attn(q, k, v, scale=sm_scale, window_size=width).transpose(1, 2)
