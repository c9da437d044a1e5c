"""The documentation: it builds, loads nothing from elsewhere, is not stale, and its code runs.

Every command on a page is in ``RUN``, and runs as written, or in ``PARSED`` with the reason why it
is only parsed. Python of a page runs here, or in the tests that ``ELSEWHERE`` names.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import linecache
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zlib
from importlib.util import find_spec
from pathlib import Path

import pytest

import fa_verify
from docs import tables, transcript
from fa_verify import attention_kernel
from fa_verify.__main__ import parsed
from fa_verify.oracles.guarantee import GUARANTEES
from fa_verify.oracles.problem import Problem
from fa_verify.properties.guarantees.claims import CLAIMS
from fa_verify.simulator.interpreter.dot_order import dots_in_order

ROOT = Path(__file__).parents[3]
PAGES = {path.relative_to(ROOT).as_posix(): path for path in tables.pages()}
PAGES["CONTRIBUTING.md"] = ROOT / "CONTRIBUTING.md"
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
RUN = (
    "python -m pytest tests/unit/oracles/masks/test_mask.py -k dense",
    "python -m tests.mutation --help",
    "python -m benchmarks.findings --help",
)
OF_THE_COMMAND = "tests/unit/fa_verify/test_command.py runs the command"
OF_THE_PLUGIN = "tests/unit/fa_verify/test_plugin.py runs it where the wheel is installed"
# Only parsed: options are known to pytest, targets to make, modules to Python.
PARSED = {
    ".ci/run": "runs everything",
    "make bench": "needs a GPU",
    "make docs": "the fixture site runs its command",
    "make format": "changes files",
    "make kernels": "fetches repositories; test_kernels.py runs it on its own",
    "make kernels KERNELS_FROM=path/to/folder": "has a placeholder",
    "make lint": "runs over everything",
    "make mutation": "takes 20 minutes",
    "make power": "takes minutes",
    "make power WRITE=1": "takes minutes",
    "make test": "runs everything",
    "make verify": "takes minutes",
    "make baseline BASELINE=baselines/local.json": "takes minutes",
    "make gate BASELINE=baselines/local.json": "takes minutes",
    "make findings KERNELS=NAME": "has a placeholder",
    "make findings KERNELS='flex ours'": "needs a GPU",
    "make findings KERNELS='flash-attn-2 flash-attn-4 flashinfer-decode flashinfer-prefill'": (
        "needs a GPU"
    ),
    "make fuzz MINUTES=10": "takes minutes",
    "make fuzz MINUTES=10 KERNEL=path/to/file.py:name": "has a placeholder",
    "make fuzz MINUTES=10 MASK=path/to/file.py:Name": "has a placeholder",
    "pip install ../clone": "changes the environment",
    "pip install '../clone[triton]'": "changes the environment",
    "pip install -e '.[test]'": "changes the environment",
    "pip install -e '.[report]'": "changes the environment",
    "python -m benchmarks.memory": "needs a GPU",
    "python -m benchmarks.host": "needs a GPU",
    "python -m benchmarks.cases": "needs a GPU",
    "python -m benchmarks.cases decoding": "needs a GPU",
    "python -m benchmarks.false_alarms --seconds 150": "takes minutes",
    "python -m benchmarks.power --lengths 16384 65536 --families normal --seeds 3 --out FILE": (
        "needs a GPU"
    ),
    "python -m benchmarks.power --lengths 16384 --families peaked rising_max needle lse_high "
    "--seeds 3 --out FILE": "needs a GPU",
    "python -m benchmarks.power --lengths 2000 --rows 2000 --families normal --seeds 3": (
        "takes minutes"
    ),
    "python -m benchmarks.numerics --seconds 150 --write": "takes minutes",
    "python -m benchmarks.same_bits --write": "takes minutes",
    "python -m benchmarks.numerics --seconds 120 --kernels path/to/attention.py:attention "
    "sdpa-flash": "has a placeholder",
    "python -m docs.tables --write": "changes files",
    "python -m tests.unit.fa_verify.probing.recovery": "takes minutes",
    "python -m tests.mutation.ablation": "is part of tests/mutation/test_ablation.py",
    "python -m tests.mutation.diagnosis --write": "takes an hour",
    "python -m pytest -n auto --fa-baseline=baselines/local.json": "takes minutes",
    "python -m pytest -n auto --fa-baseline=baselines/local.json --fa-update-baseline": (
        "takes minutes"
    ),
    "python -m pytest -n auto --fa-mask=path/to/prefix.py:Prefix": (
        "runs in test_documented_mask.py"
    ),
    "python -m pytest -n auto --fa-minutes=600 --fa-example-db=redis://host:6379/0": "takes hours",
    "python -m pytest tests/conformance -n auto --fa-minutes=10": "takes minutes",
    "python -m pytest tests/conformance -n auto --fa-report=build/report": "takes minutes",
    "pytest --pyargs fa_verify.conformance --fa-kernel=my.py:attention -n auto": OF_THE_PLUGIN,
    "fa-verify check my.py:attention": OF_THE_COMMAND,
    "fa-verify check my.py:attention -- --fa-gpu-memory=20": "needs a GPU",
    "fa-verify check tests/kernels/lightllm_decode.py:attention --quick": "needs make kernels",
    "fa-verify check my.py:attention --waive known.txt": "runs in test_waivers.py",
    "fa-verify probe path/to/attention.py:attention": OF_THE_COMMAND,
    "fa-verify probe path/to/attention.py:attention --replay="
    """'{"experiment":"weights","problem":{"version":1,"B":2,"M":16,"N":16,"dtype":"bf16","""
    """"sm_scale":0.3}}'""": OF_THE_COMMAND,
    "fa-verify check path/to/attention.py:attention": OF_THE_COMMAND,
    "fa-verify check path/to/attention.py:attention --quick -- -x -k fp16": OF_THE_COMMAND,
    "fa-verify explain --kernel=path/to/attention.py:attention "
    """'{"version":1,"M":2}'""": OF_THE_COMMAND,
    "fa-verify explain pytest --fa-kernel=path/to/attention.py:attention "
    """--fa-replay='{"version":1,"M":2}'""": OF_THE_COMMAND,
    "fa-verify doctor": OF_THE_COMMAND,
    "fa-verify list": OF_THE_COMMAND,
    "fa-verify explain fa-verify-replays/attention-5db8d0bd69b9.npz": (
        "tests/unit/fa_verify/test_replay_files.py runs the command"
    ),
    "python -m pytest --fa-replay="
    """'{"version":1,"M":7,"N":34,"D":32,"dtype":"fp16","config":"16x32"}'""": (
        "tests/unit/fa_verify/test_options.py replays problems"
    ),
}
ELSEWHERE = {
    "docs/adding.md": "tests/unit/repository/test_adding.py",
    "docs/inference-kernels.md": "tests/unit/fa_verify/test_inference_page.py",
    "docs/the-first-hour.md": "tests/unit/fa_verify/test_first_hour_page.py",
    "docs/verify-a-mask.md": "tests/unit/fa_verify/test_documented_mask.py",
}
# Commands of formulas that are no symbols.
COMMANDS = (
    "Big big boxed cdot dots frac infty le leftarrow ln log lvert max min qquad quad rvert "
    "sqrt sum tanh tfrac times to"
)
# Small enough for the interpreter.
SIZES = {"1000": "20", "1200": "24", "770": "15", 'device="cuda"': 'device="cpu"'}


