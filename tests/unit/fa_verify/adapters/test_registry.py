"""--kernel=NAME and --list-kernels: the registered kernels, and their requirements."""

from __future__ import annotations

import sys

import pytest
import torch

from fa_verify.adapters.registry import NAMED, Named, kernel_table, named, spec_of
from fa_verify.properties.kernels.loading import load

ON_GPUS = ("sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "flex")


@pytest.fixture
def gpu(monkeypatch):
    """Makes a GPU of a compute capability visible, or none."""

    def make(capability: tuple[int, int] | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    return make


def installed(name: str) -> bool:
    """Whether the packages that a kernel needs are installed."""
    return not any(
        "installed" in (Named("", "", (x,)).missing() or "") for x in NAMED[name].packages
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by the import of torch
@pytest.mark.parametrize("name", [name for name in NAMED if installed(name)])
def test_a_name_stands_for_a_kernel_that_declares_where_it_runs(name):
    kernel = named(name)
    subject = load(kernel.spec)
    assert ("cpu" in subject.devices) == (kernel.capability is None)


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_kernel_for_gpus_says_that_there_is_none(gpu, name):
    gpu(None)
    with pytest.raises(ValueError, match=f"^{name} cannot run here: needs a CUDA GPU; none is vis"):
        spec_of(name)


def test_a_kernel_says_that_the_gpu_is_too_old(gpu):
    gpu((7, 5))
    assert NAMED["sdpa-flash"].missing() == (
        "needs a GPU of compute capability 8.0 or more; a GPU has 7.5"
    )
    assert NAMED["sdpa-efficient"].missing() is None


@pytest.mark.parametrize("package", ["no_such_package", "no_such.package", "json.decoder.no_such"])
def test_a_kernel_says_which_package_it_lacks(package):
    assert Named("m:f", "", ("torch", package)).missing() == f"{package} is not installed"


def test_whether_a_package_is_there_is_found_without_importing_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    assert Named("m:f", "", ("this",)).missing() is None
    assert "this" not in sys.modules


def test_a_package_that_is_hidden_counts_as_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert NAMED["ours"].missing() == "triton is not installed"


@pytest.mark.parametrize(
    "given", ["kernels.py:f", "kernels.py", "package.module:name", "sdpa-math:f", ":"]
)
def test_a_kernel_option_that_is_no_name_stays_as_it_is(given):
    assert spec_of(given) == given


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"^got 'paged'; needs path/to/file.py:name, ") as caught:
        spec_of("paged")
    assert all(name in str(caught.value) for name in NAMED)


def test_a_misspelt_name_is_refused_with_the_one_that_is_meant():
    with pytest.raises(ValueError, match=r"^got 'spda-math' \(did you mean 'sdpa-math'\?\); needs"):
        spec_of("spda-math")


def test_the_table_says_of_every_name_whether_it_can_run_here(gpu):
    gpu(None)
    lines = dict(zip(NAMED, kernel_table(), strict=True))
    assert all(line.startswith(f"{name} ") for name, line in lines.items())
    assert lines["sdpa-math"].endswith("  available")
    assert lines["flex"].endswith("  unavailable: needs a CUDA GPU; none is visible")
