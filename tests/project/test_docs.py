"""Every Python block in the documentation runs; every command, file and function in it exists."""

import pathlib
import re

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

import eqxjit
from bench.__main__ import COMMANDS
from bench.commands import figures
from tests.support import helpers
from tests.support.processes import ROOT

_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").glob("*.md"))]
_SYBIL = Sybil(parsers=[PythonCodeBlockParser()])
_SOURCE = pathlib.Path(eqxjit.__file__).parent
_CONTRIBUTING = ROOT / "docs" / "pages" / "contributing.md"


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


def test_each_layer_has_its_place():
    page = (ROOT / "docs" / "pages" / "how-it-works.md").read_text()
    packages = {path.parent.name for path in _SOURCE.glob("*/__init__.py")}
    assert {*re.findall(r"^\| `(_\w+)` \|", page, re.MULTILINE)} == packages
    picture = (ROOT / "docs" / "pages" / "packages.svg").read_text()
    assert {*re.findall(r">(_\w+)<", picture)} == packages


@pytest.mark.parametrize(
    "page", ["how-it-works.md", "contributing.md", "call.svg", "back-ends.svg"]
)
def test_files_exist(page):
    text = (ROOT / "docs" / "pages" / page).read_text()
    files = re.findall(r"\b(_\w+/\w+\.(?:py|c))\b", text)
    assert len(files) > 1
    assert [file for file in files if not (_SOURCE / file).exists()] == []
    tests = re.findall(r"\btests/[\w/]+\.py\b", text)
    assert [file for file in tests if not (ROOT / file).exists()] == []


@pytest.mark.skipif(not helpers.SPECIALIZING, reason="the walk ends with a fast path")
def test_contributors_walk_through_a_first_call(capsys):
    """Its steps are among the functions that the page's snippet prints, in that order."""
    steps = re.findall(r"^\| `(\w+/\w+\.py)` \| `([\w.]+)` \|", _CONTRIBUTING.read_text(), re.M)
    assert len(steps) > 10
    for example in _SYBIL.parse(_CONTRIBUTING).examples():
        example.evaluate()
    lines = capsys.readouterr().out.splitlines()
    calls = iter([re.fullmatch(r"(.*):\d+ (.*)", line).groups() for line in lines])
    assert [step for step in steps if step not in calls] == []