def blocks(name: str, *languages: str) -> list[str]:
    """The blocks of a page in one of the languages."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", TEXTS[name], re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def commands() -> set[str]:
    """Every command of every page, without prompt and comment."""
    lines = [
        line
        for name in PAGES
        for block in blocks(name, "console", "sh")
        for line in block.splitlines()
    ]
    return {re.sub(r"\s+# .*$", "", line.removeprefix("$ ")).strip() for line in lines} - {""}


def symbols(text: str) -> set[str]:
    """The symbols of the formulas of a text, without the indices of a row and a key."""
    bodies = re.findall(r"\$\$(.*?)\$\$|\$([^$]+)\$", text, re.DOTALL)
    formulas = " ".join(map("".join, bodies))
    layout = r"\\(?:text|begin|end|mathrel|mathsf) *(?:\{[^}]*\}|T)|\\widehat|_(?:[mn]\b|\{mn\})"
    symbol = r"(\\mathrm\{\w+\}|\\[a-zA-Z]+|d[PSqkv]|[A-Za-z])(?:_(?:(\w)|\{(\w+)\}))?"
    return {
        "_".join(filter(None, (base, *index)))
        for base, *index in re.findall(symbol, re.sub(layout, " ", formulas))
        if base.removeprefix("\\") not in COMMANDS.split()
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built by the command of ``make docs``."""
    for package in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(package)
    _, _, rules = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndocs:")
    (command,) = re.findall(r"^\t\$\(python\) (.*)$", rules.partition("\n\n")[0], re.MULTILINE)
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[:-1], str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_pages_load_nothing_from_elsewhere(site):
    loads = re.compile(
        r"<(?:script|img|iframe|source|embed|object|link)\b[^>]*?(?:src|href|data)=[\"']?"
        r"((?:https?:)?//[^\"'\s>]+)|(?:@import|url\()\s*[\"']?((?:https?:)?//[^\"')\s]+)"
    )
    found = {
        (path.relative_to(site).as_posix(), *match.groups())
        for path in site.rglob("*")
        if path.suffix in (".html", ".css") and "mathjax" not in path.parts
        for match in loads.finditer(path.read_text(encoding="utf-8"))
    }
    assert found == set()
    formulas = (site / "error-bound.html").read_text(encoding="utf-8")
    (script,) = re.findall(r'<script[^>]* src="([^"]*mathjax[^"]*?)(?:\?[^"]*)?"', formulas)
    assert (site / script).is_file()


