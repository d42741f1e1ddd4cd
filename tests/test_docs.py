"""Every Python block in the documentation runs, and every command in it exists."""

import importlib.resources
import pathlib
import re

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from bench.__main__ import COMMANDS

_ROOT = pathlib.Path(__file__).parent.parent
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs" / "pages").glob("*.md"))]
_SYBIL = Sybil(parsers=[PythonCodeBlockParser()])


def named(path):
    return str(path.relative_to(_ROOT))


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
    examples = {path.stem for path in (_ROOT / "bench" / "examples").iterdir()}
    text = page.read_text()
    assert set(re.findall(r"python -m bench (\w+)", text)) <= set(COMMANDS)
    assert set(re.findall(r"python -m bench\.examples\.(\w+)", text)) <= examples
    assert set(re.findall(r"bench/examples/(\w+)", text)) <= examples


def test_each_source_file_has_its_place():
    page = (_ROOT / "docs" / "pages" / "how-it-works.md").read_text()
    named_files = set(re.findall(r"`(\w+\.py)`", page))
    files = {file.name for file in importlib.resources.files("eqxjit").iterdir()}
    assert named_files == {name for name in files if name.endswith(".py")} - {"__init__.py"}
