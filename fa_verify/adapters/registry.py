"""The kernels that ``--fa-kernel=NAME`` accepts, and whether each can run on this machine."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

__all__ = ["NAMED", "Named", "kernel_table", "named", "spec_of"]


@dataclass(frozen=True)
class Named:
    """A registered kernel.

    Args:
        spec: ``package.module:name``, as ``fa_verify.properties.kernels.loading.load`` takes it.
        about: A short description.
        packages: Import names of the packages that the kernel needs in addition to torch.
        capability: Lowest compute capability that the kernel supports; None if it also runs on a
            CPU.
        distributions: Distribution names (as for pip) of the packages whose versions are recorded
            in addition to torch and Triton.
        never_promised: Guarantees of this project that the kernel's authors do not give, each with
            the reason. A failure of one of them breaks no promise of the kernel.
    """

    spec: str
    about: str
    packages: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    distributions: tuple[str, ...] = ()
    never_promised: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> str | None:
        """Return why the kernel cannot run here, or None. Does not import the kernel."""
        for package in self.packages:
            if not _installed(package):
                return f"{package} is not installed"
        if self.capability is None:
            return None
        if not torch.cuda.is_available():
            return "needs a CUDA GPU; none is visible"
        there = torch.cuda.get_device_capability()
        if there < self.capability:
            least, is_there = (".".join(map(str, x)) for x in (self.capability, there))
            return (
                f"needs a GPU of compute capability {least} or more; "
                f"{torch.cuda.get_device_name()} has {is_there}"
            )
        return None


_SDPA = "fa_verify.adapters.sdpa"
_AMPERE, _ANY_GPU = (8, 0), (7, 0)
_UNDOCUMENTED = {
    "G3": "PyTorch's documentation does not mention rows that see no key",
    "G5": "PyTorch's documentation does not say which values hidden keys and rows may hold",
}
NAMED = {
    "ours": Named(
        "fa_verify.adapters.ours:flash_attention", "fa_kernels, this project's", ("triton",)
    ),
    "sdpa-math": Named(
        f"{_SDPA}:math",
        "PyTorch SDPA, composed of matrix products",
        never_promised=_UNDOCUMENTED,
    ),
    "sdpa-flash": Named(
        f"{_SDPA}:flash",
        "PyTorch SDPA, FlashAttention-2",
        capability=_AMPERE,
        never_promised=_UNDOCUMENTED,
    ),
    "sdpa-efficient": Named(
        f"{_SDPA}:efficient",
        "PyTorch SDPA, memory-efficient",
        capability=_ANY_GPU,
        never_promised=_UNDOCUMENTED,
    ),
    "sdpa-cudnn": Named(
        f"{_SDPA}:cudnn",
        "PyTorch SDPA, cuDNN",
        capability=_AMPERE,
        never_promised=_UNDOCUMENTED,
    ),
    "flex": Named(
        "fa_verify.adapters.flex:attention",
        "PyTorch FlexAttention, compiled",
        ("triton",),
        _ANY_GPU,
        never_promised=_UNDOCUMENTED,
    ),
    "flash-attn-2": Named(
        "fa_verify.adapters.flash_attn_2:attention",
        "FlashAttention-2, with a cache",
        ("flash_attn.flash_attn_interface",),
        _AMPERE,
        ("flash-attn",),
        {
            "G3": "its documentation gives rows that see no key an output of 0, and does not say "
            "which values their dout may hold",
            "G5": "its documentation does not say which values hidden keys and rows may hold",
        },
    ),
    "flash-attn-4": Named(
        "fa_verify.adapters.flash_attn_cute:attention",
        "FlashAttention-4, in the CuTe DSL",
        ("flash_attn.cute", "cutlass"),
        (9, 0),
        ("flash-attn-4", "nvidia-cutlass-dsl"),
        {
            "G3": "its documentation gives rows that see no key an output of 0, and does not say "
            "which values their dout may hold",
            "G5": "its documentation does not say which values hidden keys and rows may hold",
        },
    ),
    "flashinfer-decode": Named(
        "fa_verify.adapters.flashinfer_paged:decode",
        "FlashInfer, decoding with pages",
        ("flashinfer",),
        _AMPERE,
        ("flashinfer-python",),
    ),
    "flashinfer-prefill": Named(
        "fa_verify.adapters.flashinfer_paged:prefill",
        "FlashInfer, prefill with pages",
        ("flashinfer",),
        _AMPERE,
        ("flashinfer-python",),
    ),
    "xformers": Named(
        "fa_verify.adapters.xformers_cutlass:attention",
        "xformers, its CUTLASS kernels",
        ("xformers",),
        _AMPERE,
        ("xformers",),
        {"G5": "its documentation does not say which values hidden keys and rows may hold"},
    ),
}


def _installed(package: str) -> bool:
    """Return whether a package can be found. Imports the parents of a dotted name only."""
    try:
        return importlib.util.find_spec(package) is not None
    # The parent is missing or broken, or sys.modules holds None for the package.
    except (ImportError, ValueError):
        return False


def named(name: str) -> Named:
    """Return the registered kernel with a name.

    Raises:
        ValueError: The name is unknown. The message lists all names and suggests a similar one.
    """
    if name in NAMED:
        return NAMED[name]
    close = difflib.get_close_matches(name, NAMED, 1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(
        f"got {name!r}{hint}; needs path/to/file.py:name, package.module:name, "
        f"or one of {', '.join(NAMED)}"
    )


def spec_of(given: str) -> str:
    """Resolve the value of --fa-kernel to ``module:name`` or ``path:name``.

    A path without a name is returned as it is; loading it lists the names in the file.

    Raises:
        ValueError: The name is unknown, or its kernel cannot run here.
    """
    if ":" in given or given.endswith(".py"):
        return given
    kernel = named(given)
    missing = kernel.missing()
    if missing is not None:
        raise ValueError(f"{given} cannot run here: {missing}")
    return kernel.spec


def kernel_table() -> Iterator[str]:
    """Yield a line per kernel: name, description, and whether it is available here."""
    name_width = max(map(len, NAMED))
    about_width = max(len(kernel.about) for kernel in NAMED.values())
    for name, kernel in NAMED.items():
        missing = kernel.missing()
        state = "available" if missing is None else f"unavailable: {missing}"
        yield f"{name:{name_width}}  {kernel.about:{about_width}}  {state}"
