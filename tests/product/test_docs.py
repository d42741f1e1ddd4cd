"""Every Python block in the documentation runs, and every command in it exists."""

import pathlib
import re

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

import eqxjit
from bench.__main__ import COMMANDS
from bench.commands import figures
from tests.support.processes import ROOT

_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").glob("*.md"))]
_SYBIL = Sybil(parsers=[PythonCodeBlockParser()])


def named(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", _PAGES, ids=named)
def test_python_blocks_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    document = _SYBIL.parse(page)
    examples = list(document.examples())
    assert len(examples) == page.read_text().count("```python\n")
    for example in examples:
        example.evaluate()


def test_what_the_readme_shows_can_be_pasted(monkeypatch, tmp_path):
    """All of it, one after the other: none is there to be looked at alone."""
    text = (ROOT / "README.md").read_text()
    assert "```py\n" not in text
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    # The first is the bare swap.
    assert "donate" not in blocks[0]
    monkeypatch.chdir(tmp_path)
    exec("\n".join(blocks), {"__name__": "__main__"})


@pytest.mark.parametrize("page", _PAGES, ids=named)
def test_commands_exist(page):
    examples = {path.stem for path in (ROOT / "bench" / "examples").iterdir()}
    text = page.read_text()
    assert set(re.findall(r"python -m bench (\w+)", text)) <= set(COMMANDS)
    assert set(re.findall(r"python -m bench\.examples\.(\w+)", text)) <= examples
    assert set(re.findall(r"bench/examples/(\w+)", text)) <= examples


def test_figures_are_those_on_record():
    """`python -m bench figures` writes them; none of them was measured anywhere else."""
    files = figures.written()
    assert len(files) > len(_PAGES)
    assert [named(path) for path, text in files.items() if text != path.read_text()] == []


def test_a_place_for_figures_is_filled():
    rounds = figures.rounds("calls")
    text = "in <!-- figures: rounds calls --><!-- end --> rounds"
    assert figures.rendered(text) == text.replace("--><!--", f"-->{rounds}<!--")
    table = "<!-- figures: group-table devices -->\nold\n<!-- end -->\n"
    assert "| MLP on 2 devices |" in figures.rendered(table)
    with pytest.raises(SystemExit, match="opens a line"):
        figures.rendered("<!-- figures: rounds calls --><!-- end --> rounds")


def test_each_layer_has_its_place():
    page = (ROOT / "docs" / "pages" / "how-it-works.md").read_text()
    root = pathlib.Path(eqxjit.__file__).parent
    packages = {path.parent.name for path in root.glob("*/__init__.py")}
    assert {*re.findall(r"^\| `(_\w+)` \|", page, re.MULTILINE)} == packages
    files = re.findall(r"`(_\w+/\w+\.py)`", page)
    assert len(files) > 10
    assert all((root / file).exists() for file in files)
