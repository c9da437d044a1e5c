"""The report of a run: a self-contained page, JSON with the same facts, and escaped text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from fa_verify.properties.running.coverage import COLUMNS
from fa_verify.reporting.html import content, pictures
from fa_verify.reporting.html.page import page
from tests.unit.fa_verify.reporting.gate.test_gate import runs

# A user's file, wrong in one tile.
KERNELS = """
import math
import torch


def attention(q, k, v, *, mask, sm_scale):
    seen = mask.dense(*q.shape[:3], k.shape[2])
    scores = torch.where(seen, q.double() @ k.double().mT * sm_scale, -math.inf)
    p = torch.softmax(scores, 3)
    out = (torch.where(seen, p, 0.0) @ v.double()).to(q.dtype)
    if q.shape[2] > 20:
        out[:, :, 17:19, 3:9] *= 2
    return out


attention.dtypes = ("fp16",)
attention.head_dims = (16,)
attention.masks = ("causal",)
attention.m_ne_n = attention.gqa = attention.zero_sizes = False
"""
VOID = {"meta", "img", "br", "link", "hr", "input"}


class Page(HTMLParser):
    """A parsed page: texts, attributes, and whether the elements are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def images(self) -> list[str]:
        return [attributes["alt"] for tag, attributes in self.elements if tag == "img"]


def once(draw: Callable[..., str]) -> Callable[..., str]:
    """Caches a drawing function by its arguments as JSON."""
    drawn: dict[str, str] = {}

    def of(*given: object) -> str:
        key = json.dumps(given)
        if key not in drawn:
            drawn[key] = draw(*given)
        return drawn[key]

    return of


