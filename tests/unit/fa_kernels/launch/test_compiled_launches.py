"""The launch cache launches the same code as Triton would."""

from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from fa_kernels.kernels.common.jit import kernel  # noqa: E402
from fa_kernels.runtime import launch_cache  # noqa: E402
from tests.unit.fa_kernels.launch.compiling import printed_by  # noqa: E402


@kernel
def add_kernel(y_ptr, x_ptr, count: tl.int64, value, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < count)
    if TWICE:
        x += x
    tl.store(y_ptr + places, x + value, mask=places < count)


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(launch_cache, "_compiled", {})
    monkeypatch.setattr(launch_cache, "_orders", {})


def added(x: torch.Tensor, value: int, dtype=torch.float32, **constants: Any) -> torch.Tensor:
    y = torch.zeros(x.shape, dtype=dtype, device=x.device)
    values = {"y_ptr": y, "x_ptr": x, "count": x.numel(), "value": value}
    constants = {"BLOCK": 16, "TWICE": False, **constants}
    launch_cache.run(add_kernel, (triton.cdiv(x.numel(), 16),), {**values, **constants})
    return y


CALLS = (
    {"dtype": torch.float32}, {"dtype": torch.float16}, {"dtype": torch.int64}, {"TWICE": True},
    {"BLOCK": 32}, {"num_warps": 1}, {"value": 2**40, "dtype": torch.int64}, {"value": -5},
    {"value": 2**31, "dtype": torch.int64}, {"value": -(2**31), "dtype": torch.int64},
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("of", [torch.int32, torch.int64])
def test_each_call_gets_its_code_whatever_came_before(call, of, device):
    x = torch.arange(37, device=device).to(of)
    for options in ({}, call, {}, call):
        options = {"value": 3, **options}
        found = added(x, **options)
        wanted = x.to(found.dtype) * (1 + options.get("TWICE", False)) + options["value"]
        assert torch.equal(found, wanted.to(found.dtype))


def test_a_second_launch_bypasses_triton(device, monkeypatch):
    if device == "cpu":
        pytest.skip("nothing is compiled in the interpreter")
    x = torch.arange(37, device=device).float()
    wanted = added(x, 3)
    calls = []
    original = triton.JITFunction.run
    monkeypatch.setattr(
        triton.JITFunction, "run", lambda *a, **o: (calls.append(o), original(*a, **o))[1]
    )
    assert torch.equal(added(x, 3), wanted)
    # Code does not depend on the address or the length of a tensor.
    assert torch.equal(added(x[1:], 3), wanted[1:])
    assert not calls
    added(x, 3, TWICE=True)
    assert len(calls) == 1


class Code:
    """Compiled code with Triton's interface that records its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[object, ...]] = []

    def __getitem__(self, grid):
        return lambda *args: self.launches.append((grid, *args))


class Parameter(NamedTuple):
    """Triton's description of a kernel's parameter."""

    name: str
    annotation: str

    @property
    def is_constexpr(self) -> bool:
        return self.annotation == "constexpr"


class Compiled(triton.JITFunction):
    """A kernel of (x, y, BLOCK, WIDE) that compiles without a GPU and counts compilations."""

    def __init__(self, of_y: str = "") -> None:
        object.__setattr__(self, "fn", lambda: None)
        object.__setattr__(self, "arg_names", ["x", "y", "BLOCK", "WIDE"])
        annotations = ["", of_y, "constexpr", "constexpr"]
        parameters = map(Parameter, self.arg_names, annotations)
        object.__setattr__(self, "params", list(parameters))
        object.__setattr__(self, "hash", "of no function")
        object.__setattr__(self, "made", [])

    def __hash__(self):
        return id(self)

    def __getitem__(self, grid):
        def run(*_args, **_constants):
            self.made.append(Code())
            return self.made[-1]

        return run


def test_cached_code_is_found_by_types_and_constants_only(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel, other = Compiled(), Compiled()
    x, y = torch.zeros(3), torch.zeros(5, dtype=torch.float16)

    def run(kernel, x, y, kinds=None, **options):
        named = {"x": x, "y": y, "WIDE": True, "BLOCK": 16, "num_warps": 4, **options}
        launch_cache.run(kernel, (7,), named, kinds)

    for _ in range(2):
        run(kernel, x, 5)
    (code,) = kernel.made
    # Constants are in the order of the parameters, without options; grids have three axes or more.
    assert code.launches == [((7, 1, 1), x, 5, 16, True)]
    run(kernel, x + 1, -6)
    assert len(code.launches) == 2
    run(other, x, 5)
    assert (len(other.made), len(kernel.made)) == (1, 1)
    for count, (args, options) in enumerate(
        [
            ((y, 5), {}), ((x, 2**31), {}), ((x, 2**63), {}), ((x, (5,)), {}), ((x, (y,)), {}),
            ((x, 5), {"BLOCK": 32}), ((x, 5), {"num_warps": 8}), ((x, 5), {"kinds": ("a",)}),
            ((x, 5), {"kinds": ("b",)}),
        ],
        start=2,
    ):  # fmt: skip
        for _ in range(2):
            run(kernel, *args, **options)
        assert len(kernel.made) == count
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    run(kernel, x, 5)
    assert len(kernel.made) == count + 1


def test_an_annotated_parameter_has_one_code_for_all_values(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel, x = Compiled("i64"), torch.zeros(3)
    for y in (5, 2**40, -1):
        launch_cache.run(kernel, (7,), {"x": x, "y": y, "BLOCK": 16, "WIDE": True})
    (code,) = kernel.made
    assert [y for _, _, y, *_ in code.launches] == [2**40, -1]


def test_named_arguments_are_passed_in_the_order_of_parameters(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel, x = Compiled(), torch.zeros(3)
    for _ in range(2):
        launch_cache.run(kernel, (7,), {"WIDE": True, "y": 5, "num_warps": 4, "x": x, "BLOCK": 16})
    for _ in range(2):
        launch_cache.run(kernel, (7,), {"x": x, "BLOCK": 16, "y": 5, "WIDE": True, "num_warps": 4})
    (code,) = kernel.made
    assert code.launches == [((7, 1, 1), x, 5, 16, True)] * 3
    named = {"x": x, "y": 5, "BLOCK": 16, "WIDE": True, "num_warps": 4, "num_stages": 2}
    launch_cache.run(kernel, (7,), named)
    assert len(kernel.made) == 2


@pytest.mark.parametrize("named", [{"y": 5, "z": 1}, {}], ids=str)
def test_a_name_too_many_or_too_few_is_left_to_triton(named, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel, x = Compiled(), torch.zeros(3)
    launch_cache.run(kernel, (7,), {"x": x, "y": 5, "BLOCK": 16, "WIDE": True})
    launch_cache.run(kernel, (7,), {"x": x, "BLOCK": 16, "WIDE": True, **named})
    assert len(kernel.made) == 2
    assert not kernel.made[0].launches


def test_a_kernel_with_a_function_as_argument_is_left_to_triton(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel, predicate = Compiled(), Compiled()
    named = {"x": torch.zeros(1), "y": 5, "BLOCK": 1, "WIDE": True, "PREDICATE": predicate}
    for _ in range(2):
        launch_cache.run(kernel, (1,), named)
    assert len(kernel.made) == 2


class Hashed:
    """A function whose key Triton computes when it is read, and notes in ``seen``."""

    def __init__(self, fn: Any, seen: list[str]) -> None:
        self.fn, self.seen, self.hash = fn, seen, None

    @property
    def cache_key(self):
        if self.hash is None:
            self.hash = self.fn.__name__
            self.seen.append(self.hash)
        return self.hash


def test_callees_are_hashed_before_their_callers():
    seen: list[str] = []
    names: dict[str, Any] = {"constant": 3}
    source = (
        "def last(): return constant\n"
        "def first(): return last() + second() + len('')\n"
        "def second(): return last() + first() + nobody\n"
        "def caller(): return first() + second()\n"
    )
    exec(source, names)
    functions = {name: Hashed(names[name], seen) for name in ("last", "first", "second", "caller")}
    names.update(functions)
    launch_cache._hash_callees_first(functions["caller"])
    assert seen.index("last") == 0
    assert seen[-1] == "caller"
    assert sorted(seen) == sorted(functions)


def test_keys_do_not_depend_on_the_kernels_launched_before():
    found = printed_by("tests.unit.fa_kernels.launch.key_code")
    assert found["a key"] == found["after other kernels"]
