"""assert_attention_close() with score modifications and a gradient of lse."""

from __future__ import annotations

import math

import pytest
import torch

from fa_verify import Mask, assert_attention_close
from fa_verify.oracles.stream import normal

B, H, Hk, M, N, D, Dv = 2, 4, 2, 20, 26, 16, 8
CAUSAL = Mask(causal=True)
# The modifications that have a gradient.
LEAVES = ("bias", "sinks")
MODS = {
    "softcap": {"softcap": 1.5},
    "slopes of heads": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 2.0])},
    "slopes of entries": {"alibi_slopes": torch.tensor([[0.5, 0.25, 0.125, 2.0], [1.0] * 4])},
    "bias": {"bias": normal(1, "bias", (B, H, M, N)).half()},
    "bias of keys": {"bias": normal(2, "bias", (1, H, 1, N)).float()},
    "sinks": {"sinks": torch.tensor([0.5, -math.inf, 2.0, -1.0])},
    "all": {
        "softcap": 3.0, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 2.0]),
        "bias": normal(3, "bias", (B, 1, M, N)).half(),
        "sinks": torch.tensor([0.5, 0.25, 2.0, -1.0]),
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of its own, where replay files are written."""
    monkeypatch.chdir(tmp_path)


def attention(q, k, v, *, mask, softcap=None, alibi_slopes=None, bias=None, sinks=None):
    """out and lse of attention with score modifications, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(H // Hk, 1) for x in (k, v))
    scores = 0.25 * q @ k.mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        distance = (torch.arange(M)[:, None] + N - M - torch.arange(N)).abs()
        scores = scores - alibi_slopes.double().view(-1, H, 1, 1) * distance
    if bias is not None:
        scores = scores + bias.double()
    scores = scores.masked_fill(~mask.dense(B, H, M, N), -math.inf)
    if sinks is not None:
        sink = sinks.double().view(1, H, 1, 1).expand(B, H, M, 1)
        scores = torch.cat([scores, sink], 3)
    return torch.softmax(scores, -1)[..., :N] @ v, scores.logsumexp(-1)


def call(mods, *, loss_of_lse=False, mask=CAUSAL):
    """All arguments of a correct call in fp16, by name."""
    shapes = {"q": (B, H, M, D), "k": (B, Hk, N, D), "v": (B, Hk, N, Dv), "dout": (B, H, M, Dv)}
    given = {name: normal(0, name, x).half() for name, x in shapes.items()}
    leaves = {name: given[name].clone().requires_grad_() for name in "qkv"}
    mods = {n: x.clone().requires_grad_() if n in LEAVES else x for n, x in mods.items()}
    out, lse = attention(**leaves, mask=mask, **mods)
    losses, gradients = [out], [given["dout"].double()]
    if loss_of_lse:
        given["dlse"] = normal(0, "dlse", (B, H, M)).float()
        losses, gradients = [*losses, lse], [*gradients, given["dlse"].double()]
    of = {f"d{name}": x for name, x in leaves.items()}
    of |= {f"d{name}": mods[name] for name in LEAVES if name in mods}
    found = torch.autograd.grad(losses, [*of.values()], gradients)
    results = dict(zip(of, found, strict=True))
    mods = {name: x.detach() if name in LEAVES else x for name, x in mods.items()}
    return {**given, **mods, **results, "out": out.detach().half(),
            "lse": lse.detach().float(), "mask": mask}  # fmt: skip


def message(arguments: dict) -> str:
    """The failure message of a call."""
    with pytest.raises(AssertionError) as failed:
        assert_attention_close(**arguments)
    return str(failed.value)


@pytest.mark.parametrize("mods", MODS.values(), ids=MODS)
def test_a_correct_call_passes_and_one_without_the_modification_fails(mods):
    arguments = call(mods)
    assert_attention_close(**arguments)
    for name in mods:
        without = {n: x for n, x in arguments.items() if n not in (name, f"d{name}")}
        found = message(without)
        assert "G1 accuracy: out of attention" in found
        assert f"{name}=" not in found
        assert f"{name} of" not in found


def test_the_last_lines_name_the_modifications():
    found = message({**call(MODS["all"]), "softcap": 4.0})
    said = ", sm_scale=0.25, softcap=4, alibi_slopes of shape (4,), bias of shape (2, 1, 20, 26), "
    assert f"{said}sinks of shape (4,);" in found


@pytest.mark.parametrize("name", ["bias", "bias of keys"])
def test_a_wrong_dbias_is_found(name):
    arguments = call(MODS[name])
    arguments["dbias"] *= 1.02
    found = message(arguments)
    assert found.startswith("G1 accuracy: dbias of attention leaves the derived bound")
    assert found.count("G1") == 1


def test_a_wrong_dsinks_is_found():
    arguments = call(MODS["sinks"], loss_of_lse=True)
    assert_attention_close(**arguments)
    arguments["dsinks"] *= 1.02
    found = message(arguments)
    assert found.startswith("G1 accuracy: dsinks of attention leaves the derived bound")
    assert found.count("G1") == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_sink_that_is_no_score_is_refused(value):
    arguments = call(MODS["sinks"])
    arguments["sinks"] = torch.tensor([0.5, value, 2.0, -1.0])
    with pytest.raises(ValueError, match=f"^sinks holds {value}; needs finite or -inf"):
        assert_attention_close(**arguments)


def test_dsinks_without_sinks_are_refused():
    arguments = {**call(MODS["sinks"])}
    del arguments["sinks"]
    with pytest.raises(ValueError, match="dsinks is given without sinks"):
        assert_attention_close(**arguments)


def test_dbias_alone_is_judged():
    arguments = {n: x for n, x in call(MODS["bias"]).items() if n not in ("dq", "dk", "dv", "lse")}
    assert_attention_close(**arguments)
    arguments["dbias"][1, 2, 3, 4] += 1
    assert "worst at b=1 h=2 m=3 n=4" in message(arguments)


def test_a_gradient_of_lse_takes_part_in_the_loss():
    arguments = call({}, loss_of_lse=True)
    assert_attention_close(**arguments)
    dlse = arguments.pop("dlse")
    found = message(arguments)
    assert "dq of attention" in found
    assert "dv of attention" not in found
    # lse alone: dout is 0, and so is dv.
    arguments = {**call({}), "dlse": dlse}
    of_both = call({}, loss_of_lse=True)
    of_lse = {n: of_both[n].double() - arguments[n].double() for n in ("dq", "dk")}
    of_lse = {name: x.half() for name, x in of_lse.items()}
    del arguments["dout"], arguments["dv"]
    found = message({**arguments, **{name: x * 2 for name, x in of_lse.items()}})
    assert "dq of attention" in found


def test_a_nan_in_dlse_is_refused_where_its_row_sees_a_key():
    mask = Mask(seqlens_k=(N, 0))
    arguments = call({}, loss_of_lse=True)
    arguments["dlse"][0, 1, 2] = math.nan
    with pytest.raises(ValueError, match=r"^dlse is nan at b=0 h=1 m=2; needs to be finite"):
        assert_attention_close(**arguments)
    arguments = {**call({}, loss_of_lse=True), "mask": mask}
    arguments["dlse"][1] = math.nan
    assert "out of attention" in message(arguments)


def test_a_bias_may_hold_anything_where_it_is_hidden():
    arguments = call(MODS["bias"])
    hidden = ~CAUSAL.dense(B, H, M, N).expand(B, H, M, N)
    arguments["bias"] = arguments["bias"].masked_fill(hidden, -math.inf)
    assert_attention_close(**arguments)
