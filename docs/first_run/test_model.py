"""A test of one's own, with tensors that the model computes."""

import torch

from fa_verify import Mask, assert_attention_close


def test_attention_of_the_model():
    """The output lies within the derived bound."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 40, 64, dtype=torch.float16)
    scores = q.float() @ k.float().mT / 64**0.5
    # The causal mask is one key too wide.
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(2)
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    out = (weights @ v.float()).half()
    assert_attention_close(out, q, k, v, mask=Mask(causal=True))
