"""Configuration of the documentation, built by ``make docs``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[1]))
# Without a GPU the kernels can be imported, and documented, under Triton's interpreter alone.
os.environ.setdefault("TRITON_INTERPRET", "1")

project = "fa-verify"
html_title = "fa-verify"
author = "the fa-verify authors"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx-mathjax-offline",
]
exclude_patterns = ["images"]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
smartquotes = False  # -- is the beginning of an option
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_show_sourcelink = False
html_copy_source = False
# The site loads nothing from elsewhere, neither fonts nor scripts.
html_theme_options = {"footer_icons": []}

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
napoleon_use_rtype = False  # a returned value is described in words
napoleon_custom_sections = [("Numerics", "notes_style"), ("Source", "notes_style")]
# Types of other projects are named, not linked: no inventory is downloaded.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|np|hypothesis|st|collections|typing|fa_kernels|fa_verify)\..*"),
    ("py:.*", r"(Any|Array|Callable|Iterable|Iterator|Mapping|Sequence|DenseMask|optional)"),
    ("py:class", r"((tuple|dict)\[|.* ).*"),  # napoleon and autodoc take these for types
]


def _escape_bars(_app: Sphinx, *_of_what: Any) -> None:
    """``|x|`` is an absolute value in the docstrings, not a substitution."""
    lines = _of_what[-1]
    for i, line in enumerate(lines):
        parts = line.split("``")
        parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
        lines[i] = "``".join(parts)


def setup(app: Sphinx) -> None:
    """Connects the hook; Sphinx calls this."""
    app.connect("autodoc-process-docstring", _escape_bars)
