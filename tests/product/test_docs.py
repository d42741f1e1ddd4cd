"""Every Python block in the documentation runs; every command, file and function in it exists."""

import ast
import code
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


def test_what_the_readme_shows_can_be_pasted(monkeypatch, tmp_path):
    """All of it, one after the other: none is there to be looked at alone."""
    text = (ROOT / "README.md").read_text()
    assert "```py\n" not in text
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    # The first is the bare swap.
    assert "donate" not in blocks[0]
    monkeypatch.chdir(tmp_path)
    # Line by line, where an empty line ends a `with`.
    prompt = _Prompt({"__name__": "__main__"})
    for line in "\n".join([*blocks, ""]).splitlines():
        prompt.push(line)


class _Prompt(code.InteractiveConsole):
    """Python's, but an error ends it."""

    def showsyntaxerror(self, *_, **__):
        raise

    def showtraceback(self):
        raise


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


def names_in(text):
    """The functions, classes, methods and constants that a module defines."""
    tree = ast.parse(text)
    for scope in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        prefix = f"{scope.name}." if isinstance(scope, ast.ClassDef) else ""
        for node in scope.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield prefix + node.name
            elif isinstance(node, ast.Assign):
                names = [name for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)]
                yield from (prefix + name.id for name in names)


def test_functions_exist_where_contributors_are_sent():
    text = _CONTRIBUTING.read_text()
    known = {name for path in _SOURCE.rglob("*.py") for name in names_in(path.read_text())}
    native = (_SOURCE / "_fast" / "native.c").read_text()
    known |= {*re.findall(r"^(?:static .*?(?=\w+\()|#define )(\w+)", native, re.MULTILINE)}
    known |= {path.name for path in _SOURCE.iterdir()}
    names = {*re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`", text)}
    assert len(names) > 20
    assert names - known <= {"CHANGELOG.md", "inside.py", "jax.jit", "native.c"}


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
