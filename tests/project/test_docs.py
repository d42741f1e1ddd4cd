"""Every Python block in the documentation runs; every command, file and function in it exists."""

import importlib.util
import pathlib
import pkgutil
import re
import tomllib
import zlib

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

import eqxjit
import eqxjit.types
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
    """`python -m bench figures` has written all figures of the pages."""
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
    """The steps in the page's table are among the functions that its snippet prints, in order."""
    steps = re.findall(r"^\| `(\w+/\w+\.py)` \| `([\w.]+)` \|", _CONTRIBUTING.read_text(), re.M)
    assert len(steps) > 10
    for example in _SYBIL.parse(_CONTRIBUTING).examples():
        example.evaluate()
    lines = capsys.readouterr().out.splitlines()
    calls = iter([re.fullmatch(r"(.*):\d+ (.*)", line).groups() for line in lines])
    assert [step for step in steps if step not in calls] == []


def test_functions_to_change_for_a_kind_of_node_exist():
    """Each step names a file, and functions in it."""
    steps = re.findall(
        r"^\d\. `(_\w+/\w+\.\w+)`: (.*(?:\n   .*)*)", _CONTRIBUTING.read_text(), re.M
    )
    assert len(steps) > 4
    for file, text in steps:
        source = (_SOURCE / file).read_text()
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", text.replace("`_compat.py`", "")):
            assert re.search(rf"\b{name}\b", source), (file, name)


_WRITTEN = [*_PAGES, *(path for path in sorted(ROOT.glob("*.md")) if path not in _PAGES)]

# The classes of the variables in the pages' examples.
_VARIABLES = {
    "f": eqxjit.types.JitFunction,
    "frozen": eqxjit.types.FrozenFunction,
    "report": eqxjit.types.CompileReport,
    "trace": eqxjit.types.Trace,
}


def has(kind, name):
    """Return whether instances of a class have this attribute."""
    return hasattr(kind, name) or name in getattr(kind, "__dataclass_fields__", {})


def links(text):
    """Return the targets of a page's links and pictures, outside code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(path):
    """Return the anchors of a page's headings, as MkDocs and GitHub write them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"\s", "-", heading) for heading in plain} | set(
        re.findall(r"^::: (\S+)$", path.read_text(), re.MULTILINE)
    )


@pytest.mark.parametrize("page", _WRITTEN, ids=named)
def test_links_lead_to_pages_and_headings(page):
    missing = []
    for link in links(page.read_text()):
        if re.match(r"https?:|mailto:", link):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        notebook = ROOT / "docs" / "notebooks" / f"{target.stem}.ipynb"
        if not target.exists() and notebook.exists():
            continue  # the site shows it as a page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert missing == []


def test_readme_can_be_read_on_pypi():
    """Once `[project.urls]` has an address, README's links must be absolute."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if "urls" in project:
        relative = [link for link in links(_PAGES[0].read_text()) if not link.startswith("http")]
        assert relative == []


def test_names_of_the_api_page_exist():
    """mkdocstrings leaves out members that don't exist, without a warning."""
    page = (ROOT / "docs" / "pages" / "api.md").read_text()
    entries = re.findall(r"^::: (\S+)\n(?:    options:\n      members: \[(.*)\])?", page, re.M)
    assert len(entries) > 20
    missing = []
    for name, members in entries:
        value = pkgutil.resolve_name(name)
        missing += [f"{name}.{m}" for m in re.findall(r"\w+", members) if not has(value, m)]
    assert missing == []
    shown = {name.rpartition(".")[2] for name, _ in entries}
    public = {*eqxjit.__all__, *(n for n in vars(eqxjit.types) if n[0].isupper())}
    assert public - shown == {"fast_filter_jit"}  # the page says that it is `filter_jit`


@pytest.mark.parametrize("page", _WRITTEN, ids=named)
def test_names_in_prose_exist(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    missing = []
    for code in re.findall(r"`([^`\n]+)`", prose):
        for name in re.findall(r"(?<![\w./-])eqxjit(?:\.[a-z]\w*)+(?![\w/])", code, re.I):
            try:
                pkgutil.resolve_name(name)
            except (AttributeError, ImportError):
                missing.append(name)
        match = re.match(r"(\w+)\.(\w+)(?! =)\b", code)
        if match and match[1] in _VARIABLES and not has(_VARIABLES[match[1]], match[2]):
            missing.append(code)
    assert missing == []


def _site():
    path = ROOT / "docs" / "build.py"
    spec = importlib.util.spec_from_file_location("build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_shows_its_version_and_address():
    settings = (ROOT / "docs" / "mkdocs.yml").read_text()
    site = _site().configure(settings, "https://host/eqxjit/", ['{url: "file:///jax.inv"}'])
    assert f"copyright: eqxjit {eqxjit.__version__}\n" in site
    assert 'inventories: [{url: "file:///jax.inv"}]\n' in site
    assert site.endswith("site_url: https://host/eqxjit/\n")


def test_the_site_is_built_without_a_network(monkeypatch, tmp_path, capsys):
    site = _site()
    inventory = tmp_path / "there" / "objects.inv"
    inventory.parent.mkdir()
    content = b"# Sphinx inventory version 2"
    inventory.write_bytes(content)
    addresses = {"there": f"{inventory.parent.as_uri()}/", "gone": f"{tmp_path.as_uri()}/gone/"}
    monkeypatch.setattr(site, "INVENTORIES", addresses)
    assert len(site.inventories(tmp_path)) == 1
    assert (tmp_path / "there.inv").read_bytes() == content
    assert f"No links to {addresses['gone']}" in capsys.readouterr().out


def test_names_of_other_projects_are_linked():
    header = b"# Sphinx inventory version 2\n# Project: x\n# Version: 1\n# zlib\n"
    names = b"jax.Array py:class 1 a.html#$ -\nequinox.error_if py:function 1 b.html#e -\n"
    addresses = _site().addresses(header + zlib.compress(names), "https://x/")
    assert addresses == {
        "jax.Array": "https://x/a.html#jax.Array",
        "equinox.error_if": "https://x/b.html#e",
    }
    page = "<code>jax.Array</code> <code>eqx.error_if</code> <code>jax.gone</code>"
    left_alone = '<a href="y"><code>jax.Array</code></a><pre><code>jax.Array</code></pre>'
    linked = (
        '<a href="https://x/a.html#jax.Array"><code>jax.Array</code></a> '
        '<a href="https://x/b.html#e"><code>eqx.error_if</code></a> <code>jax.gone</code>'
    )
    assert _site().link_names(page + left_alone, addresses) == linked + left_alone


def test_the_page_for_missing_pages_works_under_a_prefix():
    page = '<a href="/index.html"><img src="/a.png"><a href="//host/x">{"base":"/"}'
    expected = '<a href="index.html"><img src="a.png"><a href="//host/x">{"base":"."}'
    assert _site().relative(page) == expected


def test_cells_of_notebook_tables_have_their_headings():
    row = '<tr><td style="x">f</td><td>2</td></tr>'
    head = "<thead><tr><th>function</th><th>traces</th></tr></thead>"
    table = f'<table class="eqxjit">{head}{row}{row}</table>'
    labelled = (
        '<tr><td data-heading="function" style="x">f</td><td data-heading="traces">2</td></tr>'
    )
    assert _site().label_cells(f"{row}{table}") == row + table.replace(row, labelled)
