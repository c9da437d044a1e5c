"""--kernel=FILE:NAME loads kernels, and refuses everything else with one paragraph."""

from __future__ import annotations

import re
import sys

import pytest

from fa_verify.properties.kernels.loading import load

GOOD = """
import torch
from functools import partial, wraps

def attention(q, k, v, *, mask, sm_scale):
    return q

def by_position(a, b, c, mask, sm_scale, extra=1):
    return a

def of_configs(q, k, v, *, mask, sm_scale, config):
    return config
of_configs.configs = {"narrow": {}, "wide": {}}

def plain(q, k, v, dropout=0.0):
    return q

@wraps(plain)
def adapted(q, k, v, *, mask, sm_scale):
    return q

halved = partial(by_position, extra=2)

class Attention:
    head_dims = (64,)
    dtype = torch.float16

    def __call__(self, q, k, v, *, mask, sm_scale):
        return q

    def method(self, q, k, v, *, mask, sm_scale):
        return v

    def backward(self, dout):
        return dout

    method.dtypes = ("fp16",)

instance = Attention()
"""


@pytest.fixture(autouse=True)
def nothing_stays_imported(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = dict(sys.modules)
    yield
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def file(tmp_path):
    """Writes a file with this text and returns its path."""

    def write(text: str, name: str = "kernels.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def refusal(file):
    """The message that refuses a name in a file with this text: one paragraph."""

    def said(text: str, name: str = "attention") -> str:
        with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
            load(f"{file(text)}:{name}")
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__
        return str(caught.value)

    return said


@pytest.mark.parametrize(
    "name",
    ["attention", "by_position", "of_configs", "adapted", "halved", "instance", "instance.method"],
)
def test_a_callable_is_a_subject(file, name):
    subject = load(f"{file(GOOD)}:{name}")
    assert subject.name == name
    assert callable(subject.call)


def test_a_name_of_a_module_is_a_subject(file, monkeypatch):
    path = file(GOOD, "shop/kernels.py")
    monkeypatch.syspath_prepend(path.removesuffix("/shop/kernels.py"))
    subject = load("shop.kernels:attention")
    assert subject.call("q", None, None, mask=None, sm_scale=1.0) == "q"
    assert subject.call.__module__ == "shop.kernels"


def test_a_module_is_found_in_the_current_folder(file, monkeypatch, tmp_path):
    file(GOOD, "here_alone.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [x for x in sys.path if x])
    assert load("here_alone:attention").name == "attention"


def test_a_path_can_begin_at_home(file, monkeypatch, tmp_path):
    file(GOOD)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load("~/kernels.py:attention").name == "attention"


def test_declarations_of_an_instance_are_those_of_its_class(file):
    assert load(f"{file(GOOD)}:instance").head_dims == (64,)


def test_declarations_of_a_method_are_its_own(file):
    subject = load(f"{file(GOOD)}:instance.method")
    assert (subject.dtypes, subject.head_dims) == (("fp16",), None)
    assert subject.call(None, None, "v", mask=None, sm_scale=1.0) == "v"


def test_a_file_can_import_its_neighbours(file):
    file("answer = 42", "its_sibling.py")
    path = file(
        "from its_sibling import answer\ndef attention(q, k, v, *, mask, sm_scale): return answer\n"
    )
    assert load(f"{path}:attention").call(None, None, None, mask=None, sm_scale=1.0) == 42


def test_a_neighbouring_file_hides_no_installed_package(file):
    file("raise RuntimeError", "statistics.py")
    sys.modules.pop("statistics", None)
    path = file("import statistics\n" + GOOD)
    assert load(f"{path}:attention").name == "attention"


def test_a_file_named_like_an_installed_package_is_run_all_the_same(file):
    assert load(f"{file(GOOD, 'torch.py')}:attention").call.__module__ != "torch"


def test_a_file_can_be_loaded_twice(file):
    path = file(GOOD)
    first, second = (load(f"{path}:attention") for _ in range(2))
    assert first.call is not second.call
    assert sys.path.count(str(path).removesuffix("/kernels.py")) == 1


def test_a_file_can_define_classes_that_look_up_their_module(file):
    path = file(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass(kw_only=True)\n"
        "class Attention:\n"
        "    scale: float = 1.0\n"
        "    def __call__(self, q, k, v, *, mask, sm_scale): return self.scale\n"
        "attention = Attention()\n"
    )
    assert load(f"{path}:attention").name == "attention"


@pytest.mark.parametrize(
    "spec", ["", "attention", "kernels.py", ":", "kernels.py:", ":attention", "shop/kernels:f"]
)
def test_a_kernel_without_file_and_name_is_refused(spec):
    says = f"got {spec!r}; needs path/to/file.py:name or package.module:name"
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        load(spec)


def test_a_file_without_a_name_is_refused_with_the_names_in_it(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text("def attention(q, k, v, *, mask, sm_scale): ...\ndef _hidden(): ...\n")
    says = f"got '{path}', a file; needs {path}:name; it has attention"
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        load(str(path))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=rf"^there is no file {tmp_path}/none.py$"):
        load(f"{tmp_path}/none.py:attention")


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "kernels.py").mkdir()
    with pytest.raises(ValueError, match=r"^there is no file .*/kernels.py$"):
        load(f"{tmp_path}/kernels.py:attention")


def test_a_missing_module_is_refused():
    says = "ModuleNotFoundError: No module named 'oracles.no_such'"
    with pytest.raises(ValueError, match=f"^oracles.no_such cannot be imported: {says}$"):
        load("oracles.no_such:attention")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\nraise ValueError('one\\n\\ntwo')", "ValueError: one (PATH, line 2)"),
        ("\n1 / 0", "ZeroDivisionError: division by zero (PATH, line 2)"),
        ("import sys; sys.exit(3)", "SystemExit: 3 (PATH, line 1)"),
        ("raise RuntimeError", "RuntimeError (PATH, line 1)"),
        ("import no_such", "ModuleNotFoundError: No module named 'no_such' (PATH, line 1)"),
        ("def f(:", "SyntaxError: invalid syntax (kernels.py, line 1)"),
        ("import ast; ast.literal_eval('(')", "SyntaxError: '(' was never closed"),
    ],
)
def test_a_file_that_raises_is_refused_with_what_and_where(refusal, tmp_path, text, says):
    path = f"{tmp_path}/kernels.py"
    assert refusal(text).startswith(f"{path} cannot be imported: {says.replace('PATH', path)}")


