"""Run Gluon kernels for Hopper from their sources in Triton's interpreter.

``load`` executes sources with replacements of Gluon's modules. They ignore layouts, represent tiles
of shared memory as NumPy arrays, and delegate asynchronous operations to ``machine``. The rest of
the language is that of Triton's interpreter.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from fa_verify.simulator.gluon.machine import (
    Barrier,
    DeadlockError,
    Machine,
    Product,
    RaceError,
    poison,
)

__all__ = ["Emulated", "load"]

_GLUON = "triton.experimental.gluon"
_LANGUAGE = f"{_GLUON}.language"
_HOPPER = f"{_LANGUAGE}.nvidia.hopper"
# File and line of a function to its code as rewritten by the interpreter.
_REWRITTEN: dict[tuple[str, int], CodeType] = {}


class _Layout:
    """Stands for any layout. The emulation does not assign elements to threads."""

    def __init__(self, *_: object, **__: object) -> None:
        pass


class _SharedTensor:
    """A tensor in shared memory, or a view of one."""

    def __init__(self, emulation: _Emulation, data: Any, dtype: Any) -> None:
        self._emulation, self.data, self.dtype = emulation, data, dtype

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def _part(self, data: Any) -> _SharedTensor:
        return _SharedTensor(self._emulation, data, self.dtype)

    def index(self, index: Any) -> Any:
        return self._part(self.data[int(index)])

    def reshape(self, shape: Sequence[int]) -> _SharedTensor:
        part = self.data.reshape([int(x) for x in shape])
        assert np.may_share_memory(part, self.data)
        return self._part(part)

    def permute(self, order: Sequence[int]) -> _SharedTensor:
        return self._part(self.data.transpose([int(x) for x in order]))

    def slice(self, start: Any, length: Any, dim: Any = 0) -> _SharedTensor:
        place = [slice(None)] * self.data.ndim
        place[int(dim)] = slice(int(start), int(start) + int(length))
        return self._part(self.data[tuple(place)])

    def load(self, _layout: object) -> Any:
        return self._emulation.tensor(self.data, self.dtype)

    def store(self, value: Any) -> None:
        self._emulation.machine.pause()
        self._emulation.work["stored"] += self.data.size
        assert value.dtype == self.dtype or not value.shape
        self.data[...] = value.handle.data
        self._emulation.machine.wrote(self.data)


class _Barriers:
    """An array of barriers in shared memory."""

    def __init__(self, number: int, count: int) -> None:
        self._barriers = [Barrier(f"barrier {number}.{i}") for i in range(count)]

    def index(self, index: Any) -> Barrier:
        return self._barriers[int(index)]


class _Described:
    """A TMA descriptor: a tensor in global memory, read in blocks and padded with zeros."""

    def __init__(self, name: str, descriptor: Any, dtype: Any) -> None:
        self.name = name
        self._base = descriptor.base.detach().as_strided(descriptor.shape, descriptor.strides)
        self.dtype = dtype
        self.layout = descriptor.layout
        shape = list(descriptor.block_shape)
        size = descriptor.base.element_size()
        self.block_type = SimpleNamespace(shape=shape, nbytes=int(np.prod(shape)) * size)

    def _inside(self, place: Sequence[Any]) -> tuple[slice, ...]:
        starts = [int(x) for x in place]
        return tuple(
            slice(start, min(start + block, size))
            for start, block, size in zip(
                starts, self.block_type.shape, self._base.shape, strict=True
            )
        )

    def block(self, place: Sequence[Any]) -> Any:
        """Return the block at a position, in the interpreter's representation (bf16 as uint16)."""
        part = self._base[self._inside(place)]
        whole = torch.zeros(self.block_type.shape, dtype=self._base.dtype)
        whole[tuple(slice(0, size) for size in part.shape)] = part
        return whole.view(torch.int16).numpy().view(np.uint16) if _is_bf16(whole) else whole.numpy()


