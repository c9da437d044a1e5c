"""Launches of Hopper's forward that a call's arguments keep: the same as without them."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import triton

from fa_kernels.configs import resolve
from fa_kernels.kernels.hopper.forward import hopper_forward_kernel
from fa_kernels.launch import hopper, portable
from fa_kernels.runtime import launch_cache
from fa_kernels.validation.arguments import Arguments

PROCESSORS = {"cpu": 4, "meta": 2**20}
SHAPE = (1, 2, 300, 64)


class Code:
    """Compiled code with Triton's interface that records its launches in ``seen``."""

    def __init__(self, seen: list[tuple[Any, ...]], number: int) -> None:
        self.seen, self.number = seen, number

    def __getitem__(self, grid):
        def run(*given: Any) -> None:
            self.seen.append((self.number, grid, *given))

        return run


class Kernel(triton.JITFunction):
    """A kernel with the parameters of Hopper's forward that compiles without a GPU."""

    def __init__(self) -> None:
        for name in ("fn", "arg_names", "params"):
            object.__setattr__(self, name, getattr(hopper_forward_kernel, name))
        object.__setattr__(self, "hash", "of no function")
        object.__setattr__(self, "seen", [])
        object.__setattr__(self, "compiled", 0)

    def __getitem__(self, grid):
        def run(**named: Any) -> Code:
            object.__setattr__(self, "compiled", self.compiled + 1)
            code = Code(self.seen, self.compiled)
            code[(*grid, 1, 1)](*(named[name] for name in self.arg_names))
            return code

        return run


