"""A browser renders a report without console messages, and the page is not blank."""

from __future__ import annotations

import json
import subprocess

import pytest

from fa_verify.reporting.html import pictures
from fa_verify.reporting.html.page import page

pytestmark = pytest.mark.chromium

HEAT = {
    "values": [[0.1, None], [2.0, 0.5]], "rows": 2, "columns": 2, "axis": "m", "tile": 1,
    "head": "b=0 h=0", "is_ratio": True,
}  # fmt: skip
RECORD = {
    "version": 3,
    "subject": {"name": "attention", "declares": "nothing", "source": ""},
    "header": ["CPU; torch"],
    "command": "pytest --fa-report=x",
    "started": "2026-01-01T00:00:00",
    "seconds": 1.0,
    "exit_code": 1,
    "results": {"failed": 1, "passed": 2},
    "causes": [
        {
            "number": 1, "title": "Rows <give> NaN", "explains": ["test_a"], "told": "G1 <b>",
            "finding": {
                "output": "out", "heat": HEAT, "where": "b=0", "got": "nan", "want": "0.0",
                "places": "m tile 0",
            },
        }
    ],
    "limits": "",
    "checked": [{"file": "test_a", "claim": "it holds", "by_dtype": {"fp16": {"failed": 1}}}],
    "not_run": [{"reason": "needs a GPU", "tests": 3}],
    "problems": {
        "by_dtype": {"fp16": 7}, "several_tiles": 3, "out_of_range": 1, "unsupported": {},
    },
    "worst": [{"output": "out", "dtype": "fp16", "ratio": None, "replay": "pytest --fa-replay={}"}],
    "distribution": {"edges": [0.1, 1.0], "counts": {"out fp16": [1, 5, 1]}},
    "failures": [
        {
            "test": "test_a", "phase": "call", "text": "",
            "findings": [{"text": "G1 <b>", "output": "out", "heat": HEAT}],
        }
    ],
    "baseline": None,
}  # fmt: skip
# Reports the browser's log and the extent of the page's layout.
PROBE = """<script>
const said = [];
window.addEventListener("error", e => said.push(String(e.message)), true);
window.addEventListener("load", () => {
  const images = [...document.images].map(i => i.naturalWidth);
  // Boxes of lines in the head of a table, for each word: a word that is broken has two.
  const broken = [...document.querySelectorAll("th")].filter(x => {
    const range = document.createRange();
    range.selectNodeContents(x);
    return range.getClientRects().length > x.textContent.trim().split(/\\s+/).length;
  }).map(x => x.textContent);
  document.title = JSON.stringify({said, images, broken, height: document.body.scrollHeight});
});
</script>"""


@pytest.fixture
def browser(tmp_path):
    """Runs headless Chromium on a file, with a profile of its own and without network services."""

    def run(*options: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [
                "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
                "--disable-background-networking", "--disable-component-update",
                "--disable-sync", f"--user-data-dir={tmp_path}/profile",
                "--window-size=1280,3000", *options,
            ],
            capture_output=True, timeout=120,
        )  # fmt: skip

    return run


def test_the_page_is_shown(browser, tmp_path):
    path, shown = tmp_path / "report.html", tmp_path / "page.png"
    path.write_text(page(RECORD))
    done = browser("--enable-logging=stderr", f"--screenshot={shown}", path.as_uri())
    assert done.returncode == 0, done.stderr
    assert b"CONSOLE" not in done.stderr
    blank = tmp_path / "blank.png"
    path.write_text("")
    browser(f"--screenshot={blank}", path.as_uri())
    # A PNG of a single colour is a small file at any size.
    assert shown.stat().st_size > 5 * blank.stat().st_size


def test_every_picture_is_decoded_and_nothing_fails(browser, tmp_path):
    path = tmp_path / "probed.html"
    path.write_text(page(RECORD).replace("<head>", f"<head>{PROBE}", 1))
    done = browser("--dump-dom", path.as_uri())
    title = done.stdout.decode().partition("<title>")[2].partition("</title>")[0]
    found = json.loads(title)
    assert found["said"] == []
    assert found["broken"] == []
    assert found["height"] > 600
    assert len(found["images"]) == (2 if pictures.can_draw() else 0)
    assert all(width > 300 for width in found["images"])


def test_no_word_in_the_head_of_a_wide_table_is_broken(browser, tmp_path):
    columns = [f"D <= {dim} N {n}" for dim in (64, 128, 256) for n in ("< 64", "< 4096", ">= 4096")]
    rows = [["portable two-pass", "fp16", *["123456789"] * len(columns)]]
    record = RECORD | {"coverage": {"columns": columns, "rows": rows, "empty": ""}}
    path = tmp_path / "wide.html"
    path.write_text(page(record).replace("<head>", f"<head>{PROBE}", 1))
    done = browser("--dump-dom", "--window-size=700,3000", path.as_uri())
    title = done.stdout.decode().partition("<title>")[2].partition("</title>")[0]
    assert json.loads(title)["broken"] == []