def _is_bf16(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16


class _Emulation:
    """Gluon's modules, connected to the machine of the current launch."""

    def __init__(self, accumulator: str, seed: str, processors: int) -> None:
        import triton.language as tl
        from triton.runtime import interpreter

        self._tl, self._interpreter = tl, interpreter
        self.error = interpreter.InterpreterError
        self.accumulator = getattr(tl, accumulator)
        self.seed = seed
        self.processors = processors
        self.launches = 0
        self.work: Counter[str] = Counter()
        self.machine = Machine(seed)

    def launched(self, programs: Callable[..., None], kernel: Any) -> Callable[..., None]:
        """Wrap all programs of a launch as the only program of an interpreted kernel."""
        executor: Callable[..., None] = self._interpreter.GridExecutor(
            programs, kernel.arg_names, (1,), kernel.pre_run_hooks
        )
        return executor

    def run(self, program: Callable[[], None], grid: Sequence[int]) -> None:
        """Run a program for each position of a grid, ``processors`` at a time."""
        builder = self._interpreter.interpreter_builder
        sizes = (*grid, 1, 1)[:3]
        builder.set_grid_dim(*sizes)
        places = list(np.ndindex(*sizes))
        self.launches += 1
        self._allocated: Counter[int] = Counter()
        # Address of a scalar to whether the last atomic addition to it had release semantics.
        self._released: dict[int, bool] = {}
        self.machine = Machine(
            f"{self.seed}/{self.launches}", lambda number: builder.set_grid_idx(*places[number])
        )
        self.machine.run([program] * len(places), self.processors)

    def tensor(self, data: Any, dtype: Any) -> Any:
        handle = self._interpreter.TensorHandle(data.copy(), dtype)
        return self._tl.tensor(handle, self._tl.block_type(dtype, list(data.shape)))

    def described(self, name: str, descriptor: Any) -> _Described:
        of = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
        dtype = getattr(self._tl, of.get(descriptor.base.dtype, "float64"))
        return _Described(name, descriptor, dtype)

    def modules(self) -> dict[str, ModuleType]:
        """Return the modules by the names that kernels import."""
        import triton

        language = _Language(self)
        mbarrier = SimpleNamespace(
            MBarrierLayout=_MBarrierLayout, init=self._init, wait=self._wait, expect=self._expect,
            arrive=self._arrive,
        )  # fmt: skip
        tma = SimpleNamespace(async_load=self._async_load)
        hopper = _module(
            _HOPPER, mbarrier=mbarrier, tma=tma, warpgroup_mma=self._product,
            warpgroup_mma_wait=self._wait_for_products,
            fence_async_shared=lambda: self.machine.fence(),
        )  # fmt: skip

        def jit(function: Any = None, **_: object) -> Any:
            if function is None:
                return jit
            return _rewritten_once(triton.jit(function), self._interpreter)

        gluon = _module(_GLUON, jit=jit, language=language)
        return {
            # The real ``triton.experimental`` may already have the real gluon as an attribute.
            "triton.experimental": _module("triton.experimental", gluon=gluon),
            _GLUON: gluon,
            _LANGUAGE: language,
            _HOPPER: hopper,
        }

    # The methods below are called by kernels.

    def allocate(self, dtype: Any, shape: Sequence[Any], layout: object) -> Any:
        program = self.machine.now.program.number
        self._allocated[program] += 1
        data = np.empty([int(x) for x in shape], self._interpreter._get_np_dtype(dtype))
        if isinstance(layout, _MBarrierLayout):
            return _Barriers(self._allocated[program], len(data))
        poison(data)
        return _SharedTensor(self, data, dtype)

    def warp_specialize(self, parts: Sequence[Any], *_: object) -> None:
        self.machine.split([partial(function, *given) for function, given in parts])

    def store(self, pointer: Any, value: Any, **others: Any) -> None:
        self.machine.wrote_globally()
        self._tl.store(pointer, value, **others)

    def atomic_add(self, pointer: Any, value: Any, *others: Any, sem: str = "acq_rel") -> Any:
        add = partial(self._tl.atomic_add, pointer, value, *others, sem=sem)
        if pointer.shape:
            # Sums of tiles, which no program reads before the launch has ended.
            self.machine.pause()
            return add()
        place, dtype = int(pointer.handle.data.item()), pointer.dtype.element_ty
        if np.any(value.handle.data if hasattr(value, "handle") else value):
            self.machine.pause()
            if sem in ("release", "acq_rel"):
                self.machine.check_announced("global")
            before = add()
            self._released[place] = sem in ("release", "acq_rel")
            self.machine.pause()
            return before
        held = (ctypes.c_char * (dtype.primitive_bitwidth // 8)).from_address(place)
        self.machine.look(place, lambda: held.raw)
        if sem not in ("acquire", "acq_rel") or not self._released.get(place, True):
            raise RaceError(
                f"{self.machine.now.name} reads memory without acquire, or that was not released"
            )
        return add()

    def _init(self, barrier: Barrier, count: int) -> None:
        barrier.init(int(count))

    def _wait(self, barrier: Barrier, phase: Any) -> None:
        self.machine.wait(barrier, int(phase))

    def _expect(self, barrier: Barrier, size: Any) -> None:
        barrier.expect(int(size))

    def _arrive(self, barrier: Barrier, *, count: int = 1) -> None:
        self.machine.pause()
        self.machine.check_announced("shared")
        barrier.arrive(int(count))

    def _async_load(
        self, source: _Described, place: Any, barrier: Barrier, target: _SharedTensor
    ) -> None:
        self.work[source.name] += 1
        values = source.block(place)
        assert list(values.shape) == target.shape
        self.machine.copy(target.data, values, source.block_type.nbytes, barrier)

    def _product(
        self, a: Any, b: _SharedTensor, acc: Any, *, use_acc: bool = True, is_async: bool = False
    ) -> Any:
        shared = [x for x in (a, b) if isinstance(x, _SharedTensor)]
        for x in shared:
            self.machine.check_fenced(x.data)

        def make(*operands: Any) -> Any:
            loaded = iter(operands)
            left, right = (
                self.tensor(next(loaded), x.dtype) if isinstance(x, _SharedTensor) else x
                for x in (a, b)
            )
            before = _value(acc) if use_acc else None
            return self._tl.dot(
                left, right, before, input_precision="ieee", out_dtype=self.accumulator
            )

        product = Product([x.data for x in shared], make)
        self.machine.issue(product)
        if is_async:
            return product
        self.work["synchronous"] += 1
        self.machine.finish_products(0)
        return product.result

    def _wait_for_products(self, left: Any, deps: Sequence[Any]) -> Any:
        self.machine.finish_products(int(left))
        values = [_value(x) for x in deps]
        return values[0] if len(values) == 1 else tuple(values)


def _value(x: Any) -> Any:
    if not isinstance(x, Product):
        return x
    assert x.is_done, "the result of a product is used before the product was waited for"
    return x.result


class _MBarrierLayout:
    pass


class _Language(ModuleType):
    """The module ``gl``: layouts and shared memory; other names are looked up in ``tl``."""

    def __init__(self, emulation: _Emulation) -> None:
        super().__init__(_LANGUAGE)
        tl = emulation._tl
        self.float32 = emulation.accumulator
        for name in ("SliceLayout", "BlockedLayout", "DotOperandLayout", "NVMMASharedLayout",
                     "NVMMADistributedLayout", "SwizzledSharedLayout",
                     "DistributedLinearLayout"):  # fmt: skip
            setattr(self, name, _Layout)
        self.arange = lambda start, end, _layout=None: tl.arange(start, end)
        self.full = lambda shape, value, dtype, _layout=None: tl.full(shape, value, dtype)
        self.zeros = lambda shape, dtype, _layout=None: tl.zeros(shape, dtype)
        self.convert_layout = lambda x, _layout, assert_trivial=False: x
        self.thread_barrier = lambda: emulation.machine.thread_barrier()
        self.store = emulation.store
        self.atomic_add = emulation.atomic_add
        self.allocate_shared_memory = emulation.allocate
        self.warp_specialize = emulation.warp_specialize

    def __getattr__(self, name: str) -> Any:
        import triton.language as tl

        return getattr(tl, name)


class Emulated:
    """An emulated kernel, launched as a compiled one with ``kernel[grid](...)``.

    Attributes:
        work: Counts over all launches: "synchronous" products, elements "stored" in shared memory,
            and TMA copies by the name of the kernel's parameter.
    """

    def __init__(self, kernel: Any, emulation: _Emulation) -> None:
        self._kernel, self._emulation = kernel, emulation
        self.work: Counter[str] = Counter()

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            named |= zip(self._kernel.arg_names, arguments, strict=False)
            # Only descriptors have a block shape.
            given = {
                name: self._emulation.described(name, x) if hasattr(x, "block_shape") else x
                for name, x in named.items()
            }
            self._emulation.work = self.work
            program = self._kernel.rewrite()

            @wraps(program)
            def programs(**converted: Any) -> None:
                sizes = grid(converted) if callable(grid) else grid
                self._emulation.run(partial(program, **converted), sizes)

            # The interpreter calls it as it would call each of them.
            programs.__signature__ = inspect.signature(program)  # type: ignore[attr-defined]
            try:
                self._emulation.launched(programs, self._kernel)(**given)
            except self._emulation.error as error:
                if isinstance(error.__cause__, DeadlockError | RaceError):
                    raise error.__cause__ from None
                raise

        return launch


def load(
    sources: Mapping[str, str],
    kernels: Sequence[str],
    accumulator: str = "float32",
    seed: str = "0",
    processors: int = 1,
) -> list[Emulated]:
    """Load kernels from modules that import Gluon, to be launched on CPU tensors.

    Call ``fa_verify.simulator.interpreter.repair.repair()`` first. The modules can import each
    other, and are removed from ``sys.modules`` afterwards.

    Args:
        sources: Source text of each module by its full name, in an order in which they can be
            imported.
        kernels: Names of the kernels to return.
        accumulator: Dtype that replaces float32 in the kernels: "float32", or "float64" to test
            the logic without rounding.
        seed: Seed of the order in which partitions run and copies arrive.
        processors: Number of programs that run at a time.

    Returns:
        The kernels, in the order of ``kernels``.
    """
    emulation = _Emulation(accumulator, seed, processors)
    found: dict[str, Any] = {}
    with _replaced(emulation.modules()):
        for name, text in sources.items():
            module = _executed(name, text)
            sys.modules[name] = module
            found |= {
                kernel: getattr(module, kernel) for kernel in kernels if hasattr(module, kernel)
            }
    return [Emulated(found[name], emulation) for name in kernels]


def _module(name: str, **attributes: object) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(attributes)
    return module


def _executed(name: str, text: str) -> ModuleType:
    """Execute a module's source; register it with linecache, from which the interpreter reads."""
    import linecache

    path = f"<emulated {name} {hashlib.sha256(text.encode()).hexdigest()}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    module = ModuleType(name)
    module.__file__ = path
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def _rewritten_once(kernel: Any, interpreter: Any) -> Any:
    """Make a kernel reuse the code of an earlier kernel with the same file and line."""
    function, rewrite = kernel.fn, kernel.rewriter.rewrite_ast
    place = function.__code__.co_filename, function.__code__.co_firstlineno

    def rewritten() -> Any:
        if place not in _REWRITTEN:
            made = rewrite()
            _REWRITTEN[place] = made.__code__
            return made
        # The interpreter adds its names to the globals of a function that it rewrites.
        names = function.__globals__
        for name, x in vars(interpreter).items():
            names.setdefault(name, x)
        made = FunctionType(_REWRITTEN[place], names, function.__name__, function.__defaults__)
        made.__kwdefaults__ = function.__kwdefaults__
        made.__annotations__ = function.__annotations__
        return made

    kernel.rewriter.rewrite_ast = rewritten
    return kernel


@contextmanager
def _replaced(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Add modules to ``sys.modules`` inside the block and restore it afterwards."""
    before = dict(sys.modules)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - set(before):
            del sys.modules[name]
        sys.modules.update(before)