@pytest.fixture
def kernel(monkeypatch):
    """The only kernel that calls launch, on any device."""
    made = Kernel()
    monkeypatch.setattr(portable, "run", None)
    monkeypatch.setattr(hopper, "_kernels", lambda: (made, None, None))
    monkeypatch.setattr(hopper, "is_there", lambda _device: True)
    monkeypatch.setattr(hopper, "processors", lambda device: PROCESSORS[device.type])
    monkeypatch.setattr(launch_cache, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return made


def tensor(shape=SHAPE, dtype=torch.float16, device="cpu", start: int = 0) -> torch.Tensor:
    """A contiguous tensor that starts ``start`` elements after an aligned address."""
    whole = torch.zeros(torch.Size(shape).numel() + 64, dtype=dtype, device=device)
    aligned = -whole.data_ptr() % 16 // dtype.itemsize
    return whole[aligned + start :][: torch.Size(shape).numel()].view(shape)


def rows_first(x: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, stored as (B, S, H, D)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def unbounded(**options: Any) -> Arguments:
    lengths = torch.tensor([300], dtype=torch.int32)
    config = resolve("default", torch.float16, 64)
    return Arguments(lengths, lengths, 600, 600, 0.125, config, **options)


def plain(x: Any) -> Any:
    """Returns the value of an argument; of a tensor its dtype, device, shape and alignment."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.device, x.shape, x.data_ptr() % 16
    if hasattr(x, "base"):
        return plain(x.base), x.shape, x.strides, x.block_shape, x.layout
    return x


def launched(kernel: Kernel, tensors: list[torch.Tensor], arguments: Arguments):
    """The last launch of a call, as it was and by its plain values."""
    portable.launch_forward(*tensors, arguments)
    return kernel.seen[-1], [plain(x) for x in kernel.seen[-1]]


OTHER = {
    # Parts of a tensor have its strides.
    "rows": [tensor()[:, :, :100], tensor(), tensor()],
    "keys": [tensor(), tensor()[:, :, :100], tensor()[:, :, :100]],
    "columns": [tensor(), tensor(), tensor()[..., :56]],
    "dtype": [tensor(dtype=torch.bfloat16) for _ in range(3)],
    "device": [tensor(device="meta") for _ in range(3)],
    **{
        f"strides of {name}": [rows_first(tensor()) if of == name else tensor() for of in "qkv"]
        for name in "qkv"
    },
    **{f"alignment of {name}": [tensor(start=of == name) for of in "qkv"] for name in "qkv"},
}


@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_a_call_of_other_tensors_has_its_own_launch(other, kernel):
    arguments, usual = unbounded(), [tensor() for _ in range(3)]
    wanted = []
    for given in (usual, other):
        for _ in range(2):
            wanted.append(launched(kernel, given, unbounded())[1])
    assert wanted[1] != wanted[3]
    for _ in range(4):
        assert launched(kernel, usual, arguments)[1] == wanted[1]
        assert launched(kernel, other, arguments)[1] == wanted[3]
    assert len(arguments.launches) == 2 - any(x.data_ptr() % 16 for x in other)


@pytest.mark.parametrize(
    "other", [{"sinks": torch.zeros(2)}, {"window_right": 0}, {"sm_scale": 0.5}], ids=str
)
def test_other_arguments_have_their_own_launch(other, kernel):
    usual, given = unbounded(), [tensor() for _ in range(3)]
    changed = dataclasses.replace(usual, **other)
    found = []
    for arguments in (usual, changed) * 3:
        found.append(launched(kernel, given, arguments)[1][1:])
    assert found == found[:2] * 3
    assert found[0] != found[1]
    for arguments in (usual, changed):
        last = launched(kernel, given, arguments)[0]
        named = dict(zip(kernel.arg_names, last[2:], strict=True))
        assert named["seqlens_q_ptr"] is arguments.seqlens_q
        assert arguments.sinks is None or named["sinks_ptr"] is arguments.sinks


def test_a_launch_that_is_kept_gets_the_tensors_of_its_call(kernel):
    arguments = unbounded()
    for _ in range(4):
        q, k, v = (tensor() for _ in range(3))
        out, lse = portable.launch_forward(q, k, v, arguments)
        named = dict(zip(kernel.arg_names, kernel.seen[-1][2:], strict=True))
        for name, x in (("q", q), ("k", k), ("v", v)):
            assert named[f"{name}_desc"].base is x
        assert named["out_ptr"] is out
        assert named["lse_ptr"] is lse
    assert len(arguments.launches) == 1


def test_programs_that_take_turns_have_a_counter_of_their_own(kernel):
    arguments, given = unbounded(), [tensor((1, 8, 100, 64)) for _ in range(3)]
    counters = []
    for _ in range(5):
        last, _ = launched(kernel, given, arguments)
        assert last[1] == (PROCESSORS["cpu"], 1, 1)
        counters.append(last[2 + kernel.arg_names.index("counter_ptr")])
        assert counters[-1].tolist() == [0]
        counters[-1].fill_(7)
    assert len({x.data_ptr() for x in counters}) == 5
    assert len(arguments.launches) == 1


@pytest.mark.parametrize(
    ("rows", "causal", "programs"),
    [
        # A tile has 192 rows, or 128. Four multiprocessors: heads of three tiles are long.
        (300, False, PROCESSORS["cpu"]),
        (500, False, 8 * 3),
        (500, True, PROCESSORS["cpu"]),
    ],
)
def test_programs_of_long_heads_take_turns_if_tiles_differ(rows, causal, programs, kernel):
    given = [tensor((1, 8, rows, 64)) for _ in range(3)]
    arguments = dataclasses.replace(
        unbounded(), window_left=2 * rows, window_right=0 if causal else 2 * rows
    )
    last, _ = launched(kernel, given, arguments)
    assert last[1] == (programs, 1, 1)


def test_a_launch_keeps_no_tensor_of_its_call(kernel):
    arguments, given = unbounded(), [tensor() for _ in range(3)]
    for _ in range(3):
        outputs = portable.launch_forward(*given, arguments)
    alive = [weakref.ref(x) for x in (*given, *outputs)]
    kernel.seen.clear()
    del given, outputs
    assert len(arguments.launches) == 1
    assert not any(x() is not None for x in alive)


def test_arguments_keep_no_more_launches_than_their_limit(kernel, monkeypatch):
    monkeypatch.setattr(hopper, "_LAUNCHES", 3)
    arguments = unbounded()
    for rows in (10, 20, 30, 40, 50):
        given = [tensor((1, 2, rows, 64)), tensor(), tensor()]
        for _ in range(3):
            launched(kernel, given, arguments)
            assert len(arguments.launches) <= 3
    assert len(arguments.launches) == 2


def test_nothing_is_kept_of_a_call_that_another_kernel_takes(kernel):
    config = dataclasses.replace(resolve("default", torch.float16, 64), hopper=False)
    arguments = dataclasses.replace(unbounded(), config=config)
    q, k, v = (tensor() for _ in range(3))
    out, lse = portable.empty_outputs(q, v)
    for _ in range(3):
        assert not hopper.launch_hopper_forward(q, k, v, out, lse, arguments, 0)
    assert not arguments.launches
    assert not kernel.seen
