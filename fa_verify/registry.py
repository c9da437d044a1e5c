"""The kernels that ``--kernel=NAME`` knows, and which of them can run here."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

__all__ = ["NAMED", "Named", "kernel_table", "named", "spec_of"]


@dataclass(frozen=True)
class Named:
    """A kernel with a name of its own.

    Args:
        spec: ``package.module:name``, as ``fa_verify.properties.subjects.loading.load`` takes it.
        about: What it is, in a few words.
        packages: What has to be installed beside torch, by the names that are imported.
        capability: The least compute capability of a GPU that it runs on; None runs on a CPU too.
        distributions: Whose versions matter beside those of torch and Triton, as pip names them.
        never_promised: Guarantees of this project that its authors do not give, and in words why:
            where they fail, the kernel breaks nothing that it promised.
    """

    spec: str
    about: str
    packages: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    distributions: tuple[str, ...] = ()
    never_promised: Mapping[str, str] = field(default_factory=dict)

    def missing(self) -> str | None:
        """What it lacks here, None where it can run; imports nothing of it."""
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


_SDPA = "fa_verify.subjects.sdpa"
_AMPERE, _ANY_GPU = (8, 0), (7, 0)
_UNDOCUMENTED = {
    "G3": "PyTorch's documentation says nothing of rows that see no key",
    "G5": "PyTorch's documentation says nothing of what hidden keys and rows may hold",
}
NAMED = {
    "ours": Named(
        "fa_verify.subjects.ours:flash_attention", "fa_kernels, this project's", ("triton",)
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
        "fa_verify.subjects.flex:attention",
        "PyTorch FlexAttention, compiled",
        ("triton",),
        _ANY_GPU,
        never_promised=_UNDOCUMENTED,
    ),
    "flash-attn-4": Named(
        "fa_verify.subjects.flash_attn_cute:attention",
        "FlashAttention-4, in the CuTe DSL",
        ("flash_attn.cute", "cutlass"),
        (9, 0),
        ("flash-attn-4", "nvidia-cutlass-dsl"),
        {
            "G3": "its documentation gives rows that see no key an output of 0, and says nothing "
            "of what their dout may hold",
            "G5": "its documentation says nothing of what hidden keys and rows may hold",
        },
    ),
    "xformers": Named(
        "fa_verify.subjects.xformers_cutlass:attention",
        "xformers, its CUTLASS kernels",
        ("xformers",),
        _AMPERE,
        ("xformers",),
        {"G5": "its documentation says nothing of what hidden keys and rows may hold"},
    ),
}


def _installed(package: str) -> bool:
    """Whether a package could be imported; only parents of a dotted one are."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # its parent is missing or broken, or it is None on purpose
        return False


def named(name: str) -> Named:
    """The kernel of a name.

    Raises:
        ValueError: There is none; the message lists the names, a similar one first.
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
    """What --kernel stands for: a name is looked up, ``path:name`` stays as it is.

    Raises:
        ValueError: It is a name that is not known, or whose kernel cannot run here.
    """
    if ":" in given:
        return given
    kernel = named(given)
    missing = kernel.missing()
    if missing is not None:
        raise ValueError(f"{given} cannot run here: {missing}")
    return kernel.spec


def kernel_table() -> Iterator[str]:
    """A line for each name: what it is, and whether it can run here or why not."""
    name_width = max(map(len, NAMED))
    about_width = max(len(kernel.about) for kernel in NAMED.values())
    for name, kernel in NAMED.items():
        missing = kernel.missing()
        state = "available" if missing is None else f"not here: {missing}"
        yield f"{name:{name_width}}  {kernel.about:{about_width}}  {state}"