def test_a_module_that_raises_is_refused_with_what_and_where(file, monkeypatch):
    path = file("raise ValueError('no\\nsuch')", "raises_at_import.py")
    monkeypatch.syspath_prepend(path.removesuffix("/raises_at_import.py"))
    says = rf"raises_at_import cannot be imported: ValueError: no \({path}, line 1\)"
    with pytest.raises(ValueError, match=f"^{says}$"):
        load("raises_at_import:attention")


def test_ctrl_c_while_a_file_is_run_is_no_bad_file(file):
    with pytest.raises(KeyboardInterrupt):
        load(f"{file('raise KeyboardInterrupt')}:attention")


def test_an_unknown_name_is_refused_with_the_functions_there_are(refusal, tmp_path):
    assert refusal(GOOD, "halvd") == (
        f"{tmp_path}/kernels.py has no 'halvd'; "
        "it has halved, adapted, attention, by_position, instance, of_configs, plain"
    )


def test_an_unknown_name_is_refused_with_what_is_imported_if_there_is_nothing_else(refusal):
    assert "; it has acos, acosh, " in refusal("from math import *")


def test_an_unknown_name_in_an_empty_file_is_refused(refusal):
    assert refusal("").endswith("has no 'attention'; it has no functions")


def test_an_unknown_method_is_refused_with_the_methods_there_are(refusal, tmp_path):
    assert refusal(GOOD, "instance.metod") == (
        f"instance in {tmp_path}/kernels.py has no 'metod'; it has method, backward"
    )


def test_a_large_module_is_not_listed_whole():
    with pytest.raises(ValueError, match="it has scaled_dot_product_attention, ") as caught:
        load("torch.nn.functional:scaled_dot_product_atention")
    assert str(caught.value).count(", ") == 19


@pytest.mark.parametrize(
    ("name", "kind"),
    [("Attention", "a class"), ("number", "of type int"), ("torch", "of type module")],
)
def test_a_value_that_is_not_callable_is_refused(refusal, tmp_path, name, kind):
    assert refusal(f"{GOOD}\nnumber = 3", name) == (
        f"{name!r} in {tmp_path}/kernels.py is {kind}; "
        "needs a function or an instance with __call__"
    )


@pytest.mark.parametrize(
    ("takes", "says"),
    [
        ("(q, k, v)", "got an unexpected keyword argument 'mask'"),
        ("(q, k, v, *, sm_scale)", "got an unexpected keyword argument 'mask'"),
        ("(q, k, v, *, mask)", "got an unexpected keyword argument 'sm_scale'"),
        ("(q, k, v, *, mask, sm_scale, p)", "missing a required argument: 'p'"),
        ("(q, k, *, mask, sm_scale)", "too many positional arguments"),
    ],
)
def test_a_callable_that_takes_other_arguments_is_refused(refusal, takes, says):
    said = refusal(f"def attention{takes}: return q")
    needs = "(q, k, v, *, mask, sm_scale) or (q, k, v, causal, sm_scale)"
    assert said == f"attention takes {takes}; needs {needs}: {says}"


def test_the_apply_of_an_autograd_function_with_other_arguments_is_refused(refusal):
    said = refusal(
        "import torch\n"
        "class Flash(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, q, k, v, bias=None, causal=False): return q\n"
        "attention = Flash.apply"
    )
    assert said == (
        "attention is Flash.apply, whose forward takes (ctx, q, k, v, bias=None, causal=False); "
        "needs (ctx, q, k, v, causal, sm_scale), or a function (q, k, v, *, mask, sm_scale) that "
        "calls it"
    )


def test_a_callable_with_configurations_has_to_take_one(refusal):
    said = refusal(
        "def attention(q, k, v, *, mask, sm_scale): return q\n"
        "attention.configs = {'narrow': {}, 'wide': {}}"
    )
    assert said == (
        "attention takes (q, k, v, *, mask, sm_scale); "
        "needs (q, k, v, *, mask, sm_scale, config): got an unexpected keyword argument 'config'"
    )


def test_a_bad_declaration_is_refused_in_one_paragraph(refusal):
    said = refusal(
        "import torch\n"
        "def attention(q, k, v, *, mask, sm_scale): return q\n"
        "attention.head_dims = torch.arange(400).view(20, 20)"
    )
    assert said.startswith("attention.head_dims is tensor([[ 0, 1, 2,")
    assert said.endswith("; needs a sequence of sizes")
