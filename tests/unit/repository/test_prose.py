"""The lint of prose finds each kind of sentence that it names, and leaves others alone."""

from __future__ import annotations

import subprocess
import textwrap

import pytest

from tests import prose


def rules(path: str, text: str) -> list[str]:
    found = sorted(prose.prose(path, textwrap.dedent(text)))
    return [rule for sentence in found for rule, _ in prose.findings(sentence)]


# Sentences that break rules stand in strings here, where the lint does not read.
@pytest.mark.parametrize(
    ("rule", "wrong", "right"),
    [
        (
            "free-relative",
            "What is not declared is found.",
            "Undeclared limitations show up as findings.",
        ),
        ("free-relative", "Who survives takes 90 s.", "A surviving mutant takes 90 s."),
        ("free-relative", "Whose turn it is, is published.", "The warp publishes its turn."),
        ("free-relative", "Tiles: which of them run.", "Tiles that run."),
        ("free-relative", "It is split; what remains is kept.", "It keeps what remains."),
        ("free-relative", "Whatever they hold is ignored.", "What does a kernel guarantee?"),
        ("inverted-genitive", "Of a mask the map is kept.", "The map of a mask is kept."),
        ("inverted-genitive", "Of the output.", "Of the four kernels, two use atomics."),
        ("knowing-machine", "The barrier hears of it.", "The consumer arrives on the barrier."),
        ("knowing-machine", "Wants two warps.", "Readers who know Triton may skip this."),
        ("knowing-machine", "It is told the tile.", "The two are told apart by their names."),
        ("as-of", "As of ``attention``.", "As of Triton 3.6, tuples are specialised."),
        ("ellipsis", "(B, H, M, D) likewise.", "Likewise, the backward pass skips empty tiles."),
        ("ellipsis", "Those of keys.", "Those tests that need a GPU are skipped."),
        ("private-word", "Dirt in padding changes no bit.", "Padding values change no bit."),
        ("private-word", "A call is remembered.", "A call is cached."),
        ("long", "word " * (prose.LONGEST + 1), "word " * prose.LONGEST),
    ],
)
def test_a_rule_finds_its_sentence_and_not_its_repair(rule, wrong, right):
    assert rules("page.md", wrong) == [rule]
    assert rules("page.md", right) == []


@pytest.mark.parametrize(
    ("summary", "found"),
    [
        ("What the backward reads.", ["free-relative"]),
        ("Where the tiles begin.", ["summary"]),
        ("How many tiles fit.", ["summary"]),
        ("Where no key is visible, the output is 0.", []),
        ("Tensors that the backward reads.", []),
    ],
)
def test_a_summary_names_what_it_describes(summary, found):
    assert rules("module.py", f'"""{summary}"""') == found
    assert rules("module.py", f'"""A module.\n\n{summary}\n"""') == [
        x for x in found if x[0] == "f"
    ]


def test_code_is_not_prose():
    page = """
        # What a heading names

        ```python
        what = "dirt"  # What is in a block.
        ```

        The option `--remember` writes it.

        $$
        What dirt \\mathrel{+}= a
        $$

        A formula ends.
        """
    assert rules("page.md", page) == []
    assert rules("page.md", f"{page}\n        What follows a formula is read.") == ["free-relative"]
    module = '''
        """A module::

            What stands in a literal block is code.

        >>> referee
        """
        x = "What is in a string."  # noqa: what a tool reads
        '''
    assert rules("module.py", module) == []


def test_comments_lists_and_tables_hold_sentences():
    module = '''
        def f(x, y):
            """A function.

            Args:
                x: What is read.
                y: (B, H), likewise.
            """
            # A comment of two lines, the second of which
            # is no sentence of its own. Of keys there are two.
            return x  # what is read
        '''
    assert rules("module.py", module) == [
        *("free-relative", "ellipsis", "inverted-genitive", "free-relative")
    ]
    page = """
        - A list of numbers
        - What is in a list

        | a cell | What is in a cell |
        """
    assert rules("page.md", page) == ["free-relative", "free-relative"]


def test_a_finding_names_the_line_of_its_sentence():
    module = """
        x = 1
        # A first sentence. What follows
        # is the second. The third.
        """
    found = prose.prose("module.py", textwrap.dedent(module).lstrip())
    assert [(x.line, x.text) for x in found] == [
        (2, "A first sentence."),
        (2, "What follows is the second."),
        (3, "The third."),
    ]


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A page in a repository of its own, with one sentence that breaks a rule."""
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    (tmp_path / "page.md").write_text("A page.\nDirt is here.\n")
    return tmp_path / "page.md"


def configure(*excepted: str) -> None:
    entry = '[[exceptions]]\npath = "page.md"\nrule = "private-word"\nreason = "x"\nsentence = '
    exceptions = [f'{entry}"{sentence}"' for sentence in excepted]
    prose.CONFIGURATION.write_text("\n".join(['paths = ["."]', *exceptions]))


def test_a_finding_fails_the_lint(page, capsys):
    configure()
    assert prose.main([])
    assert capsys.readouterr().out.startswith("page.md:2: private-word: Dirt is here. (")


def test_an_exception_excuses_its_sentence_alone(page, capsys):
    configure("Dirt is here.")
    assert not prose.main([])
    page.write_text("Dirt is there.\n")
    assert prose.main([])
    assert "stale exception: page.md: private-word: Dirt is here." in capsys.readouterr().out


def test_exceptions_are_kept_in_order(page, capsys):
    page.write_text("Dirt is here. A companion is here.")
    configure("Dirt is here.", "A companion is here.")
    assert prose.main([])
    assert "not in order" in capsys.readouterr().out