@pytest.fixture(scope="module", autouse=True)
def _draw_once():
    """Most pages here have the same pictures, which take a second to draw."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("distribution", "heat_map"):
            patch.setattr(pictures, name, once(getattr(pictures, name)))
        yield


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The folder of the report of the kernel above, and what a run says that has a file for it."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "kernels.py").write_text(KERNELS)
    kernel = f"--fa-kernel={folder}/kernels.py:attention"
    test = "tests/conformance/test_claims.py"
    made = folder / "made" / "failing"
    (said, code), refused = runs(
        [kernel, test, "-kelement or low_130", f"--fa-report={made}"],
        [kernel, f"--fa-report={made}/report.json"],
    )
    assert code == pytest.ExitCode.TESTS_FAILED, said
    assert f"report: {made}/report.html" in said
    return made, refused


@pytest.fixture(scope="module")
def folder(told):
    return told[0]


@pytest.fixture(scope="module")
def record(folder):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((folder / "report.json").read_text(), parse_constant=refuse)


@pytest.fixture(scope="module")
def html(folder):
    return (folder / "report.html").read_text()


def test_the_json_says_what_ran_and_how_it_ended(record):
    assert record["version"] == content.VERSION
    assert record["exit_code"] == pytest.ExitCode.TESTS_FAILED
    assert record["subject"]["name"] == "attention"
    assert "dtypes=('fp16',)" in record["subject"]["declares"]
    assert any("torch" in line for line in record["header"])
    assert record["results"]["failed"] == len(record["failures"]) > 0
    assert record["baseline"] is None
    assert "--fa-report=" in record["command"]


def test_the_json_has_the_causes_of_the_failures(record):
    (cause,) = record["causes"]
    failed = {failure["test"] for failure in record["failures"]}
    assert set(cause["explains"]) == failed
    assert cause["title"] == "Problems with M > 20 give wrong out, dq, dk, dv"
    assert '"M":21' in cause["problem"]
    assert cause["passing"]


def test_the_json_says_what_was_checked_of_which_dtype(record):
    by_claim = {claim["claim"]: claim["by_dtype"] for claim in record["checked"]}
    by_dtype = by_claim["every element lies within the derived bound"]
    assert set(by_dtype) == {"fp16"}
    assert set(by_dtype["fp16"]) <= {"passed", "failed"}


def test_the_distribution_counts_every_judged_problem_once(record):
    counts = record["distribution"]["counts"]
    judged = record["problems"]["by_dtype"]["fp16"]
    assert judged > 0
    assert {key: sum(of_bins) for key, of_bins in counts.items()} == {
        f"{output} fp16": judged for output in ("out", "dq", "dk", "dv")
    }
    assert {len(of_bins) for of_bins in counts.values()} == {
        len(record["distribution"]["edges"]) + 1
    }


def test_a_failure_has_its_replay_line_and_a_map_of_where_it_errs(record):
    findings = [finding for x in record["failures"] for finding in x["findings"]]
    assert all("--fa-replay='{" in finding["replay"] for finding in findings)
    (heat, *_) = [finding["heat"] for finding in findings if finding["heat"]]
    assert (heat["axis"], heat["tile"], heat["is_ratio"]) == ("m", 16, True)
    assert len(heat["values"]) == heat["rows"]
    bad = {i for i, line in enumerate(heat["values"]) if any(x is None or x > 1 for x in line)}
    assert bad == {17, 18}


def test_the_page_is_well_formed_and_needs_nothing_else(html):
    read = Page(html)
    assert not {tag for tag, _ in read.elements} & {"script", "link", "iframe"}
    assert not re.search(r"https?:|url\(|@import", html)
    sources = [x["src"] for tag, x in read.elements if tag == "img"]
    assert all(source.startswith("data:image/png;base64,") for source in sources)


def test_the_page_says_the_verdict_the_findings_and_how_to_replay_them(html, record):
    text = Page(html).text
    assert "Failed: " in text
    assert record["causes"][0]["title"] in text
    assert record["causes"][0]["explain"] in text
    for finding in record["failures"][0]["findings"]:
        assert finding["text"] in text
    assert record["worst"][0]["replay"] in text


@pytest.mark.parametrize("place", ["failure", "finding", "cause", "subject", "reason", "command"])
def test_text_of_a_subject_is_escaped(record, place):
    said = '<script>alert(1)</script> & "no" more'
    failure = {"test": "t", "phase": "call", "text": said, "findings": []}
    finding = {**record["failures"][0]["findings"][0], "text": said}
    changed = {
        "failure": {"failures": [failure]},
        "finding": {"failures": [{**failure, "text": "", "findings": [finding]}]},
        "cause": {"causes": [{**record["causes"][0], "title": said, "told": said}]},
        "subject": {"subject": {"name": said, "declares": said, "source": said}},
        "reason": {"not_run": [{"reason": said, "tests": 1}]},
        "command": {"command": said},
    }
    html = page({**record, **changed[place]})
    assert said in Page(html).text
    assert "<script" not in html


def test_the_page_has_pictures_where_matplotlib_is_installed(html):
    if not pictures.can_draw():
        pytest.skip("matplotlib is not installed: not run")
    images = Page(html).images()
    assert "Where out errs" in images
    assert any(alt.startswith("Number of problems by") for alt in images)


def test_without_matplotlib_there_is_a_page_that_says_so(record, monkeypatch):
    monkeypatch.setattr(pictures, "can_draw", lambda: False)
    read = Page(page(record))
    assert read.images() == []
    assert "There are no pictures: matplotlib is not installed" in read.text


def test_the_page_shows_the_baseline_alarms_first(record):
    changes = [
        {"part": "rms", "text": "out fp16: -1 %", "alarm": False},
        {"part": "speed", "text": "<b>slower</b>", "alarm": True},
    ]
    baseline = {"file": "b.json", "verdict": "1 alarm: failed", "changes": changes}
    text = Page(page({**record, "baseline": baseline})).text
    assert text.index("<b>slower</b>") < text.index("out fp16: -1 %")


def test_the_page_shows_the_coverage_of_a_whole_run(record):
    assert record["coverage"] is None
    cells = ["1", "0", *["-"] * (len(COLUMNS) - 2)]
    coverage = {
        "columns": [" ".join(x) for x in COLUMNS], "rows": [["one-pass", "fp16", *cells]],
        "empty": "D <= 64 N < 256: one-pass (fp16)",
    }  # fmt: skip
    text = Page(page({**record, "coverage": coverage})).text
    assert "one-pass" in text
    assert "No problem has D <= 64 N < 256: one-pass (fp16)." in text


def test_a_folder_that_is_none_is_refused(told):
    folder, (said, code) = told
    assert code == 2
    assert f"--fa-report: {folder}/report.json: File exists" in said
