"""flash_attention under torch.compile: one graph, the bits of eager, no recompilation by size."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fa_verify.oracles.masks.document import Document
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.masks.prefix_lm import PrefixLM
from fa_verify.oracles.stream import normal

pytest.importorskip("triton")

from fa_kernels import Config, Tile, flash_attention, flash_attention_varlen

CONFIG = "16x16"
# (M, N) of one tile and of several tiles.
SIZES = [(17, 21), (33, 5), (9, 40)]


def compiled(function=flash_attention, backend="aot_eager", **how):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **how), counter


def drawn(device, M=17, N=21, B=2, dtype=torch.float32):
    shapes = {"q": (B, 2, M, 8), "k": (B, 1, N, 8), "v": (B, 1, N, 6)}
    made = (normal(0, name, shape).to(dtype).to(device) for name, shape in shapes.items())
    return [x.requires_grad_() for x in made]


def answers(call, leaves, wanted=(0, 1, 2), **arguments):
    """out and lse, and the gradients of a loss on both."""
    leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(leaves)]
    out, lse = call(*leaves, return_lse=True, **{"config": CONFIG, **arguments})
    loss = out.square().sum() + torch.where(lse.isfinite(), lse, 0).square().sum()
    return out, lse, *torch.autograd.grad(loss, [leaves[i] for i in wanted])


def assert_same(got, want):
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)
        assert x.stride() == y.stride()


ARGUMENTS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "ints": {"seqlens_q": (5, 3), "seqlens_k": (0, 4)},
    "mask": {"mask": Mask(causal=True, seqlens_k=(5, 4))},
    "predicate": {"mask": PrefixLM(prefix=4)},
    "predicates": {"mask": PrefixLM(prefix=4) & Mask(window_left=3)},
    "entries": {"mask": Document(starts=((3,), (1, 2)))},
    "config": {"config": Config(forward=Tile(16, 16), dkdv=Tile(16, 32), dq=Tile(32, 16))},
    "name": {"config": "tf32"},
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_call_has_the_bits_of_an_eager_one(arguments, dynamic, device):
    call, counter = compiled(dynamic=dynamic)
    leaves = drawn(device)
    assert_same(answers(call, leaves, **arguments), answers(flash_attention, leaves, **arguments))
    assert counter.frame_count == 1


# Offsets for tensors of 17 rows and of 21.
PACKED = {
    "ints": {"cu_seqlens_q": (0, 5, 5, 16), "cu_seqlens_k": (0, 9, 12, 21)},
    "tensors": {
        "cu_seqlens_q": torch.tensor([0, 5, 16], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 9, 21], dtype=torch.int32),
    },
    "longest": {
        "cu_seqlens_q": torch.tensor([0, 5, 16], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 9, 21], dtype=torch.int32),
        "max_seqlen_q": 12,
        "max_seqlen_k": 13,
    },
    "predicate": {
        "cu_seqlens_q": (0, 5, 16),
        "cu_seqlens_k": (0, 9, 21),
        "mask": PrefixLM(prefix=4, seqlens_q=(5, 11), seqlens_k=(9, 12)),
    },
}


@pytest.mark.parametrize("arguments", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_call_of_packed_sequences_has_the_bits_of_an_eager_one(
    arguments, dynamic, device
):
    call, counter = compiled(flash_attention_varlen, dynamic=dynamic)
    leaves = [x[0].transpose(0, 1) for x in drawn(device, B=1)]
    given = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()
    }
    assert_same(answers(call, leaves, **given), answers(flash_attention_varlen, leaves, **given))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"softcap": 2.0},
        {"alibi_slopes": torch.tensor([0.5, -0.25])},
        {"bias": normal(0, "bias", (1, 2, 17, 1)).float()},
        {"sinks": torch.tensor([0.5, -torch.inf])},
    ],
    ids="-".join,
)
def test_a_compiled_call_modifies_scores_as_an_eager_one_does(arguments, device):
    leaves = drawn(device)
    arguments = {
        x: y.to(device) if isinstance(y, torch.Tensor) else y for x, y in arguments.items()
    }
    got, want = (answers(call, leaves, **arguments) for call in (compiled()[0], flash_attention))
    assert_same(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_compiled_call_has_the_bits_of_an_eager_one_in_any_dtype(dtype, device):
    leaves = drawn(device, dtype=dtype)
    assert_same(answers(compiled()[0], leaves), answers(flash_attention, leaves))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
def test_a_compiled_call_computes_any_gradients(wanted, device):
    leaves = drawn(device)
    got, want = (answers(call, leaves, wanted) for call in (compiled()[0], flash_attention))
    assert_same(got, want)


@pytest.mark.parametrize("of", ["out", "lse"])
def test_a_compiled_call_may_have_a_loss_on_one_output(of, device):
    def loss(*leaves):
        out, lse = flash_attention(*leaves, return_lse=True, config=CONFIG)
        return (out if of == "out" else lse).square().sum()

    leaves = drawn(device)[: 3 if of == "out" else 2]
    rest = drawn(device)[len(leaves) :]
    got, want = (torch.autograd.grad(x(*leaves, *rest), leaves) for x in (compiled(loss)[0], loss))
    assert_same(got, want)


@pytest.mark.parametrize("name", ["causal", "ints", "predicate"])
def test_other_lengths_are_not_compiled_again(name, device):
    call, counter = compiled(dynamic=True)
    for M, N in SIZES:
        given = ARGUMENTS[name]
        if name == "ints":
            # Other lengths in a tensor.
            given = {"seqlens_q": (M, M - 3), "seqlens_k": (N, N - 2)}
        leaves = drawn(device, M, N)
        assert_same(answers(call, leaves, **given), answers(flash_attention, leaves, **given))
    assert counter.frame_count == 1


def test_lengths_that_are_marked_are_not_compiled_again(device):
    call, counter = compiled()
    for M, N in SIZES:
        leaves = drawn(device, M, N)
        for x in leaves:
            torch._dynamo.mark_dynamic(x, 2)
        call(*leaves, config=CONFIG)
    assert counter.frame_count == 1


def test_lengths_in_a_tensor_are_an_input_of_the_graph(device):
    call, counter = compiled()
    leaves = drawn(device)
    for lengths in ((3, 21), (0, 7)):
        given = {"seqlens_k": torch.tensor(lengths, dtype=torch.int32, device=device)}
        assert_same(answers(call, leaves, **given), answers(flash_attention, leaves, **given))
    assert counter.frame_count == 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_another_scale_has_another_answer(dynamic, device):
    call, _ = compiled(dynamic=dynamic)
    leaves = drawn(device)
    for scale in (0.3, 0.7, 2, 0.3):
        got, want = (answers(x, leaves, sm_scale=scale) for x in (call, flash_attention))
        assert_same(got, want)


@pytest.mark.parametrize("dynamic", [None, True])
def test_another_mask_has_another_answer(dynamic, device):
    call, counter = compiled(dynamic=dynamic)
    leaves = drawn(device)
    masks = [PrefixLM(prefix=2), PrefixLM(prefix=5), PrefixLM(prefix=5, window_left=2)]
    for mask in (*masks, *masks):
        assert_same(answers(call, leaves, mask=mask), answers(flash_attention, leaves, mask=mask))
    assert counter.frame_count == len(masks)


def test_a_call_between_other_code_is_in_its_graph(device):
    def block(q, k, v):
        out = flash_attention(2 * q, k.flip(2), v + 1, causal=True, config=CONFIG)
        return torch.nn.functional.gelu(out.transpose(1, 2).flatten(2))

    leaves = drawn(device)
    call, counter = compiled(block)
    got, want = (
        (out, *torch.autograd.grad(out.square().sum(), leaves))
        for out in (call(*leaves), block(*leaves))
    )
    assert_same(got, want)
    assert counter.frame_count == 1


# Warnings of modules that inductor imports.
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a compiler")
def test_the_default_compiler_takes_a_call(device):
    leaves = drawn(device)
    call, _ = compiled(backend="inductor")
    mask = PrefixLM(prefix=4)
    assert_same(answers(call, leaves, mask=mask), answers(flash_attention, leaves, mask=mask))


def test_a_wrong_argument_is_refused_in_its_own_words(device):
    q, k, v = (x.detach() for x in drawn(device))
    with pytest.raises(Exception, match="sm_scale is -1; needs to be finite and > 0"):
        compiled()[0](q, k, v, sm_scale=-1)
    # With graph breaks, the error is the same as in eager code.
    with pytest.raises(ValueError, match=r"^k has head_dim 7; needs that of q, 8"):
        torch.compile(flash_attention, backend="aot_eager")(q, k[..., :7], v)


def test_a_second_derivative_of_a_compiled_call_is_refused(device):
    leaves = drawn(device)
    out = compiled()[0](*leaves, config=CONFIG)
    (dq,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        dq.sum().backward()


def test_an_exported_call_has_the_bits_of_an_eager_one(device):
    class Block(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attention(q, k, v, causal=True, config=CONFIG)

    leaves = [x.detach() for x in drawn(device)]
    program = torch.export.export(Block(), tuple(leaves))
    assert torch.equal(program.module()(*leaves), Block()(*leaves))