def test_absolute_values_of_docstrings_are_not_substitutions(site):
    assert r"\|" not in (site / "api" / "oracles.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_no_table_is_stale(name):
    assert tables.rewritten(TEXTS[name]) == TEXTS[name], "python -m docs.tables --write"


@pytest.mark.parametrize(
    ("name", "lines"),
    [("README.md", 200), ("CONTRIBUTING.md", 90), ("docs/the-first-hour.md", 250)],
)
def test_the_first_pages_are_short(name, lines):
    assert TEXTS[name].count("\n") < lines


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files(name):
    # Without code: the launch of a Triton kernel looks like a link.
    prose = re.sub(r"^```.*?^```", "", TEXTS[name], flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", prose)
    local = [link for link in links if "://" not in link]
    assert [x for x in local if not (PAGES[name].parent / x).exists()] == []


@pytest.mark.parametrize("name", PAGES)
def test_files_that_a_page_names_exist(name):
    named = re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|md|toml|json|yml|txt|csv))`", TEXTS[name])
    assert [x for x in named if not x.startswith("path/") and not re.search("[A-Z]{4}", x)
            and not (ROOT / x).exists()] == []  # fmt: skip


# The subject of a commit is another.
@pytest.mark.parametrize("name", sorted({*PAGES} - {"CONTRIBUTING.md"}))
def test_a_page_calls_the_kernel_under_test_a_kernel(name):
    prose = re.sub(r"^```.*?^```|^\|.*?$", "", TEXTS[name], flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r".*(?<![\w/.`])[Ss]ubjects?(?![\w/.`(]).*", prose) == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_gives_options_of_pytest_the_names_that_work_everywhere(name):
    names = "|".join(re.findall(r"^\| `--fa-([\w-]+)", TEXTS["docs/options.md"], re.MULTILINE))
    lines = (x for x in TEXTS[name].splitlines() if "fa-verify" not in x)
    assert [x for x in lines if re.search(rf"pytest\b[^`]* --({names})(?![\w-])", x)] == []


def test_every_command_is_run_or_parsed():
    assert commands() == {*RUN, *PARSED}


@pytest.mark.parametrize("command", RUN)
def test_the_command_runs(command):
    words = shlex.split(command)
    words[0] = sys.executable
    if words[1:3] == ["-m", "pytest"]:
        words += ["-p", "no:cacheprovider"]
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("command", PARSED)
def test_the_command_is_valid(command, pytestconfig):
    words = shlex.split(command)
    if words[0] == "make":
        done = subprocess.run(
            ["make", "-n", f"PYTHON={sys.executable}", *words[1:]],
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        for variable in words[2:]:
            assert f"$({variable.partition('=')[0]})" in (ROOT / "Makefile").read_text()
    elif words[0] == "fa-verify":
        parsed(words[1:])
    elif words[0] == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert set(re.findall(r"\[(\w+)\]", command)) <= set(project["optional-dependencies"])
        assert words[-1].startswith((".", project["name"]))
    elif "pytest" in words[:3]:
        # Unknown options are an error.
        options = pytestconfig._parser.parse(words[words.index("pytest") + 1 :])
        for file in options.file_or_dir:
            assert find_spec(file) if options.pyargs else (ROOT / file).exists()
        if options.fa_replay:
            Problem.from_json(options.fa_replay)
    elif words[:2] == ["python", "-m"]:
        assert find_spec(words[2]) is not None
    else:
        assert os.access(ROOT / command, os.X_OK)


def _run(block: str, namespace: dict[str, object]) -> str:
    """Returns the output of a block of Python."""
    printed = io.StringIO()
    # Triton reads the source of the kernels that it compiles.
    name = f"<page {zlib.crc32(block.encode())}>"
    linecache.cache[name] = (len(block), None, block.splitlines(keepends=True), name)
    with contextlib.redirect_stdout(printed):
        exec(compile(block, name, "exec"), namespace)
    return printed.getvalue()


def _shown(text: str, printed: str) -> None:
    """Asserts that the lines of a page, but for its last one, begin what was printed."""
    *lines, last = text.splitlines()
    assert last == "..."
    assert printed.splitlines()[: len(lines)] == lines


def test_the_first_example_prints_what_the_page_shows():
    verified, text = blocks("README.md", "python")[0], blocks("README.md", "text")
    _shown(text[0], _run(verified, {}))
    assert verified.count("gqa=False") == 1
    declared = verified.replace("gqa=False", 'gqa=False, causal_alignment="top-left"')
    # A CPU's own attention rounds as its instructions do.
    numbers = re.compile(r"0\.\d+")
    _shown(numbers.sub("0.", text[1]), numbers.sub("0.", _run(declared, {})))


def test_the_first_hour_shows_the_outputs_of_its_steps():
    _, *shown = re.split(
        r"^(?=\$ fa-verify )", "".join(blocks("docs/the-first-hour.md", "text")), flags=re.MULTILINE
    )
    for text, (name, (command, _)) in zip(shown, transcript.STEPS.items(), strict=True):
        output = (transcript.KERNELS / "output" / f"{name}.txt").read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        assert lines[0] == f"$ {command}\n"
        # A line "..." stands for any number of lines.
        pattern = "".join(r"(?:.*\n)*" if x == "...\n" else re.escape(x) for x in lines)
        assert re.fullmatch(pattern, output), name
        parsed(shlex.split(command)[1:])


def test_the_first_hour_shows_the_files_of_its_kernel(tmp_path):
    waivers = (transcript.KERNELS / "known.txt").read_text(encoding="utf-8")
    assert blocks("docs/the-first-hour.md", "none") == [waivers]
    shutil.copy(transcript.KERNELS / "kernel.py", tmp_path)
    changes = [change for _, change in transcript.STEPS.values() if change is not None]
    shown = blocks("docs/the-first-hour.md", "diff")
    for text, change in zip(shown, changes, strict=True):
        lines = (transcript.KERNELS / change).read_text(encoding="utf-8").splitlines()
        changed = [x for x in lines if re.match(r"[-+](?![-+]{2} )", x)]
        assert text.splitlines() == changed
        subprocess.run(["git", "apply", transcript.KERNELS / change], cwd=tmp_path, check=True)


@pytest.mark.parametrize(
    "name", [name for name in PAGES if blocks(name, "python") and name not in ELSEWHERE]
)
def test_the_python_of_a_page_runs(name, device, monkeypatch):
    pytest.importorskip("triton")
    verify = inspect.signature(fa_verify.verify)
    calls = []

    def bound(*args, **options):
        calls.append(verify.bind(*args, **options))
        return True

    # It takes minutes; the first example of the README runs in the test above.
    monkeypatch.setattr(fa_verify, "verify", bound)
    namespace: dict[str, object] = {"_attention": type("_attention", (), {})}
    for block in blocks(name, "python"):
        if device == "cpu":
            for old, new in SIZES.items():
                block = block.replace(old, new)
        elif "repair()" in block:
            compile(block, name, "exec")  # of the interpreter, which is off
            continue
        # Pages promise the bits of tensor cores, which add in one order for all rows of a tile.
        with dots_in_order():
            _run(block, namespace)
    assert len(calls) == sum("verify(" in block for block in blocks(name, "python"))


def test_python_that_runs_elsewhere_is_read_there():
    for name, test in ELSEWHERE.items():
        assert blocks(name, "python")
        assert Path(name).name in (ROOT / test).read_text(encoding="utf-8")


def test_every_target_of_make_is_on_the_page_of_options():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z]+):.*## ", makefile, re.MULTILINE)
    missing = [x for x in targets if f"`make {x}`" not in TEXTS["docs/options.md"]]
    assert missing == ["help"]


def test_every_declaration_is_on_its_page():
    words = [
        word for word, parameter in inspect.signature(attention_kernel).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]  # fmt: skip
    assert [x for x in words if f"`{x}`" not in TEXTS["docs/declarations.md"]] == []


def test_every_symbol_of_the_error_bound_is_in_its_table():
    page = TEXTS["docs/error-bound.md"]
    table = page.partition("## Symbols")[2].partition("\n## ")[0]
    assert {r"\gamma_l", r"\eta_x", "T_q"} <= symbols(table)
    assert symbols(page) - symbols(table) == set()


def test_the_glossary_is_in_alphabetical_order():
    terms = re.findall(r"^(\S.*)\n: ", TEXTS["docs/glossary.md"].partition("## Terms")[2], re.M)
    assert terms
    assert terms == sorted(terms, key=str.lower)


def test_the_replay_line_that_a_page_reads_is_one_of_a_message_and_explained_in_full():
    page = TEXTS["docs/options.md"]
    _, _, section = page.partition("## Replay lines")
    (line,) = re.findall(r"^pytest --fa-replay='(.*)'$", section, re.MULTILINE)
    assert Problem.from_json(line).to_json() == line
    assert f"replay: pytest --fa-replay='{line}'" in TEXTS["docs/failure-messages.md"]
    explained = "\n".join(re.findall(r"^- .*$", section, re.MULTILINE))
    assert [x for x in json.loads(line) if f'"{x}"' not in explained] == []


def test_every_guarantee_is_on_its_page_with_tests_that_exist():
    page = TEXTS["docs/guarantees.md"]
    rows = dict(re.findall(r"^\| `(\w+)`: .* \| ([^|]*) \|$", page, re.MULTILINE))
    assert [*rows] == [*GUARANTEES]
    undrawn = {
        claim.guarantee.key
        for claim in CLAIMS
        if claim.kind == "attention" and not (claim.drawn or claim.standing)
    }
    assert [x for x in undrawn if rows[x] in ("all", "`test_claims.py`")] == []
    files = set(re.findall(r"`(test_\w+\.py)`", page))
    there = {path.name for path in (ROOT / "tests" / "conformance").glob("test_*.py")}
    assert files
    assert files <= there


def test_every_claim_has_a_test_and_every_test_of_a_claim_a_section():
    page = TEXTS["docs/claims.md"]
    tested = {
        name
        for path in (ROOT / "tests" / "claims").glob("test_*.py")
        for name in re.findall(r"^def (test_k\d+_\w+)", path.read_text(encoding="utf-8"), re.M)
    }
    shown = dict(re.findall(r"^## K(\d+): .*?^`(test_\w+)`$", page, re.MULTILINE | re.DOTALL))
    assert sorted(map(int, shown)) == list(range(1, 19))
    assert set(shown.values()) <= tested
    assert all(name.startswith(f"test_k{int(number):02d}_") for number, name in shown.items())
    assert {name[:8] for name in tested} == {name[:8] for name in shown.values()}


def test_the_workflow_for_other_repositories_passes_inputs_of_the_action():
    yaml = pytest.importorskip("yaml")
    _, shown = blocks("docs/ci.md", "yaml")
    (step,) = (
        x for x in yaml.safe_load(shown)["jobs"]["verify"]["steps"] if x.get("id") == "fa-verify"
    )
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    assert set(step["with"]) <= set(action["inputs"])
    needed = {name for name, x in action["inputs"].items() if x.get("required")}
    assert needed <= set(step["with"])
    parsed(["check", step["with"]["kernel"], *step["with"]["options"].split()])
    uses = re.findall(r"steps\.fa-verify\.outputs\.(\w+)", shown)
    assert set(uses) <= set(action["outputs"])


def test_the_workflow_on_the_page_is_the_one_that_runs():
    shown, _ = blocks("docs/ci.md", "yaml")
    assert shown in (ROOT / ".github" / "workflows" / "gpu.yml").read_text(encoding="utf-8")
